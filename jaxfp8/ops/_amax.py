"""amax: the largest magnitude of an array."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op


def amax(x: ArrayLike) -> jax.Array:
    """Max of `|x|`.

    Equivalent to `jnp.max(jnp.abs(x.astype(f32)), initial=0)`, with NaN counted as +inf before the reduction.

    Args:
        x: bfloat16, float16 or float32, any shape.

    Returns:
        f32[]; 0 for an empty array, inf where x has an Inf or a NaN.

    Raises:
        TypeError: x has another dtype; or the op is differentiated.
    """
    return _amax(_checks.high_precision("amax", "x", x))[0].reshape(())


def _reference(x, members):
    return (_shapes.abs_max(x, members),)


def _custom_call(x, members):
    groups = _shapes.merge(x, members)
    (top,) = _ffi.call("amax", [(groups.shape[:1], jnp.float32)], groups)
    return (_shapes.member_amaxes(top, x.shape[:members]),)


_amax = tensor_op(
    "amax",
    names=lambda x: ([dims("x", x)], [ONE]),
    dtypes=lambda x: [jnp.float32],
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    combine=lambda **_: lax.pmax,
)
