"""amax: the largest magnitude of an array."""

import jax.numpy as jnp

from .. import scaling
from . import _checks, _ffi
from ._primitive import grouped_op


def amax(x):
    """Max of `|x|`.

    Equivalent to `jnp.max(jnp.abs(x.astype(f32)), initial=0)`, with NaN counted as +inf before the reduction.

    Args:
        x: bfloat16, float16 or float32, any shape.

    Returns:
        f32[]; 0 for an empty array, inf where x has an Inf or a NaN.

    Raises:
        TypeError: x has another dtype; or the op is differentiated.
    """
    x = _checks.high_precision("amax", "x", x)
    return _groups(x.reshape(1, -1))[0].reshape(())


def _results(x):
    return [((x.shape[0],), jnp.float32)]


def _reference(x):
    return (scaling.abs_max(x, axis=1),)


def _custom_call(x):
    return _ffi.call("amax", _results(x), x)


# x `[g, n]` -> f32 `[g]`.
_groups = grouped_op(
    "amax", results=_results, reference=_reference, cpu=_custom_call, cuda=_custom_call, is_scale=(False,)
)
