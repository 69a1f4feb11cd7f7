"""Quantizer: what turns one tensor of a product into codes; users write their own."""

import enum

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import FP8_DTYPES, Format
from ..tensor import QTensor


class GEMMType(enum.StrEnum):
    """The three products of a layer: `y = x @ kernel`, `dx = grad @ kernel.T`, `dkernel = x.T @ grad`."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


def alone(amax, leaf):
    """No mesh: the amax at hand is that of the whole tensor."""
    del leaf
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

    def init(self):
        """The first state: a pytree of float32 arrays; None keeps none.

        States are not negative, and uses of one combine by the elementwise maximum: two calls of a layer, microbatches,
        devices. 0 means that it was not used: so a counter counts up and an amax is an amax.
        """
        return None

    def quantize(self, x, state):
        """`(QTensor, next state)`.

        Args:
            x: bfloat16, float16 or float32 `[rows, cols]`; on a mesh in `jit` the whole tensor, inside `shard_map` that
                of one device.
            state: what `init` or the last step returned.
        """
        raise NotImplementedError(f"{type(self).__name__}: quantize(x, state) -> (QTensor, state)")

    # What the products call. ------------------------------------------------------------------------------------------

    def check_state(self, name: str, state) -> None:
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
        self, x, run, *, rows=1, cols=1, rowwise=True, columnwise=True, sums=False, reduce=alone, contract_first=False
    ):
        """Quantizes an operand of a product.

        Args:
            x: bfloat16, float16 or float32 `[*batch, *rows, *cols]`.
            run: what `start` made of the state, or None where there is no state.
            rows, cols: how many dimensions are rows and columns.
            rowwise, columnwise: whether `data` and `data_t` are read.
            sums: also give the sums over rows, f32 `[*batch, *cols]`.
            reduce: `(amax, state leaf or None) -> amax`, over the devices that share the state.
            contract_first: the rows are what the first product contracts, so that `data_t` serves it.

        Returns:
            `(q, run, sums or None)`: the codes, and the run with the amax of x in it.
        """
        del rowwise, columnwise
        batch = x.ndim - rows - cols
        state = self.init() if run is None else run
        matrices = x.reshape(*x.shape[:batch], *_merged(x.shape[batch:], rows))

        def of_matrix(matrix):
            q, next_state = self.quantize(matrix.mT if contract_first else matrix, state)
            q = _checked(self, q, matrix.shape[::-1] if contract_first else matrix.shape)
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


def column_sums(x, rows: int, cols: int):
    """The sums over rows, f32 `[*batch, *cols]`."""
    first = x.ndim - rows - cols
    return jnp.sum(x.astype(jnp.float32), axis=tuple(range(first, first + rows)))


def fp8_dtype(where: str, dtype) -> np.dtype:
    """An FP8 dtype, given as one or as `jaxfp8.E4M3` or `E5M2`.

    Raises:
        TypeError: it is none.
    """
    if isinstance(dtype, Format) and dtype.dtype == dtype.backward_dtype:
        return dtype.dtype
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found not in FP8_DTYPES:
        raise TypeError(f"{where}: fp8_dtype: expected float8_e4m3fn or float8_e5m2, got {dtype!r}")
    return found


def _merged(shape, rows) -> tuple[int, int]:
    return int(np.prod(shape[:rows])), int(np.prod(shape[rows:]))


def _checked(quantizer, q, shape) -> QTensor:
    where = f"{type(quantizer).__name__}.quantize"
    if not isinstance(q, QTensor):
        raise TypeError(f"{where}: expected (QTensor, state), got a {type(q).__name__} in place of the QTensor")
    if q.data.shape != shape:
        raise ValueError(f"{where}: data: expected the shape of x, {shape}, got {q.data.shape}")
    if q.data_t is not None and q.data_t.shape != shape[::-1]:
        raise ValueError(f"{where}: data_t: expected {shape[::-1]}, got {q.data_t.shape}")
    return q.map_scales(lambda scale: scale.reshape(1) if scale.ndim == 0 else scale)


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
