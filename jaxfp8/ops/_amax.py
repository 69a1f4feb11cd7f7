"""amax: the largest magnitude of an array."""

import jax
import jax.numpy as jnp

from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op


def amax(x: jax.typing.ArrayLike) -> jax.Array:
    """Compute the largest magnitude, the max of `|x|`.

    Equivalent to `jnp.max(jnp.abs(x.astype(f32)), initial=0)`, with NaN counted as +inf before the reduction.

    Args:
        x: bfloat16, float16 or float32, any shape.

    Returns:
        f32[]; 0 for an empty array, inf where x has an Inf or a NaN.

    Raises:
        TypeError: x has another dtype; or the op is differentiated.
    """
    return _amax(_checks.high_precision("amax", "x", x))[0].reshape(())


def _reference(x, vmap_dims):
    return (_shapes.abs_max(x, vmap_dims),)


def _custom_call(x, vmap_dims):
    groups = _shapes.merge(x, vmap_dims)
    (amaxes,) = _ffi.call("amax", [(groups.shape[:1], jnp.float32)], groups)
    return (_shapes.vmapped_amaxes(amaxes, x.shape[:vmap_dims]),)


_amax = tensor_op("amax", _reference, _custom_call, names=lambda x: ([dims("x", x)], [ONE]))
