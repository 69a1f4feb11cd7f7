"""Quantizer: what turns one tensor of a product into codes; users write their own."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..numerics import FP8_DTYPES, Format
from ..ops import _blocks
from ._tensor import QTensor


class GEMMType(enum.StrEnum):
    """The three products of a layer: `y = x @ kernel`, `dx = grad @ kernel.T`, `dkernel = x.T @ grad`."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


def alone(amax: jax.Array, leaf: Any, combine: Any = None) -> jax.Array:
    """No mesh: the amax at hand is that of the whole tensor."""
    del leaf, combine
    return amax


class Quantizer:
    """Turns one tensor of a product into codes. Pure, and hashable: two that are equal do the same.

        class Int8(jaxfp8.Quantizer):
            def quantize(self, x, state):
                scale_inv = jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1) / 127
                return jaxfp8.QTensor(jnp.round(x / scale_inv).astype(jnp.int8), scale_inv), state

        recipe = jaxfp8.CustomRecipe(lambda role: Int8())

    A product quantizes its operands as matrices, `x` `[m, k]`, `kernel` `[n, k]` and `grad` `[m, n]`, and multiplies
    twice with each: once along the last dimension, with `data`, and once along the first, with `data_t`:

        fprop   y       = x.data      by kernel.data        contracts k
        dgrad   dx      = grad.data   by kernel.data_t      contracts n
        wgrad   dkernel = x.data_t    by grad.data_t        contracts m

    A quantizer that returns no `data_t` has its `data` transposed. What no product reads is not computed.
    """

    # A method, where a quantizer brings its own product:
    #
    #     def qgemm(self, qx, qw, *, sx, sw, out_dtype, gemm_type, qresult_x, qresult_w): ...
    #
    # `qx` codes `[m, k]` and `qw` codes `[n, k]`, both with the contracting dimension last; `sx`, `sw` their scale_inv
    # (None beside an operand in high precision); `gemm_type` a GEMMType, so also `"fprop"`, `"dgrad"`, `"wgrad"`;
    # `qresult_x`, `qresult_w` the whole QTensors. Returns `[m, n]` of `out_dtype`; a bias is added afterwards. The
    # quantizer asked is x's for fprop and wgrad, grad's for dgrad; if it has no qgemm, that of the other operand.
    qgemm = None

    def init(self) -> Any:
        """The first state: a pytree of float32 arrays; None keeps none.

        States are not negative, and uses of one combine by the elementwise maximum: two calls of a layer, microbatches,
        devices. 0 means that it was not used: so a counter counts up and an amax is an amax.
        """
        return None

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """`(QTensor, next state)`.

        Args:
            x: bfloat16, float16 or float32 `[rows, cols]`; on a mesh in `jit` the whole tensor, inside `shard_map` that
                of one device.
            state: what `init` or the last step returned.
        """
        raise NotImplementedError(f"{type(self).__name__}: quantize(x, state) -> (QTensor, state)")

    # What the products call. ------------------------------------------------------------------------------------------

    def check_init(self) -> None:
        """Raises unless `init` returns a state.

        Raises:
            TypeError: it has a leaf that is no float32 array.
            ValueError: a number in it is negative or not finite.
        """
        where = f"{type(self).__name__}.init"
        with jax.ensure_compile_time_eval():
            for leaf in jax.tree.leaves(self.init()):
                if getattr(leaf, "dtype", None) != jnp.float32:
                    found = getattr(leaf, "dtype", type(leaf).__name__)
                    raise TypeError(f"{where}: expected float32 arrays, as gradients return them, got {found}")
                if not np.all((np.asarray(leaf) >= 0) & np.isfinite(leaf)):
                    raise ValueError(
                        f"{where}: expected numbers that are finite and not negative, as uses combine by max and 0 is "
                        f"unused; got {np.asarray(leaf)}"
                    )

    def check_state(self, name: str, state: Any) -> None:
        """Raises unless `state` is one of this quantizer, or None; `name` is how the message calls it.

        Raises:
            TypeError, ValueError: it is not.
        """
        expected = jax.eval_shape(self.init)
        if state is None:
            return
        if jax.tree.structure(state) != jax.tree.structure(expected):
            raise TypeError(f"{name}: {type(self).__name__} keeps {expected}, got {state!r}")
        for of, leaf in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
            if of.shape != leaf.shape:
                raise ValueError(f"{name}: {type(self).__name__} keeps an array of shape {of.shape}, got {leaf.shape}")

    def quantize_operand(
        self,
        x: jax.Array,
        run: Any,
        *,
        rows: int = 1,
        cols: int = 1,
        rowwise: bool = True,
        columnwise: bool = True,
        sums: bool = False,
        reduce: Callable[..., Any] = alone,
        contract_first: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Quantizes an operand of a product.

        Args:
            x: bfloat16, float16 or float32 `[*batch, *rows, *cols]`.
            run: what `start` made of the state, or None where there is no state.
            rows, cols: how many dimensions are rows and columns.
            rowwise, columnwise: whether `data` and `data_t` are read.
            sums: also give the sums over rows, f32 `[*batch, *cols]`.
            reduce: `(amax, state leaf or None, combine=lax.pmax) -> amax`, over the devices that share the state.
            contract_first: the rows are what the first product contracts, so that `data_t` serves it.

        Returns:
            `(q, run, sums or None)`: the codes, and the run with the amax of x in it.
        """
        del rowwise, columnwise
        batch = x.ndim - rows - cols
        state = self.init() if run is None else run
        matrices = x.reshape(*x.shape[:batch], *_merged(x.shape[batch:], rows))

        def of_matrix(matrix):
            result = self.quantize(matrix.mT if contract_first else matrix, state)
            q, next_state = _checked(self, result, matrix.shape[::-1] if contract_first else matrix.shape)
            check_next(self, state, next_state)
            return q.transposed() if contract_first else q, next_state

        function = of_matrix
        for _ in range(batch):
            function = jax.vmap(function)
        q, next_state = function(matrices)
        if batch:  # one state for all of them, and a scale for each
            next_state = jax.tree.map(lambda leaf: jnp.max(leaf, axis=tuple(range(batch))), next_state)
            q = q.map_scales(lambda scale: scale.reshape(*scale.shape, 1) if scale.ndim == batch + 1 else scale)
        if run is None:
            next_state = None
        else:
            next_state = jax.tree.map(lambda new, old: reduce(new.astype(jnp.float32), old), next_state, state)
        return q.reshape(x.shape, batch, cols), next_state, column_sums(x, rows, cols) if sums else None


def column_sums(x: ArrayLike, rows: int, cols: int) -> jax.Array:
    """The sums over rows, f32 `[*batch, *cols]`."""
    first = x.ndim - rows - cols
    return jnp.sum(x.astype(jnp.float32), axis=tuple(range(first, first + rows)))


def fp8_dtype(where: str, dtype) -> np.dtype:
    """An FP8 dtype, given as one or as `jaxfp8.E4M3` or `E5M2`.

    Raises:
        TypeError: it is none.
    """
    if isinstance(dtype, Format):  # HYBRID is two
        found = dtype.dtype if dtype.dtype == dtype.backward_dtype else None
    else:
        try:
            found = np.dtype(dtype)
        except TypeError:
            found = None
    if found not in FP8_DTYPES:
        raise TypeError(f"{where}: fp8_dtype: expected float8_e4m3fn or float8_e5m2, got {dtype!r}")
    return found


def _merged(shape, rows) -> tuple[int, int]:
    return int(np.prod(shape[:rows])), int(np.prod(shape[rows:]))


def _checked(quantizer, result, shape) -> tuple:
    """What `quantize` returned for a matrix of this shape, if it is right."""
    where = f"{type(quantizer).__name__}.quantize"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{where}: expected (QTensor, state), got {type(result).__name__}")
    q, next_state = result
    if not isinstance(q, QTensor):
        raise TypeError(f"{where}: expected (QTensor, state), got a {type(q).__name__} in place of the QTensor")
    if q.data.shape != shape:
        raise ValueError(f"{where}: data: expected the shape of x, {shape}, got {q.data.shape}")
    if q.data_t is not None and q.data_t.shape != shape[::-1]:
        raise ValueError(f"{where}: data_t: expected {shape[::-1]}, got {q.data_t.shape}")
    if q.scale_inv_t is not None and q.data_t is None:
        raise ValueError(f"{where}: scale_inv_t: expected data_t beside it, got None")
    _check_scales(f"{where}: scale_inv", q.scale_inv, shape, q.block)
    if q.scale_inv_t is not None:
        _check_scales(f"{where}: scale_inv_t", q.scale_inv_t, shape[::-1], q.block)
    return q.map_scales(lambda scale: scale.reshape(1) if scale.ndim == 0 else scale), next_state


def _check_scales(where, scales, shape, block) -> None:
    if not hasattr(scales, "shape"):
        raise TypeError(f"{where}: expected an array, f32[1] or a scale for each block, got {scales!r}")
    if block is None:
        is_right = scales.shape in ((), (1,)) or (
            scales.ndim == 2
            and all(count and size % count == 0 for size, count in zip(shape, scales.shape, strict=True))
        )
        wanted = f"f32[1], or as many scales as divide {shape} evenly; block=(rows, cols) says how many share one"
    else:
        wanted = _blocks.count(block, *shape)
        is_right = scales.shape == wanted
    if not is_right:
        raise ValueError(f"{where}: expected {wanted} for blocks {block}, got {scales.shape}")


def check_next(quantizer, state, next_state) -> None:
    """Raises unless a quantizer's next state is like its state.

    Raises:
        TypeError: it is not.
    """

    def types(tree):
        return jax.tree.map(lambda leaf: jnp.shape(leaf), tree)

    if jax.tree.structure(state) != jax.tree.structure(next_state) or types(state) != types(next_state):
        raise TypeError(
            f"{type(quantizer).__name__}.quantize: state: expected a next state like the state, {types(state)}, got "
            f"{types(next_state)}"
        )
