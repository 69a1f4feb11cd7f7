"""What all primitives here share: how one runs outside of jit, and jnp that is one function in a program."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _mesh


def compiled(op: Primitive) -> Callable:
    """How a primitive runs outside of jit, and in `jax.disable_jit()`: jitted, once for each set of parameters."""

    @functools.lru_cache(maxsize=1024)
    def jitted(params):
        return jax.jit(functools.partial(op.bind, **dict(params)))

    def run(*operands, **params):
        with jax.disable_jit(False):
            return jitted(tuple(params.items()))(*operands)

    return run


def shared_function(name: str, operand_names, result_names) -> Callable:
    """Decorator: jnp on f32 that is one function in the program, however often it is used there.

    XLA inlines it. As a primitive, because a jitted function is traced anew, and written out again, for a backward.

    Args:
        name: of the function in the program.
        operand_names, result_names: the names of the dimensions of each operand and result.
    """

    def decorate(function):
        op = Primitive(name)
        op.multiple_results = True

        def batch(operands, dims):
            outputs = jax.vmap(function, in_axes=tuple(dims))(*operands)
            return outputs, [0] * len(outputs)

        dtypes = [jnp.float32] * len(result_names)
        op.def_abstract_eval(lambda *avals: _mesh.types(avals, operand_names, result_names, dtypes))
        op.def_impl(compiled(op))
        ad.primitive_jvps[op] = functools.partial(not_differentiable, name)
        batching.primitive_batchers[op] = batch
        mlir.register_lowering(op, mlir.lower_fun(function, multiple_results=True), inline=False)
        return op.bind

    return decorate


def not_differentiable(name, primals, tangents, **params):
    """Autodiff through an op raises, where a derivative of rounding would be silently wrong."""
    del primals, tangents, params
    raise TypeError(
        f"jaxfp8.ops.{name} is not differentiable. Use jaxfp8.dot_general, which has the straight-through gradient; it "
        "has first derivatives in reverse mode only."
    )
