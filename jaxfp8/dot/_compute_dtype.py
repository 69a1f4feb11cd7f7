"""The compute dtype of layers, the conversion of x to that dtype, and the sizes of features."""

import operator

import jax
import jax.numpy as jnp

from ..recipes import QTensor


def promoted(*operands):
    """Return the dtype that arrays or dtypes promote to by JAX's standard rules, also where promotion is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*operands)


def compute_dtype(*arrays, dtype=None):
    """Return `dtype`, or the float dtype that the arrays promote to; a QTensor counts as its source."""
    if dtype is not None:
        return jnp.dtype(dtype)
    sources = (a.source if isinstance(a, QTensor) else a for a in arrays)
    common = promoted(*(a.dtype for a in sources if a is not None))
    return common if jnp.issubdtype(common, jnp.inexact) else promoted(common, jnp.float32)


def to_compute(x, dtype):
    """Convert `x` to the compute dtype, but do not widen it: the quantizer makes the same codes of narrow floats."""
    with jax.numpy_dtype_promotion("standard"):
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.promote_types(x.dtype, dtype) == dtype:
            return x
    return x.astype(dtype)


def sizes(name: str, features) -> tuple[int, ...]:
    """Return one or several sizes as a tuple of ints; `name` names the argument in the message."""
    try:
        return tuple(map(operator.index, features if isinstance(features, (tuple, list)) else (features,)))
    except TypeError:
        raise TypeError(f"{name}: expected an int or a tuple of ints, got {features!r}") from None
