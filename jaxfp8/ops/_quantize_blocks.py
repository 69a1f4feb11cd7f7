"""FP8 codes with a scale for each block: quantize_blocks, and with their transpose
quantize_blocks_transpose.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES, _scaling, encode
from . import _blocks, _checks, _ffi, _shapes
from ._primitive import Op, dims

SCALES = ("f32", "e8m0")
ROUNDINGS = ("ceil", "floor")


def quantize_blocks(
    x: ArrayLike,
    dtype: DTypeLike,
    *,
    block: tuple[int | None, int | None],
    scale: str = "f32",
    rounding: str = "ceil",
    power_2_scale: bool = False,
    rows: int = 1,
    cols: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Quantize each block of a matrix with its own scale.

    For each block, where amax is the largest `|x|` of the block:

        scale="f32"     sf = min(FP8_MAX / amax, 2**126), or 1 where amax is 0 or not
                        finite; with power_2_scale rounded down to a power of two.
                        data = quantize(x, sf), scale_inv = 1 / sf
        scale="e8m0"    e = ceil(log2(amax / FP8_MAX)), or
                        floor(log2(amax)) - floor(log2(FP8_MAX)) for
                        rounding="floor"; at least -127.
                        data = quantize(x, 2**-e), scale_inv = 2**e

    "ceil" is the smallest power of two with which nothing saturates. "floor" is the
    rule of the OCP Microscaling Formats (MX) specification, version 1.0: the largest
    values of a block saturate where amax is above 1.75 times a power of two. A block of
    zeros has the smallest E8M0 scale, 2**-127.

    With E8M0 scales an Inf or NaN makes the scale and all codes of its block NaN: no
    power of two fits, and a product contracts over the block, so that it loses the same
    results as by that element alone. With f32 scales the element alone becomes a NaN
    code, and the block has scale 1, as a whole tensor has in current scaling.

    Args:
        x: bfloat16, float16 or float32 `[..., *m, *n]`.
        dtype: float8_e4m3fn or float8_e5m2.
        block: `(r, c)`: rows and columns of a block, None for all of them. (1, 32) is
            MX, (1, 128) and (128, 128) are block scaling, (1, None) is row-wise
            scaling. The last block of a dimension may be smaller.
        scale: "f32" or "e8m0", the kind of the scales.
        rounding: "ceil" or "floor", of E8M0 exponents.
        power_2_scale: whether f32 scales are rounded down to powers of two.
        rows, cols: the numbers of dimensions that m and n stand for. Blocks cut the
            merged matrix.

    Returns:
        `(data, scale_inv)`: data of `dtype` with the shape of x; scale_inv float32 or
        float8_e8m0fnu `[..., ceil(m / r), ceil(n / c)]`.

    Raises:
        TypeError: x or dtype has another dtype, power_2_scale is no bool; or the op is
            differentiated.
        ValueError: x has fewer dimensions than `rows + cols`; block, scale or rounding
            is not listed above; or power_2_scale comes with E8M0 scales, or
            rounding="floor" with f32 scales.
    """
    options = dtype, block, scale, rounding, power_2_scale, rows, cols
    return _QuantizeBlocks.quantize(x, *options)


def quantize_blocks_transpose(
    x: ArrayLike,
    dtype: DTypeLike,
    *,
    block: tuple[int | None, int | None],
    scale: str = "f32",
    rounding: str = "ceil",
    power_2_scale: bool = False,
    rows: int = 1,
    cols: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize the blocks of `x` and those of its transpose, for the product that
    contracts the other dimension.

    Equivalent to, with one read of `x` (two where blocks are whole rows):

        data, scale_inv = quantize_blocks(x, dtype, block=block, ...)
        data_t, scale_inv_t = quantize_blocks(x.mT, dtype, block=block, ...)

    In both layouts blocks lie along the last dimension, so data_t has other codes than
    data unless blocks are square.

    Args:
        x: bfloat16, float16 or float32 `[..., *m, *n]`.
        dtype: float8_e4m3fn or float8_e5m2.
        block, scale, rounding, power_2_scale: see `quantize_blocks`.
        rows, cols: the numbers of dimensions that m and n stand for. Blocks cut the
            merged matrix.

    Returns:
        `(data, scale_inv, data_t, scale_inv_t)`: data `[..., *m, *n]` and data_t
        `[..., *n, *m]` of `dtype`; scale_inv `[..., ceil(m / r), ceil(n / c)]` and
        scale_inv_t `[..., ceil(n / r), ceil(m / c)]`, float32 or float8_e8m0fnu.

    Raises:
        TypeError, ValueError: see `quantize_blocks`.
    """
    options = dtype, block, scale, rounding, power_2_scale, rows, cols
    return _QuantizeBlocksTranspose.quantize(x, *options)


class _QuantizeBlocks(Op):
    """Quantize blocks, without or with `transpose` also those of the transpose, by the
    same custom call.

    Attributes:
        block, rows, cols: the arguments of `quantize_blocks`.
        dtype: the dtype of the codes.
        scaling: "f32", "f32_power_2", "e8m0_ceil" or "e8m0_floor": the kind of the
            scales, and how they are rounded.
    """

    name = "quantize_blocks"
    custom_call = "quantize_blocks_transpose"
    transpose = False
    block: tuple[int | None, int | None]
    rows: int
    cols: int
    dtype: np.dtype
    scaling: str

    @classmethod
    def quantize(cls, x, dtype, block, scale, rounding, power_2_scale, rows, cols):
        """Check the arguments, and bind the primitive."""
        name = cls.name
        x = _checks.high_precision(name, "x", x, rows + cols)
        dtype = _checks.dtype(name, "dtype", dtype, FP8_DTYPES)
        # Options that do not go together are refused: one of them would have no effect.
        _checks.one_of(name, "scale", scale, SCALES)
        _checks.one_of(name, "rounding", rounding, ROUNDINGS)
        power_2_scale = _checks.flag(name, "power_2_scale", power_2_scale)
        if scale == "e8m0" and power_2_scale:
            raise ValueError(
                f"{name}: power_2_scale: E8M0 scales are powers of two anyway; leave "
                'it out for scale="e8m0"'
            )
        if scale == "f32" and rounding != "ceil":
            raise ValueError(
                f'{name}: rounding: expected "ceil" for scale="f32", got {rounding!r}; '
                'it goes with "e8m0"'
            )
        scaling = scale
        if power_2_scale:
            scaling = "f32_power_2"
        if scale == "e8m0":
            scaling = f"e8m0_{rounding}"
        block = _blocks.checked(name, "block", block)
        return tuple(cls(block, int(rows), int(cols), dtype, scaling)(x))

    def names(self, x):
        leading = dims("batch", x - self.rows - self.cols)
        row, col = dims("row", self.rows), dims("col", self.cols)
        results = []
        for sides in [(row, col), (col, row)][: 1 + self.transpose]:
            results.append((leading, *sides))
            results.append(_blocks.scale_names(leading, *sides, self.block))
        return results[:1], results

    def sizes(self, x):
        m, n = _shapes.merged(x[len(x) - self.rows - self.cols :], self.rows)
        _, results = self.names(len(x))
        sizes = {}
        for (_, *blocks), sides in zip(results[1::2], [(m, n), (n, m)], strict=False):
            counts = _blocks.count(self.block, *sides)
            sizes |= zip(sum(blocks, ()), counts, strict=True)
        return sizes

    def dtypes(self, x):
        scales = jnp.float32 if self.scaling.startswith("f32") else _blocks.E8M0
        return [self.dtype, scales] * (1 + self.transpose)

    def reference(self, x):
        data, scale_inv = self.quantized(x, self.block)
        if not self.transpose:
            return data, scale_inv
        data_t, scale_inv_t = data, scale_inv
        # Blocks of the transpose lie down the columns of x. Transpose codes and not x:
        # they have half the bytes, or less.
        if self.block[0] != self.block[1]:
            data_t, scale_inv_t = self.quantized(x, self.block[::-1])
        data_t = _shapes.transpose(data_t, self.rows, self.cols)
        return data, scale_inv, data_t, scale_inv_t.mT

    def quantized(self, x, block):
        """Quantize blocks in jnp."""
        # Vmapped dimensions are leading dimensions like any other.
        leading = x.shape[: x.ndim - self.rows - self.cols]
        matrix = _shapes.merge(x, *[1] * len(leading), self.rows)
        m, n = matrix.shape[-2:]
        # 1. Cut the matrix into blocks, and find a scale for each.
        blocks = _blocks.cut(matrix, block)
        amax = _scaling.abs_max(blocks, axis=(-3, -1))
        factor, scale_inv = _blocks.scales_of(amax, self.dtype, self.scaling)
        # 2. Quantize each block, and put the matrix together again. Move the codes as
        #    bytes: XLA's CPU compiler may move FP8 through float16, which changes the
        #    bits of NaNs.
        codes = encode(blocks, factor[..., :, None, :, None], self.dtype)
        data = _blocks.uncut(codes.view(jnp.uint8), m, n)
        return data.reshape(x.shape).view(self.dtype), scale_inv

    def call(self, x, on_cpu):
        """Make the custom call."""
        # 1. Merge the dimensions to groups of matrices.
        types, block = self.results(x), self.block
        (groups,), _ = self.in_groups([x], types)
        g, m, n = groups.shape
        # 2. CPUs take any block and order scales by block. GPUs take the blocks of
        #    cuBLASLt, order scales as it does, and have scratch for amaxes of lines.
        count, attribute = _blocks.count, np.int64([b or 0 for b in block])
        if not on_cpu:
            count, attribute = _blocks.stored_shape, _blocks.NAMES[block]
        scales = types[1].dtype
        if scales == _blocks.E8M0:
            scales = jnp.uint8
        sides = [(m, n), (n, m)][: 1 + self.transpose]
        results, lines = [], 0
        for matrix in sides:
            results.append(((g, *matrix), self.dtype))
            results.append(((g, *count(block, *matrix)), scales))
            lines += matrix[0] * (None in block)
        if not on_cpu:
            results.insert(2, ((g, lines), jnp.float32))
        # 3. Call, and order the scales by block. XLA cancels this with the product's
        #    `to_stored`.
        outputs = _ffi.call(
            self.custom_call, results, groups, block=attribute, scaling=self.scaling
        )
        if not on_cpu:
            outputs.pop(2)
            for i, matrix in enumerate(sides):
                scales = outputs[2 * i + 1]
                outputs[2 * i + 1] = _blocks.by_block(scales, block, *matrix)
        pairs = zip(outputs, types, strict=True)
        return [x.view(result.dtype).reshape(result.shape) for x, result in pairs]

    def cpu(self, x):
        return self.call(x, True)

    def cuda(self, x):
        # The kernel has the blocks that cuBLASLt multiplies. Others are quantized in
        # jnp.
        if self.block not in _blocks.NAMES:
            return self.reference(x)
        return self.call(x, False)

    def on_one_device_only(self):
        # On a mesh that cuts blocks as long as the matrix, devices have to reduce their
        # amaxes, which XLA does with the reference. Other blocks lie on one device
        # each, which quantizes them by itself.
        return None in self.block


class _QuantizeBlocksTranspose(_QuantizeBlocks):
    name = "quantize_blocks_transpose"
    transpose = True
