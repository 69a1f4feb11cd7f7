"""Quantizer, the base class of all quantizers, those of users included: turns one
tensor of a product into codes.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics import FP8_DTYPES, HYBRID
from ..ops import _checks, _shapes
from ._tensor import QTensor


class GEMMType(enum.StrEnum):
    """The three products of a layer: `y = x @ kernel`, `dx = grad @ kernel.T`,
    `dkernel = x.T @ grad`.
    """

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


def no_reduction(amax: jax.Array, leaf: Any, combine: Any = None) -> jax.Array:
    """Return `amax` unchanged: without a mesh it is the amax of the whole tensor."""
    return amax


class OperandOptions(NamedTuple):
    """The use of one operand by its products, for `Quantizer.quantize_operand`.

    Attributes:
        rows, cols: how many dimensions of the operand are rows, and how many are
            columns.
        columnwise: whether a product reads `data_t`.
        column_sums: whether `quantize_operand` also returns the sums over rows, f32
            `[*batch, *cols]`.
        reduce: `(amax, state leaf or None, combine=lax.pmax) -> amax`, over the devices
            that share the state.
        contract_first: whether the first product contracts the rows, so that it reads
            `data_t`.
    """

    rows: int = 1
    cols: int = 1
    columnwise: bool = True
    column_sums: bool = False
    reduce: Callable[..., Any] = no_reduction
    contract_first: bool = False

    def sum_rows(self, x: jax.typing.ArrayLike) -> jax.Array | None:
        """Sum x `[*batch, *rows, *cols]` over its rows, to f32 `[*batch, *cols]`; None
        unless `column_sums` is set.
        """
        if not self.column_sums:
            return None
        first = x.ndim - self.rows - self.cols
        rows = tuple(range(first, first + self.rows))
        return jnp.sum(x.astype(jnp.float32), axis=rows)


DEFAULT = OperandOptions()

# The result of `quantize_operand`: the QTensor, and with `column_sums` the sums over
# rows, else None.
Quantized = tuple[QTensor, jax.Array | None]


class Quantizer:
    """Base class: turns one tensor of a product into codes. It is pure and hashable:
    equal quantizers do the same.

        class Int8(jaxfp8.Quantizer):
            def quantize(self, x, state):
                scale_inv = jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1) / 127
                codes = jnp.round(x / scale_inv).astype(jnp.int8)
                return jaxfp8.QTensor(codes, scale_inv), state

        recipe = jaxfp8.CustomRecipe(lambda role: Int8())

    A product quantizes its operands as matrices, `x` `[m, k]`, `kernel` `[n, k]` and
    `grad` `[m, n]`, and multiplies twice with each: once along the last dimension, with
    `data`, and once along the first, with `data_t`:

        fprop   y       = x.data      by kernel.data        contracts k
        dgrad   dx      = grad.data   by kernel.data_t      contracts n
        wgrad   dkernel = x.data_t    by grad.data_t        contracts m

    Products transpose `data` where a quantizer returns no `data_t`. XLA drops a layout
    that no product reads.
    """

    # Whether one scale is that of the whole tensor, so that both layouts hold the same
    # codes.
    has_one_scale = False
    # Whether the scale of a quantizer without state is chosen by an amax over all
    # devices that hold parts of a tensor.
    reduces_amax = False
    # The rows and columns that share a scale, where a quantizer of FP8 has a scale for
    # each block.
    block = None
    # A quantizer that brings its own product defines this method:
    #
    #     def qgemm(
    #         self, qx, qw, *, sx, sw, out_dtype, gemm_type, qresult_x, qresult_w
    #     ): ...
    #
    # `qx` codes `[m, k]` and `qw` codes `[n, k]`, both with the contracting dimension
    # last; `sx`, `sw` their scale_inv (None for an operand in high precision);
    # `gemm_type` a GEMMType, so also `"fprop"`, `"dgrad"`, `"wgrad"`; `qresult_x`,
    # `qresult_w` the whole QTensors. qgemm returns `[m, n]` of `out_dtype`; a bias is
    # added afterwards. fprop and wgrad call the qgemm of the quantizer of x, dgrad
    # calls the qgemm of the quantizer of grad; where that quantizer has no qgemm, they
    # call the qgemm of the other operand's quantizer.
    qgemm = None

    def init(self) -> Any:
        """Return the first state, a pytree of float32 arrays, or None for a quantizer
        without state.

        Numbers in a state are finite and not negative. The uses of one state (two calls
        of a layer, microbatches, devices) combine by the elementwise maximum, in which
        0 means that the quantizer did not run. So a state can hold an amax, or a
        counter that only counts up.
        """
        return None

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """Quantize a matrix; return `(QTensor, next state)`.

        Args:
            x: bfloat16, float16 or float32 `[rows, cols]`; on a mesh in `jit` the whole
                tensor, inside `shard_map` the part of one device.
            state: the result of `init`, or the next state of the last step.

        Raises:
            NotImplementedError: the subclass does not define `quantize`.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: quantize(x, state) -> (QTensor, state)"
        )

    # Products call the methods below. -------------------------------------------------

    def check_init(self) -> None:
        """Raise unless `init` returns a legal state.

        Raises:
            TypeError: a leaf of the state is not a float32 array.
            ValueError: a number in the state is negative or not finite.
        """
        where = f"{type(self).__name__}.init"
        with jax.ensure_compile_time_eval():
            for leaf in jax.tree.leaves(self.init()):
                if getattr(leaf, "dtype", None) != jnp.float32:
                    kind = getattr(leaf, "dtype", type(leaf).__name__)
                    raise TypeError(
                        f"{where}: expected float32 arrays, as gradients return them, "
                        f"got {kind}"
                    )
                if not np.all((np.asarray(leaf) >= 0) & np.isfinite(leaf)):
                    raise ValueError(
                        f"{where}: expected numbers that are finite and not negative, "
                        "as uses combine by max and 0 is unused; got "
                        f"{np.asarray(leaf)}"
                    )

    def check_state(self, name: str, state: Any) -> None:
        """Raise unless `state` is one of this quantizer; `name` names the argument in
        the message.

        Raises:
            TypeError: `state` has another structure than the result of `init`, or a
                leaf another shape.
        """
        first = jax.eval_shape(self.init)
        _expect_alike(f"{name}: {type(self).__name__}", first, state)

    def fixed_scale(self, name: str, scale: Any) -> Any:
        """Return the Scale that `jaxfp8.freeze` keeps in place of the state; None where
        there is no state.

        Raises:
            ValueError: `scale` has leaves: only the author of this quantizer knows
                which scale its state stands for. `name` names the quantizer in the
                message.
        """
        if jax.tree.leaves(scale):
            raise ValueError(
                f"{name}: expected delayed scaling, or a quantizer without state, got "
                f"{self!r}"
            )

    def quantize_operand(
        self, x: jax.Array, scale: Any, options: OperandOptions = DEFAULT
    ) -> Quantized:
        """Quantize an operand of a product.

        Args:
            x: bfloat16, float16 or float32 `[*batch, *rows, *cols]`.
            scale: what the state gives this quantizer: a Scale for delayed scaling,
                the state itself for a user's quantizer; None where there is no state.
            options: the part of the operand in its product.

        Returns:
            `(q, column sums f32 [*batch, *cols] or None)`; `q.recorded` is the amax
            of delayed scaling, or the next state of a user's quantizer.

        Raises:
            TypeError, ValueError: a user's `quantize` returned no `(QTensor, state)`
                for the matrix that it got.
        """
        rows, cols, contract_first = options.rows, options.cols, options.contract_first
        batch = x.ndim - rows - cols
        state = self.init() if scale is None else scale
        # A user's `quantize` knows matrices alone: rows and columns are merged, batch
        # dimensions are vmapped.
        matrices = _shapes.merge(x, *[1] * batch, rows)

        one_scale = (1, 1) if batch else (1,)

        def as_scales(scale):
            return scale if scale.ndim == 2 else scale.reshape(one_scale)

        def of_matrix(matrix):
            matrix = matrix.mT if contract_first else matrix
            result = self.quantize(matrix, state)
            q, next_state = _checked_result(self, result, matrix.shape, state)
            if contract_first:
                q = q.transposed()
            return q.map_scales(as_scales), next_state

        # The devices that share a state agree on the next one, and all matrices of a
        # batch have one state.
        def combined(new, old):
            if batch:
                new = jnp.max(new, axis=tuple(range(batch)))
            return options.reduce(new.astype(jnp.float32), old)

        function = of_matrix
        for _ in range(batch):
            function = jax.vmap(function)
        q, next_state = function(matrices)
        next_state = (
            None if scale is None else jax.tree.map(combined, next_state, state)
        )
        data, data_t = q.data.reshape(x.shape), q.data_t
        if data_t is not None:
            leading, m, n = _shapes.parts(x.shape, rows, cols)
            data_t = data_t.reshape(*leading, *n, *m)
        q = dataclasses.replace(
            q, data=data, data_t=data_t, recorded=next_state, cols=cols
        )
        return q, options.sum_rows(x)


class FP8Quantizer(Quantizer):
    """Base of the quantizers of this package that make FP8 codes; subclasses define
    `quantize_operand`.

    Attributes:
        fp8_dtype: the dtype of the codes, float8_e4m3fn or float8_e5m2.
        power_2_scale: whether scales are powers of two.
    """

    power_2_scale = False

    def __post_init__(self) -> None:
        dtype = self.fp8_dtype
        # HYBRID has two dtypes; numpy takes the other formats as theirs.
        if dtype is HYBRID:
            dtype = dtype.name
        dtype = _checks.dtype(type(self).__name__, "fp8_dtype", dtype, FP8_DTYPES)
        object.__setattr__(self, "fp8_dtype", dtype)

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """Quantize a matrix; return `(QTensor, next state)`."""
        x = _checks.high_precision(f"{type(self).__name__}.quantize", "x", x)
        return self.quantize_operand(x, None)[0], state


def _expect_alike(where, old, new) -> None:
    """Raise a TypeError unless two states have the same structure and shapes."""
    needed, got = (jax.tree.map(np.shape, state) for state in (old, new))
    if jax.tree.structure(old) != jax.tree.structure(new) or needed != got:
        raise TypeError(f"{where}: expected a state of shapes {needed}, got {got}")


def _checked_result(quantizer, result, shape, state) -> tuple[QTensor, Any]:
    """Return the result of `quantize` for a matrix of this shape and a state."""
    where = f"{type(quantizer).__name__}.quantize"
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[0], QTensor):
        raise TypeError(f"{where}: expected (QTensor, state), got {result}")
    q, next_state = result
    if getattr(q.scale_inv, "ndim", 3) > 2:
        raise TypeError(
            f"{where}: scale_inv: expected f32[1], or a scale for each block, got "
            f"{q.scale_inv}"
        )
    _checks.shape(where, "data", q.data, shape)
    if q.data_t is not None:
        _checks.shape(where, "data_t", q.data_t, shape[::-1])
    elif q.scale_inv_t is not None:
        raise ValueError(f"{where}: scale_inv_t: expected data_t beside it, got None")
    _expect_alike(where, state, next_state)
    return result
