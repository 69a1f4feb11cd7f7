"""QTensor: a quantized tensor, from codes to GEMM, and how it is dequantized."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..numerics import FP8_DTYPES
from ..ops import _blocks, _shapes
from ..ops._support import is_for_cpu

Block = tuple[int | None, int | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized tensor; a pytree. Quantizers make it, products multiply it, and the
    backward keeps it.

    Attributes:
        data: codes `[*batch, *rows, *cols]`: FP8, or any dtype that a user's quantizer
            chooses; or the tensor itself, in high precision.
        scale_inv: f32[1], or a scale for each block, f32 or float8_e8m0fnu
            `[*batch, rows / r, cols / c]`, rounded up; `data * scale_inv` approximates
            the original. None in high precision.
        data_t: codes of the same tensor as `[*batch, *cols, *rows]`, or None. GEMMs
            that contract the rows read it.
        scale_inv_t: the scales of `data_t`, where it has its own: blocks along the rows
            are other blocks. Without them `data_t` holds the codes of `data`.
        source: the tensor that was quantized, which gets the gradient; or None.
            `jaxfp8.quantize_params` sets it.
        recorded: what the quantizer's state is to record of the tensor: the amax f32
            `(1,)` of delayed scaling, or the next state of a user's quantizer; or None.
        block: `(r, c)`, the rows and columns that share a scale, in `data` and, with
            `scale_inv_t`, in `data_t`; None in place of r or c means all rows or
            columns. Without `block` the tensor has one scale f32[1], or the scales
            `[R, C]` divide the codes evenly.
        power_2_scale: whether scales for blocks are powers of two, whatever their
            dtype.
        cols: how many of the last dimensions of `data` are its columns; all dimensions
            between them and the batch dimensions are its rows.
    """

    data: jax.Array
    scale_inv: jax.Array | None
    data_t: jax.Array | None = None
    scale_inv_t: jax.Array | None = None
    source: jax.Array | None = None
    recorded: Any = None
    block: Block | None = dataclasses.field(default=None, metadata={"static": True})
    cols: int = dataclasses.field(default=1, metadata={"static": True})
    power_2_scale: bool = dataclasses.field(default=False, metadata={"static": True})

    def __jax_array__(self) -> NoReturn:
        """Refuse to be an array: a layer that does not know codes would print them in
        its error, or round them.
        """
        raise TypeError(
            f"QTensor {list(self.shape)}: expected a product of jaxfp8, got an "
            "operation on arrays. Layers of jaxfp8 take codes as their kernels, such "
            "as jaxfp8.linen.Dense, and so does jaxfp8.dot_general; nn.Dense does "
            "not: give it the kernel, which is `source`"
        )

    def is_all_of(self, operand: jax.Array) -> bool:
        """Tell whether `operand`, the array that a product took from this QTensor, is
        its codes and not its source.
        """
        has_codes = self.source is None and self.data is not None
        return has_codes and self.data.dtype == operand.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return self.data.ndim

    @property
    def has_one_scale(self) -> bool:
        """Tell whether one scale is that of the whole tensor."""
        scale_inv = self.scale_inv
        return scale_inv is not None and self.block is None and scale_inv.ndim <= 1

    @property
    def has_one_code(self) -> bool:
        """Tell whether both layouts hold the same codes: with one scale, or a scale for
        each square block.
        """
        is_square = self.block is not None and self.block[0] == self.block[1]
        return is_square or self.has_one_scale

    @property
    def is_fp8(self) -> bool:
        """Tell whether the tensor has codes, and these are FP8."""
        return self.scale_inv is not None and self.data.dtype in FP8_DTYPES

    @property
    def is_tensorwise(self) -> bool:
        """Tell whether the tensor has FP8 codes with one scale."""
        return self.is_fp8 and self.has_one_scale

    def transposed(self, batch: int = 0) -> "QTensor":
        """Return the tensor with its rows as columns, `[*batch, *cols, *rows]`."""
        rows, cols, data_t = self.ndim - self.cols - batch, self.cols, self.data_t
        if data_t is None:
            data_t = _shapes.transpose(self.data, rows, cols)
        source = jax.tree.map(lambda x: _shapes.transpose(x, rows, cols), self.source)
        scale_inv, scale_inv_t, block = self.scale_inv, None, self.block
        if self.scale_inv_t is not None:
            scale_inv, scale_inv_t = self.scale_inv_t, scale_inv
        elif scale_inv is not None and not self.has_one_scale:
            scale_inv = scale_inv.mT
            block = block and block[::-1]
        return dataclasses.replace(
            self,
            data=data_t,
            data_t=self.data,
            scale_inv=scale_inv,
            scale_inv_t=scale_inv_t,
            source=source,
            block=block,
            cols=rows,
        )

    def for_next_state(self) -> "QTensor":
        """Return the QTensor without codes: the next state takes what was recorded and,
        for one scale, the `scale_inv`.
        """
        is_needed = self.has_one_scale and self.recorded is not None
        scale_inv = self.scale_inv if is_needed else None
        return QTensor(None, scale_inv, recorded=self.recorded, cols=self.cols)

    def map_scales(self, function: Callable[[jax.Array], jax.Array]) -> "QTensor":
        """Return the QTensor with `function(scale)` in place of each array of
        scales.
        """
        scales = self.scale_inv, self.scale_inv_t
        scale_inv, scale_inv_t = jax.tree.map(function, scales)
        return dataclasses.replace(self, scale_inv=scale_inv, scale_inv_t=scale_inv_t)

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "QTensor":
        """Rearrange the codes and the source by `function`: an `all_gather`, a slice, a
        transpose.

        Inside `shard_map`, codes then cross devices instead of kernels. The gradient
        goes back through `function`:

            # gradient: reduce-scattered
            kernel.map(lambda a: jax.lax.all_gather(a, "fsdp", axis=0, tiled=True))

        Args:
            function: array -> array; called with the codes as uint8, and with the
                source. The function may move elements, not change them. Scales of
                square blocks go through it too, so it has to move whole blocks.

        Returns:
            A QTensor without `data_t`.

        Raises:
            ValueError: the tensor has a scale for each block, and the blocks are not
                square, so that `data_t` has codes of its own; or `function` gives codes
                and scales whose shapes do not fit.
        """
        if not self.has_one_code:
            raise ValueError(
                "QTensor.map: expected a tensor with one scale, or with square "
                f"blocks, got scales of shape {self.scale_inv.shape} for blocks "
                f"{self.block}; move the kernel before it is quantized"
            )
        q = self.moved(function)
        if not self.has_one_scale:
            got = q.scale_inv.shape
            needed = (*q.shape[:-2], *_blocks.count(self.block, *q.shape[-2:]))
            if self.ndim != self.scale_inv.ndim or got != needed:
                raise ValueError(
                    f"QTensor.map: function: expected whole blocks {self.block} to "
                    f"move, scales {needed} beside codes {q.shape}; got {got}; move "
                    "the kernel before it is quantized"
                )
        return q

    def moved(self, function: Callable[[jax.Array], jax.Array]) -> "QTensor":
        """Return the QTensor without `data_t`, with codes, scales of blocks and source
        moved by `function`, which moves whole blocks.
        """
        scale_inv = self.scale_inv
        if not self.has_one_scale:
            scale_inv = through_bytes(function, scale_inv)
        return dataclasses.replace(
            self,
            data=through_bytes(function, self.data),
            data_t=None,
            scale_inv=scale_inv,
            scale_inv_t=None,
            source=jax.tree.map(function, self.source),
            cols=1,
        )

    def dequantize(self, dtype: Any) -> jax.Array:
        """Return `data * scale_inv` in `dtype`: one multiplication in f32, one
        rounding.

        The gradient of the result is, unchanged, the gradient of `source`.

        Raises:
            TypeError: a gradient is taken through codes that have no source.
        """
        if self.scale_inv is None:
            return self.data.astype(dtype)
        data, scale_inv = self.data, self.scale_inv
        if self.source is not None:
            data, scale_inv = jax.lax.stop_gradient((data, scale_inv))
        if self.has_one_scale and self.is_fp8:
            values = ops.dequantize(data, scale_inv, dtype)
        else:
            data, scale_inv = _final((data, scale_inv))
            values = dequantized(data, scale_inv, self.block, self.cols).astype(dtype)
        return values if self.source is None else _straight_through(self.source, values)


def through_bytes(
    function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """Return `function(x)`; a dtype of one byte goes through it as uint8, because XLA
    widens float8 numbers where it cannot move them.
    """
    if x.dtype.itemsize > 1:
        return function(x)
    return function(x.view(jnp.uint8)).view(x.dtype)


@jax.custom_jvp
def _straight_through(source, values):
    """Return `values`, with the gradient of `source`."""
    return values


@_straight_through.defjvp
def _(primals, tangents):
    return primals[1], tangents[0].astype(primals[1].dtype)


@jax.custom_jvp
def _final(codes_and_scales):
    """Return codes and scales, which have no derivative."""
    return codes_and_scales


@_final.defjvp
def _(primals, tangents):
    raise TypeError(
        "QTensor.dequantize: a QTensor without its source has no gradient; see "
        "jaxfp8.quantize_params"
    )


def value_of(operand: jax.Array, codes: Any, dtype: Any) -> jax.Array:
    """Return an operand of a product in `dtype`, dequantized where the operand is codes
    without a source.
    """
    is_codes = isinstance(codes, QTensor) and codes.is_all_of(operand)
    return codes.dequantize(dtype) if is_codes else operand.astype(dtype)


def dequantized(
    data: jax.Array, scale_inv: jax.Array, block: Block | None, cols: int = 1
) -> jax.Array:
    """Return `data * scale_inv` in f32; the last `cols` dimensions of data are its
    columns.

    Raises:
        ValueError: the shape of `scale_inv` is not one scale for each block of `data`.
    """
    if scale_inv.ndim <= 1:
        return data.astype(jnp.float32) * scale_inv.astype(jnp.float32).reshape(())
    batch, first = scale_inv.ndim - 2, data.ndim - cols
    m, n = math.prod(data.shape[batch:first]), math.prod(data.shape[first:])
    counts = scale_inv.shape[batch:]
    if block is None:  # equal blocks
        block = -(-m // max(counts[0], 1)), -(-n // max(counts[1], 1))
    is_right = _blocks.count(block, m, n) == counts
    if not is_right or scale_inv.shape[:batch] != data.shape[:batch]:
        raise ValueError(
            f"QTensor: scale_inv: expected a scale for each block {block} of "
            f"{data.shape}, got shape {scale_inv.shape}; block=(rows, cols) says how "
            "many elements share a scale"
        )
    return _blocks.scaled(data.astype(jnp.float32), scale_inv, block, m, n)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class _Bytes:
    """FP8 numbers as uint8 `data`, and their `dtype`."""

    data: jax.Array
    dtype: np.dtype


def as_bytes(q: QTensor) -> QTensor:
    """Return a QTensor with bytes in place of FP8, as the backward keeps it.

    A loop stacks what its backward keeps, and XLA's CPU compiler has no stacks of FP8:
    each iteration would convert the whole stack to float16 and back. Programs for other
    platforms keep FP8: on a mesh XLA gathers a kernel's codes once for both products
    that read them, where codes and bytes would be gathered each.
    """

    def convert(x):
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
            return _Bytes(jax.lax.bitcast_convert_type(x, jnp.uint8), x.dtype)
        return x

    return jax.tree.map(convert, q) if is_for_cpu() else q


def as_codes(tree: Any) -> Any:
    """Return a tree with FP8 in place of the bytes of `as_bytes`."""

    def convert(x):
        return jax.lax.bitcast_convert_type(x.data, x.dtype) if _is_bytes(x) else x

    return jax.tree.map(convert, tree, is_leaf=_is_bytes)


def _is_bytes(x) -> bool:
    return isinstance(x, _Bytes)
