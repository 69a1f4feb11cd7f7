"""A look at every FP8 product while a program is traced: what `jaxfp8.inspect.compare` puts in place of it."""

import contextlib
import contextvars

import jax

# A context that is part of jit's cache key: what is looked at is traced anew.
_look = jax.make_user_context(None)
_layer = contextvars.ContextVar("layer", default="")


def looking(look):
    """A context in which each product is `look(fp8, f32, *operands)`; None: as it is.

    Args:
        look: takes the product of `*operands` as it runs in FP8, the same of the numbers they stand for in float32, and
            the operands; must hash.
    """
    return _look(look)


def product(fp8, f32, *operands):
    """`fp8(*operands)`, or what is looked at in its place."""
    look = _look.value
    return fp8(*operands) if look is None else look(fp8, f32, *operands)


@contextlib.contextmanager
def layer(name: str):
    """What is traced inside belongs to the layer of this name."""
    token = _layer.set(name)
    try:
        yield
    finally:
        _layer.reset(token)


def current_layer() -> str:
    """The name of the innermost layer; "" outside of any."""
    return _layer.get()
