"""The FP8 product as a JAX primitive: straight-through gradients, the next state as the state's cotangent.

A primitive, because then `vmap` is a change of dimension numbers, as for `lax.dot_general`: a batch that shares its
state is one larger product with one amax per operand, also in the backward. `custom_vjp` would compute and sum a kernel
gradient for every member.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import _compat, _mesh
from .._jax._primitives import compiled
from ..numerics import FP8_DTYPES
from ..ops._implementation import selected, using
from ..recipes import DotGeneralState, FixedScale, FP8StateWarning, value_of
from . import _probe
from ._gemms import Plan, backward, forward

# Name for rematerialization policies (checkpoint_policies.py).
OUTPUT_NAME = "jaxfp8_gemm_output"


def product(plan: Plan, x, kernel, bias, state: DotGeneralState, codes):
    """`y`.

    Args:
        x, kernel: as `lax.dot_general` takes them.
        bias: of the free dimensions of kernel, or None.
        codes: of x and of kernel, a QTensor where there is one already, else None.
    """
    codes = tuple(None if q is None else dataclasses.replace(q, source=None) for q in codes)
    fp8, f32 = (functools.partial(function, plan) for function in (_bind, _exact))
    return _probe.product(fp8, f32, x, kernel, bias, state, codes)


def _bind(plan, x, kernel, bias, state, codes):
    leaves, tree = jax.tree.flatten((bias, state, codes))
    return _product_p.bind(x, kernel, *leaves, plan=plan, tree=tree, implementation=selected())


def _exact(plan, x, kernel, bias, state, codes):
    """The product in float32, of operands as they are."""
    del state
    x, kernel = (
        value_of(operand, lax.stop_gradient(q), jnp.float32) for operand, q in zip((x, kernel), codes, strict=True)
    )
    y = lax.dot_general(
        x, kernel, plan.dimension_numbers, precision=lax.Precision.HIGHEST, out_sharding=plan.out_sharding
    )
    return y if bias is None else y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)


def _primal(x, kernel, *leaves, plan, tree, implementation):
    with using(implementation):
        return forward(plan, x, kernel, *jax.tree.unflatten(tree, leaves), None)[0]


def _abstract(x, kernel, *leaves, plan, tree, implementation):
    """The result as `lax.dot_general` types it: shape and sharding. It varies over every axis that an operand does."""
    del tree, implementation
    members = tuple(range(plan.members))
    contract, batch = ([tuple(d + plan.members for d in dims) for dims in pair] for pair in plan.dimension_numbers)
    dimension_numbers = (tuple(contract), tuple(members + dims for dims in batch))
    out_sharding = plan.out_sharding
    if out_sharding is not None:
        spec = PartitionSpec(*x.sharding.spec[: plan.members], *out_sharding)
        out_sharding = NamedSharding(x.sharding.mesh, spec)
    varying = _mesh.varying(x, kernel, *leaves)
    dot, _ = lax.dot_general_p.abstract_eval(
        *(_mesh.with_varying(a.update(dtype=plan.out_dtype), varying) for a in (x, kernel)),
        dimension_numbers=dimension_numbers,
        precision=None,
        preferred_element_type=None,
        out_sharding=out_sharding,
    )
    return dot


def _batch(args, dims, *, plan, **params):
    """A batch that shares its state is a larger product; a batch of states is a batch of products.

    So is a batch of kernels without state: as in a loop, each then has the scale of its own amax.
    """
    x, kernel, *leaves = args
    x_dim, kernel_dim, *leaf_dims = dims
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if size == 0:
        out = jax.eval_shape(functools.partial(_product_p.bind, plan=plan, **params), *map(_without, args, dims))
        return jnp.zeros((0, *out.shape), out.dtype), 0
    bias, state, _ = jax.tree.unflatten(params["tree"], leaves)
    *_, (of_x, _) = jax.tree.unflatten(params["tree"], range(len(leaves)))
    batched = {i for i, d in enumerate(leaf_dims) if d is not None}
    if batched and kernel_dim is None and of_x is not None and batched <= {of_x.data, of_x.data_t}:
        # Codes of x with one scale and one amax for all: more rows of x, as without codes.
        for i, position in ((of_x.data, plan.members), (of_x.data_t, plan.members + 1)):
            if i in batched:
                leaves[i] = jnp.moveaxis(leaves[i], leaf_dims[i], position)
        leaf_dims = []
    # Each kernel without state has its own scale. A bias belongs to a kernel: both are batched, or neither is.
    own = kernel_dim is not None and (bias is not None or None in (state.input, state.kernel, state.output_grad))
    if any(d is not None for d in leaf_dims) or own:
        # A state that the members share is still one state: what comes back combines by max.
        plain = 2 + (bias is not None)
        repeats = [_repeat] * plain + [repeat_state] * (len(args) - plain)
        specs = (jax.typeof(a).sharding.spec[d] for a, d in zip(args, dims, strict=True) if d is not None)
        axis = next((spec for spec in specs if spec is not None), None)  # that the members are cut along
        leading = [
            repeat((size, axis), a) if d is None else jnp.moveaxis(a, d, 0)
            for repeat, a, d in zip(repeats, args, dims, strict=True)
        ]
        return _product_p.bind(*leading, plan=dataclasses.replace(plan, members=plan.members + 1), **params), 0

    first = plan.members  # the batch comes right after the members
    (x_contract, kernel_contract), (x_batch, kernel_batch) = plan.dimension_numbers
    if x_dim is not None:
        x = jnp.moveaxis(x, x_dim, first)
        x_contract, x_batch = ([d + 1 for d in dims] for dims in (x_contract, x_batch))
    if kernel_dim is not None:
        kernel = jnp.moveaxis(kernel, kernel_dim, first)
        kernel_contract, kernel_batch = ([d + 1 for d in dims] for dims in (kernel_contract, kernel_batch))
    if x_dim is not None and kernel_dim is not None:
        x_batch, kernel_batch = (0, *x_batch), (0, *kernel_batch)
        out_dim = first
    elif x_dim is not None:  # a free dimension of x, its first
        out_dim = first + len(x_batch)
    else:
        out_dim = first + x.ndim - plan.members - len(x_contract)
    out_sharding = plan.out_sharding
    if out_sharding is not None:
        axis = next(jax.typeof(a).sharding.spec[first] for a, d in ((x, x_dim), (kernel, kernel_dim)) if d is not None)
        out_sharding = PartitionSpec(*out_sharding[: out_dim - first], axis, *out_sharding[out_dim - first :])
    dimension_numbers = (
        (tuple(x_contract), tuple(kernel_contract)),
        (tuple(x_batch), tuple(kernel_batch)),
    )
    plan = dataclasses.replace(plan, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
    return _product_p.bind(x, kernel, *leaves, plan=plan, **params), out_dim


def _without(x, dim):
    """The type of `x` without a dimension."""
    shape = x.shape if dim is None else x.shape[:dim] + x.shape[dim + 1 :]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _repeat(members, x):
    """`x` for each member; `members` is how many there are, and the mesh axis along which they are cut."""
    (size, axis), sharding = members, jax.typeof(x).sharding
    out = None if sharding.mesh.empty else NamedSharding(sharding.mesh, PartitionSpec(axis, *sharding.spec))
    return lax.broadcast_in_dim(x, (size, *x.shape), tuple(range(1, x.ndim + 1)), out_sharding=out)


# As `_repeat`, of state: the members' next states combine by max.
repeat_state = jax.custom_vjp(_repeat, nondiff_argnums=(0,))
repeat_state.defvjp(lambda members, x: (_repeat(members, x), None), lambda members, _, ct: (jnp.max(ct, axis=0),))


NOT_UPDATED = (
    "this gradient never updates FP8 state: it is not taken with respect to it, so scales stay what they are. "
    "Differentiate with respect to `_overwrite_with_gradient` (or the DotGeneralState) too, and store what comes back"
)


def _jvp(primals, tangents, *, plan, tree, implementation):
    """The products now, and a linear primitive that is only ever transposed."""
    x, kernel, *leaves = primals
    is_linear = tuple(type(t) is not ad.Zero for t in tangents)
    for name, operand, linear in zip(("x", "kernel"), (x, kernel), is_linear, strict=False):
        if operand.dtype in FP8_DTYPES and linear:
            raise TypeError(
                f"dot_general: {name}: a QTensor without its source has no gradient; see jaxfp8.quantize_params. What "
                "jaxfp8.freeze froze does not train: train the variables it was made of, or differentiate with respect "
                "to others than its kernels"
            )
    bias, state, codes = jax.tree.unflatten(tree, leaves)
    plain = 2 + (bias is not None)
    of_state = is_linear[plain : plain + len(jax.tree.leaves(state))]
    if of_state and not any(of_state) and not isinstance(state.input, FixedScale):
        warnings.warn(NOT_UPDATED, FP8StateWarning, stacklevel=1)  # once: Python shows a line's warning once
    out = _abstract(*map(jax.typeof, primals), plan=plan, tree=tree, implementation=implementation)
    with using(implementation):
        y, residuals = forward(plan, x, kernel, bias, state, codes, _wanted(is_linear, plain))
    residuals, residual_tree = jax.tree.flatten(residuals)
    tangent = _linear_p.bind(
        *(t for t, linear in zip(tangents, is_linear, strict=True) if linear),
        *residuals,
        plan=plan,
        is_linear=is_linear,
        residual_tree=residual_tree,
        operands=tuple(jax.typeof(operand) for operand in primals[:plain]),
        kept=tuple(len(jax.tree.leaves(of)) for of in _by_field(state)),
        implementation=implementation,
        out=out,
    )
    return _mesh.placed_as(out, y), tangent


def _by_field(state: DotGeneralState) -> list:
    return [getattr(state, field.name) for field in dataclasses.fields(state)]


def _wanted(is_linear, plain) -> list[str]:
    """The operands that want a gradient; `plain` of them are no state."""
    return [name for name, linear in zip(("x", "kernel", "bias")[:plain], is_linear, strict=False) if linear]


def _transpose(grad, *args, plan, is_linear, residual_tree, operands, kept, implementation, out):
    del out
    residuals = jax.tree.unflatten(residual_tree, args[sum(is_linear) :])
    wanted = _wanted(is_linear, len(operands))
    x, kernel = operands[:2]
    with using(implementation):
        *gradients, next_state = backward(plan, x.shape, kernel.shape, wanted, residuals, grad)
    # What is replicated gets the gradients of all devices.
    gradients = [
        None if ct is None else _mesh.cotangent_of(aval, ct.astype(aval.dtype))
        for aval, ct in zip(operands, gradients, strict=False)
    ]
    cotangents = gradients
    for count, of in zip(kept, _by_field(next_state), strict=True):
        # Without a run, as of codes that are final, it is not touched.
        cotangents += [None] * count if of is None else jax.tree.leaves(of)
    cotangents += [None] * (len(is_linear) - len(cotangents))  # codes have none
    linear = [ct for ct, is_wanted in zip(cotangents, is_linear, strict=True) if is_wanted]
    return linear + [None] * (len(args) - len(linear))


def _only_reverse(*args, **params):
    del args, params
    raise TypeError(
        "jaxfp8.dot_general has first derivatives in reverse mode only (jax.grad, jax.vjp): jax.jvp, jax.linearize "
        "applied forward, jax.jacfwd, vmap of a jvp and second derivatives of an FP8 product would be silently wrong"
    )


_product_p = Primitive("fp8_product")
_product_p.def_abstract_eval(_abstract)
_product_p.def_impl(compiled(_product_p))
_compat.needs_devices(_product_p)
mlir.register_lowering(_product_p, mlir.lower_fun(_primal, multiple_results=False))
batching.primitive_batchers[_product_p] = _batch
ad.primitive_jvps[_product_p] = _jvp

_linear_p = Primitive("fp8_product_linear")
_linear_p.def_abstract_eval(lambda *args, out, **params: out)
ad.deflinear2(_linear_p, _transpose)
ad.primitive_jvps[_linear_p] = _only_reverse
batching.primitive_batchers[_linear_p] = _only_reverse
_linear_p.def_impl(_only_reverse)
mlir.register_lowering(_linear_p, _only_reverse)
