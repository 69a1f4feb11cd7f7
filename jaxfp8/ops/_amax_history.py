"""Reading and writing an amax history: jnp on every platform."""

import jax.numpy as jnp
from jax import lax

from .. import scaling
from .._primitives import shared_function


def read_history(history):
    """`(history, amax)`: f32 `[H]` with entries that cannot be as 0, and its largest entry as f32[1]."""
    return tuple(_read(history))


def push_history(history, amax):
    """f32 `[H]` that `read_history` gave, one step later: its oldest entry is dropped, `amax` f32[] is in slot 0."""
    return _push(history, amax)[0]


@shared_function("read_amax_history", [("slot",)], [("slot",), ("one",)])
def _read(history):
    history = scaling.clean(history)
    bits = jnp.max(lax.bitcast_convert_type(history, jnp.int32))  # they sort like the floats
    return [history, lax.bitcast_convert_type(bits, jnp.float32).reshape(1)]


@shared_function("push_amax_history", [("slot",), ()], [("slot",)])
def _push(history, amax):
    return [scaling.push_history(history, amax)]
