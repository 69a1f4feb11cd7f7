"""A state for each example of a batch, also where the examples share one: their next states then combine by max.

For products that are a `custom_vjp`. Under `vmap` JAX sums the cotangents of what the examples share, which is right
for a kernel and wrong for a state.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax._primitives import compiled
from ._product import repeat_state


def vmapped_state(state, *operands):
    """Return `state`, with a batch wherever an operand has one."""
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
    # Operands go along so that an outer `vmap` can ask them again; where their batch is does not matter any more.
    return _vmapped_state_p.bind(*leaves, *args[count:], count=count), [0] * count


def _jvp(primals, tangents, *, count):
    # Each result is a leaf of the state, so its tangent is that of the leaf. Operands do not enter it.
    return _vmapped_state_p.bind(*primals, count=count), list(tangents[:count])


_vmapped_state_p = Primitive("fp8_vmapped_state")
_vmapped_state_p.multiple_results = True
_vmapped_state_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
_vmapped_state_p.def_impl(compiled(_vmapped_state_p))
ad.primitive_jvps[_vmapped_state_p] = _jvp
batching.primitive_batchers[_vmapped_state_p] = _batch
mlir.register_lowering(_vmapped_state_p, lambda ctx, *operands, count: operands[:count])
