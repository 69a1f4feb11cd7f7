"""The state of stacked layers, read before the loop over them and written after it.

A loop slices its inputs and writes its results in each iteration, one launch for each
leaf. A quantizer needs a few numbers of its state and records two. So `max_grad` makes
a *reading* of the histories and scales of all layers, the loop runs over the reading,
and the histories are written once, in the backward of `read`. The reading of a product
is stored in place of the scale of its last quantizer, `output_grad`.

A reading has the scales of `DelayedScaling()` too: the arithmetic of a scale is many
operations, which XLA would compile once for each product and pass. Other options of the
recipe take their scales in the loop, from the amaxes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import ops
from .._jax import _compat
from ..numerics import HYBRID, _scaling, fp8_max
from ._state import DotGeneralState
from ._state_tree import StateTree, check_slots

_OPERANDS = ("input", "kernel", "output_grad")
# The dtypes whose scales a reading has, by operand.
FP8_DTYPES = HYBRID.dtype, HYBRID.dtype, HYBRID.backward_dtype
_FP8_MAX = list(map(fp8_max, FP8_DTYPES))


def _usable(ct):
    """Return a cotangent with 0 in place of amaxes that are not finite, so that the
    amaxes of other uses count.
    """
    position = lax.broadcasted_iota(jnp.int32, ct.shape, ct.ndim - 1)
    is_amax = position % ops.READING_NUMBERS == 0
    return jnp.where(is_amax, _scaling.clean(ct), ct)


# A cotangent of this dtype holds the amax that each quantizer recorded, finite or not,
# and its scale_inv; zeros for a quantizer that did not run.
READING = _compat.MaxDtype("float32_max_reading", _usable)
# That of a reading which is no iteration's, but a row's of a StackedState.
ROW = _compat.MaxDtype("float32_max_row", _usable)


def is_reading(x: Any) -> bool:
    """Tell whether `x` is a reading."""
    return getattr(x, "dtype", None) in (READING, ROW)


def reading_of(state: DotGeneralState) -> jax.Array | None:
    """Get the reading of the state of a product, `[..., 18]`; None where no reading was
    made of the state.
    """
    scale = getattr(state.output_grad, "scale", None)
    return scale if is_reading(scale) else None


def without_max(tree: Any) -> Any:
    """Return `tree` with plain float32 state: each reading becomes the stored scale,
    the max dtype float32.
    """

    def of_leaf(leaf):
        if is_reading(leaf):
            return _compat.plain(leaf)[..., -4:-3]  # the scale of the last quantizer
        return _compat.plain(leaf)

    return jax.tree.map(of_leaf, tree)


def stacked_products(flat: StateTree) -> list[list]:
    """Find the products in a tree whose state is stacked over layers; return the three
    quantizers of each.

    Products that have other quantizers with a history than these three are left out.
    """
    products = {}
    for quantizer in flat.quantizers:
        product, _, operand = quantizer.name.rpartition("/")
        products.setdefault(product, {})[operand] = quantizer
    stacked = []
    for by_operand in products.values():
        if set(by_operand) == set(_OPERANDS):
            quantizers = [by_operand[operand] for operand in _OPERANDS]
            if _is_stacked(quantizers):
                stacked.append(quantizers)
    return stacked


def _is_stacked(quantizers) -> bool:
    leading = set()
    for quantizer in quantizers:
        for leaf in quantizer.leaves:
            is_traced = isinstance(leaf, jax.core.Tracer)
            is_float = is_traced and jnp.issubdtype(leaf.dtype, jnp.floating)
            if not is_float or leaf.ndim < 2:
                return False
        check_slots("max_grad: tree", *quantizer.leaves)
        leading.add(quantizer.leaves[0].shape[:-1])
    return len(leading) == 1


def read(products: Sequence[Sequence[tuple[jax.Array, jax.Array]]]) -> list[jax.Array]:
    """Read the state of products, each of three quantizers.

    Args:
        products: for each product, three pairs of a history `[..., H]` and a scale
            `[..., 1]`, in the max dtype. H may differ between pairs.

    Returns:
        For each product its reading `[..., 18]`. The backward turns cotangents of
        readings into next states.
    """

    def read_products(states):
        readings = ops.read_histories(states, fp8_max=[_FP8_MAX] * len(states))
        return _compat.cast(readings, [READING] * len(readings))

    return with_next_states(read_products, ops.write_histories, products)


def read_rows(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """Read the state of products that are rows of the same arrays, as `read` does.

    Args:
        pairs: three pairs of a history `[n, H]` and a scale `[n, 1]`, in the max dtype.

    Returns:
        n readings `[18]`.
    """

    def read_rows_of(states):
        readings = ops.read_rows(states, fp8_max=_FP8_MAX)
        return _compat.cast(readings, [ROW] * len(readings))

    return with_next_states(read_rows_of, ops.write_rows, pairs)


# The conversions are inside, so that a loop keeps its inputs for the backward.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_next_states(read: Callable, write: Callable, states: Any) -> list[jax.Array]:
    """Return `read(states)`; the cotangents of the results give the next states.

    Args:
        read: a function of `states` in float32.
        write: `(states, cotangents) -> next states`, all in float32; zeros for a
            quantizer that recorded nothing, which keeps its state.
        states: histories and scales.
    """
    return read(_compat.plain(states))


def _read_forward(read, write, states):
    return with_next_states(read, write, states), states


def _read_backward(read, write, states, cotangents):
    written = jax.tree.leaves(write(*_compat.plain((states, cotangents))))
    leaves, structure = jax.tree.flatten(states)
    new = _compat.cast(written, [leaf.dtype for leaf in leaves])
    return (structure.unflatten(new),)


with_next_states.defvjp(_read_forward, _read_backward)
