"""The only place that touches private JAX names, above all for a float32 that autodiff
adds by max.

Autodiff adds the cotangents of a value that is used more than once by a rule of the
value's dtype. `jax._src.dtypes.ExtendedDType` is the hook for dtypes with rules of
their own. Without a hook autodiff would sum FP8 state in silence, so a JAX that lacks
one is refused at import.
"""

import dataclasses
import functools
import pkgutil
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, set_current_trace
from jax.interpreters import ad, batching, mlir
from jax.sharding import use_abstract_mesh

from ._primitives import compiled


def _hook(name):
    """Return a private object of JAX by its whole name.

    Raises:
        ImportError: this JAX has no object of this name.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"jaxfp8 needs {name}, which JAX {jax.__version__} lacks: without it FP8 "
            "state would be summed in silence. Install a JAX that jaxfp8 was tried "
            "with: pip install 'jax>=0.10.2,<0.13'"
        ) from error


# All hooks are here before the first of them is used: JAX stays as it is where one is
# missing.
# The primitives whose programs JAX lowers for the devices that they will run on:
# _partition.py asks for these.
need_devices = _hook("jax._src.dispatch.prim_requires_devices_during_lowering")
# The rules `(is_vjp, is_linear, *primals, **params) -> linearized(...)`, by primitives
# that have a jvp as well, from which JAX would derive one at each use. `is_linear` says
# which operands have tangents.
linearizations = _hook("jax._src.interpreters.ad.primitive_linearizations")
_DynamicJaxprTrace = _hook("jax._src.interpreters.partial_eval.DynamicJaxprTrace")
_LinearizeTrace = _hook("jax._src.interpreters.ad.LinearizeTrace")
_ExtendedDType = _hook("jax._src.dtypes.ExtendedDType")
_EArray = _hook("jax._src.earray.EArray")
_physical_aval = _hook("jax._src.core.physical_aval")
_result_handlers = _hook("jax._src.interpreters.pxla.global_result_handlers")
_adders = _hook("jax._src.ad_util.raw_jaxval_adders")
_stop_gradient_p = _hook("jax._src.ad_util.stop_gradient_p")
_lax_module = _hook("jax._src.lax.lax")
_stop_others = _hook("jax._src.lax.lax._stop_gradient")
_transpose_broadcast = ad.primitive_transposes[lax.broadcast_in_dim_p]
# Newer versions of JAX have structured residuals beside the residuals.
_has_structured = "structured_residuals" in _LinearizeTrace.__init__.__code__.co_names
# Whether XLA gives a custom call a part of an array in place, also in a loop. In JAX
# 0.10.2 it copies the part.
gives_parts_in_place = jax.__version_info__ >= (0, 12)


def linearized(results, residuals, function):
    """Return the result of a rule of `linearizations`.

    Args:
        results: the list of the op's results, all of which have tangents.
        residuals: a pytree of arrays.
        function: `(residuals, *tangents) -> tangents of the results`, which is linear
            and takes the tangents of all operands.
    """
    has_tangent = [True] * len(results)
    if not _has_structured:
        return results, has_tangent, residuals, function

    def with_structured(residuals, structured, *tangents):
        return function(residuals, *tangents)

    return results, has_tangent, residuals, None, with_structured


def is_of_one_array(tangent):
    """Tell whether the gradient that this tangent belongs to is of one array; False
    inside of `jax.checkpoint`.
    """
    # The trace of a tangent is that of the linear function, whose inputs are the arrays
    # of the gradient.
    frame = getattr(getattr(tangent, "_trace", None), "frame", None)
    return len(getattr(frame, "invars", ())) == 1


def outermost_trace(tangent):
    """Return the outermost trace around a tangent: that of the `jit` around a gradient,
    or that of the gradient.
    """
    trace = getattr(tangent, "_trace", None)
    while type(outer := getattr(trace, "parent_trace", None)).__name__ not in (
        "NoneType",
        "EvalTrace",
    ):
        trace = outer
    return trace


def devices_of(ctx):
    """Return the target of a lowering: `"one"` device, a `"shard"` of a `shard_map`, a
    `"mesh"`; or `"unknown"`.

    Two kinds of programs are `"unknown"` too: programs of the older partitioner, which
    takes no rules by name, and programs to be exported, because the callback of
    `custom_partitioning` cannot be written out.
    """
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        if set(context.manual_axes) == set(context.mesh.axis_names):
            return "shard"
        # A `shard_map` over some of the axes leaves the others to XLA: its program is
        # neither that of one device nor that of the whole mesh.
        return "unknown"
    if context.num_devices == 1:
        return "one"
    shardy = jax.config.jax_use_shardy_partitioner
    exported = ctx.module_context.lowering_parameters.for_export
    if shardy and not exported and context.device_assignment and context.abstract_mesh:
        return "mesh"
    return "unknown"


def with_mesh(ctx, mesh):
    """Return a lowering context whose devices are those of `ctx`, in the same order, as
    another mesh.

    `devices_of` says `"mesh"` only where the context has this form.
    """
    module = ctx.module_context
    context = dataclasses.replace(module.axis_context, abstract_mesh=mesh)
    return ctx.replace(module_context=module.replace(axis_context=context))


def gpus_of(ctx):
    """Return the GPUs that a program is lowered for; empty where JAX does not name
    them.
    """
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None) or ()
    # The context of a `shard_map` has a mesh and no assignment; an abstract mesh names
    # no devices.
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        devices = mesh.devices.flat
    return [device for device in devices if device.platform == "gpu"]


class _MaxType(jax.dtypes.extended):
    """The kind of the dtype, for `jax.dtypes.issubdtype`."""


class _MaxRules:
    """The rules that JAX asks of an extended dtype. Values are stored as float32."""

    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype):
        return jax.ShapeDtypeStruct((), jnp.float32)

    @staticmethod
    def tangent_dtype(dtype):
        return dtype

    @staticmethod
    def add(dtype, x, y):
        # Autodiff calls this to add cotangents: the sum of the uses of a state is their
        # max.
        return combined(x, y)

    @staticmethod
    def zero(dtype):
        # State is not negative, so 0 is neutral in a max too.
        return to_max(jnp.float32(0), dtype)

    @staticmethod
    def full(shape, fill_value, dtype):
        return to_max(lax.full(shape, fill_value, jnp.float32), dtype)

    @staticmethod
    def global_sharded_result_handler(aval, out_sharding, committed):
        # A jitted function that returns this dtype gives a float32 array in the wrapper
        # that JAX has for extended dtypes.
        physical = _physical_aval(aval)
        handler = _result_handlers[jax.core.ShapedArray](
            physical, out_sharding, committed
        )
        return handler.wrap(lambda x: _EArray(aval, x))


@dataclasses.dataclass(frozen=True)
class MaxDtype(_ExtendedDType):
    """A dtype called `name` whose cotangents, as float32, meet in
    `max(clean(a), clean(b))`.
    """

    name: str
    clean: Callable[..., Any]
    _rules: type = _MaxRules
    type: type = _MaxType
    itemsize: int = 4

    def __repr__(self):
        return self.name


MAX_DTYPE = MaxDtype("float32_max", lambda x: x)


# jax.debug_nans reads this attribute.
_EArray.addressable_shards = property(lambda self: self._data.addressable_shards)


def _refuse_broadcast_of_state(ct, *args, **params):
    """Raise where JAX would sum the cotangents of a state that it repeated for the
    examples of a `vmap`.
    """
    if not is_max(ct):
        return _transpose_broadcast(ct, *args, **params)
    raise TypeError(
        "jaxfp8: one FP8 state was repeated for each example of a vmap, as JAX does "
        "with a cond or switch whose predicate differs between the examples: both "
        "branches would run, on all of them. Use jax.lax.map or jax.lax.scan over the "
        "examples in place of vmap, or call the layer outside of the cond and choose "
        "between results with jnp.where"
    )


ad.primitive_transposes[lax.broadcast_in_dim_p] = _refuse_broadcast_of_state


def _stop_gradient(x):
    """Stop the gradient of state too: `lax.stop_gradient` returns arrays of an extended
    dtype as they are.
    """
    return _stop_gradient_p.bind(x) if is_max(x) else _stop_others(x)


_lax_module._stop_gradient = _stop_gradient


# References to the results that `once` knows, by the function and the ids of operands.
known_results = {}


def once(function, operands, *static):
    """Return `function(operands, *static)`, a list of arrays, computed where the
    operands are from, and once for the same ones: the cotangents of all uses meet
    there.

    What a loop body, a branch or a rematerialized function computes of operands from
    outside is then computed outside. Operands that are no tracers, or are from several
    traces, are computed with where they are used.

    Args:
        function: a function of a list of arrays.
        operands: the arrays.
        static: hashable arguments.
    """
    traces = [getattr(x, "_trace", None) for x in operands]
    if traces[0] is None or traces.count(traces[0]) < len(traces):
        return function(operands, *static)
    key = function, tuple(map(id, operands)), static
    if key in known_results:
        results = [reference() for reference in known_results[key]]
        if all(result is not None for result in results):
            return results
    mesh = jax.typeof(operands[0]).sharding.mesh
    with set_current_trace(traces[0]), use_abstract_mesh(mesh):
        if hasattr(operands[0], "batch_dim"):
            results = _of_batch_p.bind(*operands, function=function, static=static)
        else:
            results = function(operands, *static)
    # A result of `jit`'s trace holds its operands, and lives as long as it is used.
    is_of_jit = isinstance(traces[0], _DynamicJaxprTrace)
    hold = weakref.ref if is_of_jit else _strong_reference
    known_results[key] = list(map(hold, results))
    # What is known of a tracer dies with it: its id may be that of another one then.
    for x in operands:
        weakref.finalize(x, known_results.pop, key, None)
    return results


def _once_of_batch(operands, dims, *, function, static):
    """Compute with the operands of a `vmap` where these are from."""
    results = once(_vmapped(function, static, tuple(dims)), list(operands))
    return results, [0] * len(results)


@functools.cache  # `once` needs the same function each time
def _vmapped(function, static, dims):
    return jax.vmap(lambda operands: function(operands, *static), [list(dims)])


_of_batch_p = Primitive("jaxfp8_once")
_of_batch_p.multiple_results = True
batching.primitive_batchers[_of_batch_p] = _once_of_batch


def _strong_reference(x):
    return lambda: x


def _types_of_cast(*xs, dtypes):
    pairs = zip(xs, dtypes, strict=True)
    return [x.update(dtype=dtype, weak_type=False) for x, dtype in pairs]


def _lower_cast(ctx, *xs, dtypes):
    old = list(map(_physical_aval, ctx.avals_in))
    new = list(map(_physical_aval, ctx.avals_out))
    new_dtypes = [aval.dtype for aval in new]
    if [aval.dtype for aval in old] == new_dtypes:
        return xs

    # Trainers may have cast the tree: state in a narrower dtype is read as f32.
    def convert(*xs):
        return list(map(lax.convert_element_type, xs, new_dtypes))

    ctx = ctx.replace(avals_in=old, avals_out=new)
    return mlir.lower_fun(convert)(ctx, *xs)


def _transpose_cast(cotangents, *xs, dtypes):
    cotangents = map(ad.instantiate_zeros, cotangents)
    return cast(cotangents, [x.aval.dtype for x in xs])


# A change of dtypes, which is linear; JAX's own conversion of extended dtypes has no
# working transpose.
_cast_p = Primitive("jaxfp8_cast")
_cast_p.multiple_results = True
_cast_p.def_abstract_eval(_types_of_cast)
_cast_p.def_impl(compiled(_cast_p))
mlir.register_lowering(_cast_p, _lower_cast)
ad.deflinear2(_cast_p, _transpose_cast)
batching.primitive_batchers[_cast_p] = lambda xs, dims, dtypes: (cast(xs, dtypes), dims)


_FLOAT32 = jnp.dtype(jnp.float32)


def cast(xs, dtypes):
    """Return arrays in other dtypes, a MaxDtype among them."""
    return _cast_p.bind(*xs, dtypes=tuple(dtypes))


# The modules whose methods an array of the max dtype lacks.
METHODS_OF_ARRAYS = ("jax._src.earray", "jax._src.numpy.array_methods")


def is_max(x):
    """Return whether `x` is an array of the max dtype, or of another MaxDtype."""
    return isinstance(getattr(x, "dtype", None), MaxDtype)


def holds_max(tree):
    """Tell whether any leaf of `tree` has a MaxDtype."""
    return any(map(is_max, jax.tree.leaves(tree)))


def combined(x, y):
    """Combine two arrays of one MaxDtype, as autodiff does."""
    clean = x.dtype.clean
    return to_max(lax.max(clean(plain(x)), clean(plain(y))), x.dtype)


# Outside of jit autodiff adds concrete arrays of an extended dtype, and JAX has no
# adder for their type.
_adders[_EArray] = combined


def largest(x):
    """Combine the entries of an array along the first axis, as `combined` does; an
    array of another dtype by their maximum.
    """
    if not is_max(x):
        return jnp.max(x, axis=0)
    return to_max(jnp.max(x.dtype.clean(plain(x)), axis=0), x.dtype)


def to_max(x, dtype=MAX_DTYPE):
    """Convert a float array to the max dtype, or to another MaxDtype; an array of such
    a dtype stays as it is. One value has the same result wherever it is used.
    """
    return x if is_max(x) else once(cast, [x], (dtype,))[0]


def with_max(tree):
    """Return a tree with traced float arrays in the max dtype, others in float32; an
    array of a MaxDtype stays as it is.
    """

    def convert(x):
        if isinstance(x, jax.core.Tracer):
            return to_max(x)
        return x if is_max(x) else jnp.asarray(x).astype(jnp.float32)

    return jax.tree.map(convert, tree)


def plain(tree):
    """Return a tree with float32 in the place of each MaxDtype."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_max(leaf)]
    if places:
        new = cast([leaves[i] for i in places], [_FLOAT32] * len(places))
        for i, leaf in zip(places, new, strict=True):
            leaves[i] = leaf
    return structure.unflatten(leaves)
