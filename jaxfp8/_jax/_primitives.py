"""Runs primitives outside of jit, and defines derivatives that nothing may use."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive

_FIRST_DERIVATIVES_ONLY = (
    "jaxfp8.dot_general, and all that is made of it, has first derivatives in reverse "
    "mode only (jax.grad, jax.vjp): a second one (the gradient of a gradient, a "
    "Hessian) or forward mode (jax.jvp, jax.jacfwd) would be silently wrong; if no "
    "second one is meant, take jax.lax.stop_gradient of the inner gradient, or of its "
    "arguments"
)
_NO_STEPS = (
    "jaxfp8.optim.adamw has no derivative: a step rounds moments to FP8. Take "
    "optax.adamw where a loss contains a step, or jax.lax.stop_gradient of the "
    "updates if they are a constant of the loss"
)
_NO_MOMENTS = (
    "jaxfp8.optim.quantized has no derivative through its state, nor in forward mode: "
    "a step rounds moments to FP8. Take the transformation that it wraps where a loss "
    "contains several steps, or jax.lax.stop_gradient of the state if it is a "
    "constant of the loss"
)
# The ops that are the step of an optimizer; all others are part of a product.
_OF_OPTIMIZERS = {
    "adam_update": _NO_STEPS,
    "encode_moment": _NO_MOMENTS,
    "decode_moment": _NO_MOMENTS,
}


def compiled(op):
    """Return the function that runs a primitive outside of jit and in
    `jax.disable_jit()`, as JAX runs its own: by a compiled call for each params.
    """
    return functools.partial(apply_primitive, op)


def refuse_derivative(*args, op=None, **params):
    """Raise the error of a second derivative and of forward mode; `op` names an op,
    which has no derivative at all.
    """
    del args, params
    if op is None:
        raise TypeError(_FIRST_DERIVATIVES_ONLY)
    if op in _OF_OPTIMIZERS:
        raise TypeError(_OF_OPTIMIZERS[op])
    raise TypeError(
        f"{_FIRST_DERIVATIVES_ONLY}. jaxfp8.ops.{op} is not differentiable at all: "
        "use jaxfp8.dot_general, which has the straight-through gradient"
    )


def undefined_tangents(results, tangents, op=None):
    """Return tangents for `results` whose use raises, where a derivative does not
    exist.

    JAX differentiates an inner gradient together with the loss around it, and
    `lax.stop_gradient` comes after. So an error here would also refuse programs that
    want first derivatives alone. Reverse mode raises where a cotangent reaches these
    tangents, forward mode where it computes them.

    Args:
        results: arrays.
        tangents: those of the arrays that the results depend on; at least one is not an
            `ad.Zero`.
        op: see `refuse_derivative`.
    """

    def has_tangent(x):
        return type(x) is not ad.Zero and x.dtype != jax.dtypes.float0

    types = [jax.typeof(result).to_tangent_aval() for result in results]
    avals = tuple(filter(has_tangent, types))
    nonzero = filter(has_tangent, tangents)
    undefined = iter(_undefined_p.bind(*nonzero, avals=avals, op=op))
    return [next(undefined) if has_tangent(t) else ad.Zero(t) for t in types]


def not_differentiable(op, name, primals, tangents, /, **params):
    """Compute an op with several results; the derivative of a rounding, which is zero
    almost everywhere, is undefined.
    """
    results = op.bind(*primals, **params)
    return results, undefined_tangents(results, tangents, name)


def _transpose(cotangents, *tangents, avals, op):
    if any(type(ct) is not ad.Zero for ct in cotangents):
        refuse_derivative(op=op)
    return [None] * len(tangents)


def linear_primitive(name, types, transpose):
    """Return a primitive with several results for tangents alone: it is there to be
    transposed, and what would compute it raises.

    Args:
        name: the primitive's name.
        types: its rule for the types of results.
        transpose: `(cotangents, *operands, **params) -> cotangents of the operands`.
    """
    op = Primitive(name)
    op.multiple_results = True
    op.def_abstract_eval(types)
    ad.deflinear2(op, transpose)
    op.def_impl(refuse_derivative)
    batching.primitive_batchers[op] = refuse_derivative
    mlir.register_lowering(op, refuse_derivative)
    return op


_undefined_p = linear_primitive(
    "jaxfp8_undefined_derivative",
    lambda *tangents, avals, op: list(avals),
    _transpose,
)


def without_numpy(x):
    """Return a traced x without the array of numpy that `vmap` leaves inside, which
    JAX's custom derivatives refuse.

    JAX takes such arrays for operands of primitives alone; that of a name adds no
    operation to a program.
    """
    return checkpoint_name(x, "jaxfp8_operand")


def is_differentiated(operands):
    """Tell whether autodiff traces an operand: the tracers of jvp and of linearize have
    a tangent.
    """
    return any([hasattr(operand, "tangent") for operand in operands])
