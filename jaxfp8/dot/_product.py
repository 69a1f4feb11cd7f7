"""The FP8 product as a JAX primitive: straight-through gradients, the next state as the
state's cotangent.

It is a primitive, because `vmap` is then a change of dimension numbers, as for
`lax.dot_general`: a batch that shares its state is one larger product with one amax for
each operand, also in the backward. `custom_vjp` would compute and sum a kernel gradient
for every example.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .. import ops
from .._jax import _compat, _mesh
from .._jax._batching import batch_of, in_front, repeat, repeat_state
from .._jax._primitives import (
    compiled,
    is_differentiated,
    linear_primitive,
    refuse_derivative,
    undefined_tangents,
)
from ..numerics import FP8_DTYPES
from ..ops import _quantize_activation
from ..ops._support import using
from ..recipes import QTensor, Scale, as_codes
from ._autodiff import warn_of_state
from ._fused_input import (
    ActivationGradient,
    FusedInput,
    as_read_residual,
    compressed,
)
from ._gemms import backward, forward
from ._high_precision import multiply_by_jax

# Name for rematerialization policies (checkpoint_policies.py).
OUTPUT_NAME = "jaxfp8_gemm_output"


# The function that stands for each product. Part of jit's cache key, so that a program
# is traced anew.
_replacement = jax.make_user_context(None)


def replaced_by(replacement: Callable):
    """Return a context in which a function stands for each product, as tools need it.

    Args:
        replacement: a hashable function that takes the arguments of `multiply_fp8`, and
            may call `multiply_fp8` and `multiply_float32`.
    """
    return _replacement(replacement)


def multiply(product, *operands) -> list:
    """Multiply operands, those of `forward`: all products in FP8 meet here.

    Returns:
        `[y]`; with an activation, and without a replacement, y and the activated
        values.
    """
    replacement = _replacement.value
    if replacement is not None:
        return [replacement(dataclasses.replace(product, activation=None), *operands)]
    leaves, tree = jax.tree.flatten((operands, None))
    return product_p.bind(*leaves, product=product, tree=tree)


def multiply_fp8(product, *operands):
    """Return the FP8 product of the operands of `forward`, also in a replacement."""
    with _replacement(None):
        return multiply(product, *operands)[0]


def multiply_float32(product, x, kernel, bias, state, codes, group_sizes):
    """Return the float32 product of the values that the operands stand for."""
    del state
    product = dataclasses.replace(product, out_dtype=jnp.float32)
    x, kernel = zip((x, kernel), lax.stop_gradient(codes), strict=True)
    options = lax.Precision.HIGHEST, jnp.float32
    return multiply_by_jax(product, x, kernel, bias, group_sizes, *options)


def _primal(*leaves, product, tree):
    """Compute the results; or return those that stand beside the operands, computed
    elsewhere: the product is then their derivative alone.
    """
    operands, results = tree.unflatten(leaves)
    if results is not None:
        return results
    with using(product.implementation):
        y, _ = forward(product, *operands, None)
        return _results(product, y)


def _results(product, y) -> list:
    """Return the results of the primitive: y, and with an activation the activated
    values.
    """
    if product.activation is None:
        return [y]
    # Name y before the activation: a policy that saves y then saves the array that the
    # backward reads.
    y = checkpoint_name(y, OUTPUT_NAME)
    return [y, ops.activate(y, product.activation)]


def _abstract(x, kernel, *leaves, product, tree):
    """Type results as `lax.dot_general` does; a result varies over every mesh axis over
    which an operand varies.
    """
    del tree
    vmapped = tuple(range(product.vmap_dims))
    x, kernel = _mesh.varying_alike([x, kernel], leaves)
    if product.dims is not None:
        *names, result = ((*vmapped, *dims) for dims in product.dims)
        return _mesh.types([x, kernel], names, [result], [product.out_dtype], {})
    contract, batch = jax.tree.map(
        lambda d: d + product.vmap_dims, product.dimension_numbers
    )
    dimension_numbers = (contract, tuple([vmapped + dims for dims in batch]))
    out_sharding = product.out_sharding
    if out_sharding is not None:
        spec = PartitionSpec(*x.sharding.spec[: product.vmap_dims], *out_sharding)
        out_sharding = NamedSharding(x.sharding.mesh, spec)
    dot, _ = lax.dot_general_p.abstract_eval(
        x.update(dtype=product.out_dtype),
        kernel.update(dtype=product.out_dtype),
        dimension_numbers=dimension_numbers,
        precision=None,
        preferred_element_type=None,
        out_sharding=out_sharding,
    )
    if product.activation is None:
        return [dot]
    name = "activation: the product"
    _quantize_activation.check("dot_general", dot, product.activation, name)
    names = kept = tuple(range(dot.ndim))
    if ops.is_gated(product.activation):
        kept = names[:-2] + names[-1:]
    return [dot, *_mesh.types([dot], [names], [kept], [dot.dtype], {})]


def _batch(args, dims, *, product, tree):
    """Batch: examples that share a state are one larger product; states with a batch
    are a batch of products.

    A batch of kernels without state is a batch of products too: as in a loop, each
    kernel has its own scale.
    """
    operands, product, out_dim = _batched(args, dims, product, tree)
    if batch_of(args, dims)[0] == 0:  # nothing to multiply
        outs = _abstract(*map(jax.typeof, operands), product=product, tree=tree)
        results = [jnp.zeros(out.shape, out.dtype) for out in outs]
    else:
        results = product_p.bind(*operands, product=product, tree=tree)
    return results, [out_dim] * len(results)


def _batched(args, dims, product, tree):
    """Return the operands of the product for a batch, that product, and the batch
    dimension of its results.
    """
    args, (positions, results) = list(args), tree.unflatten(range(len(args)))
    _, _, bias, state, (x_codes, _), group_sizes = positions
    is_ragged, has_kernels = group_sizes is not None, dims[1] is not None
    batched = [i for i in jax.tree.leaves(positions[2:]) if dims[i] is not None]
    # 1. A fused input with a batch of its own x alone is more rows: move this batch as
    #    that of x.
    is_fused = isinstance(x_codes, FusedInput) and batched == [x_codes.x]
    if is_fused and not has_kernels and not is_ragged:
        i = x_codes.x
        args[i] = jnp.moveaxis(args[i], dims[i], product.vmap_dims)
        batched = []

    # 2. States with a batch, kernels that are scaled each by itself, rows in groups: a
    #    batch of products. A bias belongs to a kernel: both have a batch, or neither.
    has_own_scales = bias is not None or None in (
        state.input,
        state.kernel,
        state.output_grad,
    )
    if is_ragged or batched or (has_kernels and has_own_scales):
        # A state that the examples share is still one state: its cotangents combine by
        # max.
        batch, of_state = batch_of(args, dims), set(jax.tree.leaves(state))
        for i, d in enumerate(dims):
            repeated = repeat_state if i in of_state else repeat
            args[i] = in_front(batch, args[i], d, repeated)
        return args, product.with_vmap_dims(1), 0

    # 3. One larger product.
    args[:2], product, out_dim = _larger_product(product, args[:2], dims[:2])
    for i in results or ():
        args[i] = jnp.moveaxis(args[i], dims[i], out_dim)
    return args, product, out_dim


def _larger_product(product, operands, dims):
    """Return x and kernel with the batch first among their dimensions, the product that
    has it, and the batch dimension of its result.

    The batch is a batch dimension of both operands, or a free dimension of the only one
    that has it.
    """
    first, operands = product.vmap_dims, list(operands)
    contract, batch = map(list, product.dimension_numbers)
    cut = [i for i, d in enumerate(dims) if d is not None]
    for i in cut:
        operands[i] = jnp.moveaxis(operands[i], dims[i], first)
        for numbers in (contract, batch):
            numbers[i] = tuple([d + 1 for d in numbers[i]])
    if len(cut) == 2:
        batch, out_dim = [(0, *numbers) for numbers in batch], 0
    elif cut == [0]:  # the first free dimension of x
        out_dim = len(batch[0])
    else:  # that of the kernel, after those of x
        out_dim = operands[0].ndim - first - len(contract[0])
    out_sharding = product.out_sharding
    if out_sharding is not None:
        axis = jax.typeof(operands[cut[0]]).sharding.spec[first]
        out_sharding = PartitionSpec(
            *out_sharding[:out_dim], axis, *out_sharding[out_dim:]
        )
    product = dataclasses.replace(
        product,
        dimension_numbers=(tuple(contract), tuple(batch)),
        out_sharding=out_sharding,
    )
    return operands, product, first + out_dim


def _linearize(is_vjp, is_linear, *primals, product, tree):
    """Compute the forward now; return the results, the residuals, and a function that
    binds a primitive of them.

    The residuals hold y for the backward of an activation.
    """
    # 1. Check that the gradient has sources and state, whose gradient is its next
    #    value.
    operands, results = tree.unflatten(primals)
    x, kernel, bias, state, codes, group_sizes = operands
    (*of_operands, of_state, _, _), _ = tree.unflatten(is_linear)
    primals = jax.tree.leaves(operands)
    is_linear = is_linear[: len(primals)]
    codes = _checked_codes(product, (x, kernel), codes, of_operands)
    is_left_out = _state_is_left_out(state)
    outs = _abstract(*map(jax.typeof, primals), product=product, tree=tree)
    names = zip(("x", "kernel", "bias"), of_operands, strict=True)
    differentiated = tuple([name for name, is_linear in names if is_linear])
    # 2. Compute the results and the residuals.
    with using(product.implementation):
        y, residuals = forward(
            product, x, kernel, bias, state, codes, group_sizes, differentiated
        )
        computed = _results(product, _mesh.placed_as(outs[0], y))
        y = None if product.activation is None else computed[0]
        if y is not None and product.fp8_residual:
            y = compressed(y)
    residuals = residuals, y, group_sizes
    # 3. Make the results differentiable: a loss around this gradient may take its
    #    value, and differentiates that value for the first time. The ops that compute
    #    it have no derivative; the derivative of the product is what is meant.
    leaves, tree = jax.tree.flatten((operands, results or computed))
    results = product_p.bind(*leaves, product=product, tree=tree)
    # 4. Put everything else that the backward needs into static params, so that remat
    #    and scan keep arrays alone.
    residuals, residual_tree = jax.tree.flatten(residuals)
    types = tuple(map(jax.typeof, jax.tree.leaves((x, kernel, bias))))
    state_leaves = tuple([len(jax.tree.leaves(old)) for old in state.by_quantizer()])

    # Operands without a tangent get no gradient: the backward leaves out their product.
    def linear(residuals, *tangents):
        tangents = [t for t, linear in zip(tangents, is_linear, strict=False) if linear]
        # A gradient of one array that is no kernel, such as a saliency map, is no step
        # of training.
        is_of_input = differentiated == ("x",) and _compat.is_of_one_array(tangents[0])
        if is_left_out and not is_of_input:
            where = _compat.outermost_trace(tangents[0])
            is_updated = jax.tree.leaves(of_state)
            warn_of_state(product.quantizers, is_updated, product.layer, where)
        return _linear_p.bind(
            *tangents,
            *residuals,
            product=product,
            is_linear=tuple(is_linear),
            differentiated=differentiated,
            residual_tree=residual_tree,
            operands=types,
            state_leaves=state_leaves,
            outs=tuple(outs),
        )

    return _compat.linearized(results, residuals, linear)


@jax.custom_jvp
def _differentiated_once(codes, source):
    """Return `codes`. A derivative of this function with respect to `source`, a second
    one of the product, raises.
    """
    del source
    return codes


@_differentiated_once.defjvp
def _(primals, tangents):
    leaves, tree = jax.tree.flatten(primals[0])
    undefined = undefined_tangents(leaves, jax.tree.leaves(tangents))
    return _differentiated_once(*primals), tree.unflatten(
        map(ad.instantiate_zeros, undefined)
    )


def _state_is_left_out(state) -> bool:
    """Tell whether no gradient around a product can be with respect to its state, the
    result of `read`: it is an array, and not fixed.
    """
    # No step updates a fixed scale, in inference.
    is_fixed = isinstance(state.input, Scale) and state.input.amax is None
    return not is_fixed and not is_differentiated(jax.tree.leaves(state))


def _checked_codes(product, operands, codes, differentiated) -> list[QTensor | None]:
    """Check that a gradient has the sources of its codes; return the codes of operands.

    A second derivative of the returned codes, with respect to their source, raises.
    Codes are named for remat.

    Args:
        product: the static part.
        operands: x and kernel, or the sources of their codes.
        codes: `(x, kernel)`: the QTensor of an operand, or for x a fused input; else
            None.
        differentiated: for each operand, whether the gradient is taken with respect to
            that operand.

    Raises:
        TypeError: the gradient is taken with respect to a QTensor without a source.
    """
    checked = []
    rows = zip(product.names, operands, codes, differentiated, strict=False)
    for name, operand, q, has_gradient in rows:
        if operand.dtype in FP8_DTYPES and has_gradient:
            raise TypeError(
                f"{name}: a QTensor without its source has no gradient; see "
                "jaxfp8.quantize_params. A model of jaxfp8.freeze does not train: "
                "train the variables it was frozen from, or differentiate with "
                "respect to other variables than its kernels"
            )
        if q is not None:
            q = _differentiated_once(q, operand)
        if isinstance(q, QTensor):
            # If a remat policy saves the codes, the computation of their source does
            # not run again.
            q = as_read_residual(q)
        checked.append(q)
    return checked


def _jvp(primals, tangents, **params):
    is_linear = [type(t) is not ad.Zero for t in tangents]
    results, _, *residuals, linear = _linearize(False, is_linear, *primals, **params)
    return results, linear(*residuals, *tangents)


def _transpose(
    cotangents,
    *args,
    product,
    is_linear,
    differentiated,
    residual_tree,
    operands,
    state_leaves,
    outs,
):
    del outs
    # 1. Find the gradient of y.
    residuals, y, group_sizes = residual_tree.unflatten(args[sum(is_linear) :])
    if isinstance(y, QTensor):
        y = as_codes(y).dequantize(product.out_dtype)
    grad = _gradient(product, y, *cotangents)
    if grad is None:
        return [None] * len(args)
    # 2. Compute the gradients of the operands and the next state.
    shapes = [aval.shape for aval in operands[:2]]
    with using(product.implementation):
        *gradients, ct_of_state = backward(
            product, *shapes, differentiated, residuals, grad, group_sizes
        )
    # 3. Turn them into cotangents. The cotangent of a replicated operand is the psum of
    #    the cotangents of all devices, that of the kernel in the dtype of its product.
    cotangents = []
    for i, (aval, ct) in enumerate(zip(operands, gradients, strict=False)):
        if ct is not None:
            is_kernel = i == 1
            ct = ct if is_kernel else ct.astype(aval.dtype)
            ct = _mesh.cotangent_of(aval, ct).astype(aval.dtype)
        cotangents.append(ct)
    for count, state in zip(state_leaves, ct_of_state.by_quantizer(), strict=True):
        # A quantizer that recorded nothing gives no cotangent: its state stays. The
        # cotangent of a reading stands for those of the histories.
        leaves = jax.tree.leaves(state, is_leaf=lambda leaf: leaf is None)
        cotangents += [None] * count if state is None else leaves[:count]
    # 4. Give cotangents to the operands that are linear; codes have none.
    pairs = zip(cotangents, is_linear, strict=False)
    linear = [ct for ct, linear in pairs if linear]
    return linear + [None] * (len(args) - len(linear))


def _gradient(product, y, ct, ct_activated=None):
    """Return the gradient of y from the cotangents of y and of its activation; None
    where both are zero.
    """
    parts = [] if type(ct) is ad.Zero else [ct]
    if ct_activated is not None and type(ct_activated) is not ad.Zero:
        parts.append(ActivationGradient(y, ct_activated, product.activation))
    if len(parts) == 2:  # one tensor has to hold the sum
        return parts[0] + parts[1].value
    return parts[0] if parts else None


product_p = Primitive("fp8_product")
product_p.multiple_results = True
product_p.def_abstract_eval(_abstract)
product_p.def_impl(compiled(product_p))
_compat.need_devices.add(product_p)
mlir.register_lowering(product_p, mlir.lower_fun(_primal, multiple_results=True))
batching.primitive_batchers[product_p] = _batch
ad.primitive_jvps[product_p] = _jvp
_compat.linearizations[product_p] = _linearize

_linear_p = linear_primitive(
    "fp8_product_linear", lambda *args, outs, **params: outs, _transpose
)
ad.primitive_jvps[_linear_p] = refuse_derivative
