"""A state for each example of a batch. Where the examples share a state, their next states combine by max.

`ragged_dot` needs this because it is a `custom_vjp`: under `vmap` JAX sums the cotangents of an argument that the
examples share, which is right for a kernel and wrong for a state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax._primitives import compiled
from ._product import repeat_state


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Hashable data among the residuals of a `custom_vjp`, which are arrays otherwise."""

    value: Any


def vmapped_state(state, *operands):
    """Return `state`; under a `vmap` that batches any operand, each of its leaves gets a batch dimension too."""
    leaves, tree = jax.tree.flatten(state)
    return tree.unflatten(_vmapped_state_p.bind(*leaves, *operands, count=len(leaves)) if leaves else leaves)


def _batch(args, dims, *, count):
    # A mesh axis may cut the batch; repeated leaves have to be cut by the same axis.
    size, axis = next(
        (x.shape[d], jax.typeof(x).sharding.spec[d]) for x, d in zip(args, dims, strict=True) if d is not None
    )
    leaves = [
        repeat_state((size, axis), leaf) if d is None else jnp.moveaxis(leaf, d, 0)
        for leaf, d in zip(args[:count], dims[:count], strict=True)
    ]
    # The operands go along so that an outer `vmap` sees them; the place of their batch dimension no longer matters.
    return _vmapped_state_p.bind(*leaves, *args[count:], count=count), [0] * count


def _jvp(primals, tangents, *, count):
    # Each result is a leaf of the state and has the tangent of that leaf. The results do not depend on the operands.
    return _vmapped_state_p.bind(*primals, count=count), list(tangents[:count])


_vmapped_state_p = Primitive("fp8_vmapped_state")
_vmapped_state_p.multiple_results = True
_vmapped_state_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
_vmapped_state_p.def_impl(compiled(_vmapped_state_p))
ad.primitive_jvps[_vmapped_state_p] = _jvp
batching.primitive_batchers[_vmapped_state_p] = _batch
mlir.register_lowering(_vmapped_state_p, lambda ctx, *operands, count: operands[:count])
