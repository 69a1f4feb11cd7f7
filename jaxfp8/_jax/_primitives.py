"""Rules that all primitives share: how a primitive runs outside of jit, and that ops have no derivative."""

import functools
from collections.abc import Callable

import jax
from jax.extend.core import Primitive


def compiled(op: Primitive) -> Callable:
    """Return the function that runs a primitive outside of jit and in `jax.disable_jit()`: a jitted call per params."""

    @functools.lru_cache(maxsize=1024)
    def jitted(params):
        return jax.jit(functools.partial(op.bind, **dict(params)))

    def run(*operands, **params):
        # Where `jit` is disabled, the function would bind the op outside of jit, and so call itself without end.
        with jax.disable_jit(False):
            return jitted(tuple(params.items()))(*operands)

    return run


def not_differentiable(name, primals, tangents, **params):
    """Raise where autodiff goes through an op: a derivative of rounding would be silently wrong."""
    raise TypeError(
        "jaxfp8.dot_general, and all that is made of it, has first derivatives in reverse mode only: a second one (the "
        f"gradient of a gradient, a Hessian) or forward mode would be silently wrong. jaxfp8.ops.{name} is not "
        "differentiable at all: use jaxfp8.dot_general, which has the straight-through gradient"
    )
