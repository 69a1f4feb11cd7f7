"""The dtype a layer computes in, and x in it."""

import jax
import jax.numpy as jnp

from ..recipes import QTensor


def compute_dtype(*arrays, dtype=None):
    """`dtype`, or what the arrays promote to, at least a float; a QTensor counts as what it is the codes of."""
    if dtype is not None:
        return jnp.dtype(dtype)
    sources = (a.source if isinstance(a, QTensor) else a for a in arrays)
    with jax.numpy_dtype_promotion("standard"):
        found = jnp.result_type(*(a.dtype for a in sources if a is not None))
    return found if jnp.issubdtype(found, jnp.inexact) else jnp.promote_types(found, jnp.float32)


def to_compute(x, dtype):
    """`x` in the compute dtype, but not widened: the quantizer reads narrow floats as they are, to the same codes."""
    with jax.numpy_dtype_promotion("standard"):
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.promote_types(x.dtype, dtype) == dtype:
            return x
    return x.astype(dtype)
