"""The state of a product for autodiff: the cotangents of all its uses meet in a max, also those of a batch's examples.

`vmapped_state` is for products that are a `custom_vjp`: under `vmap` JAX sums the cotangents of an argument that the
examples share, which is right for a kernel and wrong for a state.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import _compat
from .._jax._primitives import compiled
from ..recipes import is_reading, largest


def shared(state):
    """Return `state` as f32, such that the cotangents of all uses of its leaves meet in a max.

    A reading stays as it is: a loop keeps its inputs for the backward anyway, and a conversion would be a copy.
    """

    def use(leaf):
        if is_reading(leaf):
            return leaf
        if _compat.is_foreign_max(leaf):
            return _from_foreign_max(leaf, leaf.dtype)
        if _compat.is_max(leaf):
            return _compat.from_max(leaf)
        if _compat.MAX_DTYPE is not None and isinstance(leaf, jax.core.Tracer):
            return _compat.from_max(_compat.to_max(leaf))
        return jnp.asarray(leaf).astype(jnp.float32)

    return jax.tree.map(use, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _from_foreign_max(leaf, dtype):
    """Convert Flax's dtype to float32; JAX's conversion from that dtype has no transpose."""
    return jax.lax.convert_element_type(leaf, jnp.float32)


def _from_foreign_max_fwd(leaf, dtype):
    return _from_foreign_max(leaf, dtype), None


def _from_foreign_max_bwd(dtype, residuals, ct):
    return (jax.lax.convert_element_type(ct, dtype),)


_from_foreign_max.defvjp(_from_foreign_max_fwd, _from_foreign_max_bwd)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Hashable data among the residuals of a `custom_vjp`, which are arrays otherwise."""

    value: Any


def repeat(batch, x):
    """Repeat `x` for each example of a batch, given as its size and the mesh axis that cuts it."""
    (size, axis), sharding = batch, jax.typeof(x).sharding
    out = None if sharding.mesh.empty else NamedSharding(sharding.mesh, PartitionSpec(axis, *sharding.spec))
    return lax.broadcast_in_dim(x, (size, *x.shape), tuple(range(1, x.ndim + 1)), out_sharding=out)


# `repeat_state` is `repeat` for state: the next states of the examples combine by max.
repeat_state = jax.custom_vjp(repeat, nondiff_argnums=(0,))


def _repeat_state_fwd(batch, x):
    return repeat(batch, x), None


def _repeat_state_bwd(batch, residuals, ct):
    return (largest(ct),)


repeat_state.defvjp(_repeat_state_fwd, _repeat_state_bwd)


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
