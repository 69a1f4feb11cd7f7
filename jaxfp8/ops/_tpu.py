"""Programs of ops for TPUs: the jnp reference, with the float arithmetic and the products of codes that a TPU has."""

import functools
from collections.abc import Callable

from ..numerics import _tpu


@functools.cache
def program(reference: Callable) -> Callable:
    """Return the reference of an op as it is traced for TPUs; equal references give the same function."""

    @functools.wraps(reference)
    def on_tpu(*operands, **static):
        with _tpu.is_target(True):
            return reference(*operands, **static)

    return on_tpu
