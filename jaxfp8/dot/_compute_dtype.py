"""The dtype a layer computes in, and x in it."""

import jax
import jax.numpy as jnp

from ..recipes import QTensor


def compute_dtype(*arrays, dtype=None):
    """Return `dtype`, or the float dtype that the arrays promote to; a QTensor counts as its source."""
    if dtype is not None:
        return jnp.dtype(dtype)
    sources = (a.source if isinstance(a, QTensor) else a for a in arrays)
    with jax.numpy_dtype_promotion("standard"):
        promoted = jnp.result_type(*(a.dtype for a in sources if a is not None))
    return promoted if jnp.issubdtype(promoted, jnp.inexact) else jnp.promote_types(promoted, jnp.float32)


def to_compute(x, dtype):
    """Convert `x` to the compute dtype, but do not widen it: the quantizer makes the same codes of narrow floats."""
    with jax.numpy_dtype_promotion("standard"):
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.promote_types(x.dtype, dtype) == dtype:
            return x
    return x.astype(dtype)
