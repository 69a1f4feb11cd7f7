"""Ops as JAX primitives: a subclass of `Op` is one op, and all ops share one set of
rules.

An op names the dimensions of its operands and results. The names give the batching
rule, the types of results on a mesh, and the partitioning of the op (_partition.py).
`vmap` adds vmapped dimensions: leading dimensions of every operand and result, each
index with its own scale and amax.

The lowering rule chooses by platform: a custom call where a native library is loaded
and the user has not disabled the call, the jnp reference elsewhere; for TPUs the
reference as they compute it.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import _batching, _compat, _mesh
from .._jax._primitives import compiled, not_differentiable
from ..numerics import _tpu
from . import _ffi, _support
from ._partition import ONE as ONE, WHOLE, dims, lower_partitioned, lower_plain

PRIMITIVES = []
# The first letters of the name of a history's dimension.
SLOTS = f"{WHOLE}_slot"


@dataclasses.dataclass(frozen=True)
class Op:
    """An op with the static part of a call, its fields. It is called with the operands,
    and returns a list of arrays.

    A subclass becomes a frozen dataclass, and with a `name` a primitive. It defines
    `name`, `names`, `reference` and `cpu`, and of the rest what differs. Fields hash,
    so that equal calls are one program.

    Attributes:
        vmap_dims: the number of vmapped dimensions.
        implementation: the argument of the `implementation` where the op was made, or
            None.
        name: the op's name in messages and programs.
        custom_call: the custom call that `cpu` and `cuda` make; None for that of
            `name`.
        by_xla: a program like `reference` that XLA's GPU compiler rewrites to calls of
            cuBLASLt. It runs under `implementation("xla")`, and on a GPU with FP8 where
            `cuda` finds no cuBLASLt. None where `cuda` needs no cuBLASLt.
        on_shards: `(operands, cut) -> operands`: the last change to the operands of one
            device of a mesh, for an op whose part depends on the device's place; the
            device's program may take more operands. `cut(name)` returns the index of
            the device's shard of a dimension, and the number of shards. XLA does not
            cut the reference of such an op.
        second: positions of operands, matrices whose other layout comes behind all
            operands. A mesh may gather it in place of the first layout; no
            implementation reads it.
        turned: `(other layout, rows, columns) -> layout`, on one device, where those
            are the numbers of dimensions of the other layout; for an op with `second`.
    """

    vmap_dims: int = dataclasses.field(default=0, kw_only=True)
    implementation: str | None = dataclasses.field(
        default_factory=_support.selected, kw_only=True
    )
    second: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    name = None
    custom_call = None
    by_xla = None
    on_shards = None
    turned = None

    # The definition of an op ----------------------------------------------------------

    def names(self, *ranks) -> tuple[Sequence, Sequence]:
        """Return the names of the dimensions of each operand and of each result,
        without vmapped dimensions, in parts: tuples of names, of the dimensions that a
        custom call takes as one. Second layouts follow from `second`.

        A name stands for one size. A dimension that a result lacks was reduced: by max
        for a result named `ONE` (an amax), by sum for any other result.
        """
        raise NotImplementedError

    def reference(self, *operands) -> Sequence:
        """Compute the results in jnp."""
        raise NotImplementedError

    def attributes(self) -> dict:
        """Return the attributes of the custom call."""
        return {}

    def cpu(self, *operands) -> Sequence:
        """Compute the results on a CPU, by default with a custom call."""
        return self.call_on_groups(*operands)

    def cuda(self, *operands) -> Sequence:
        """Compute the results on NVIDIA GPUs, by default with the custom call of
        `cpu`.
        """
        return self.cpu(*operands)

    def tpu(self, *operands) -> Sequence:
        """Compute the results by `reference`, which has the float arithmetic and the
        products of codes of a TPU where `_tpu.devices` has a value.
        """
        return self.reference(*operands)

    def dtypes(self, *operands) -> Sequence | None:
        """Return the dtypes of the results; None for float32."""
        return None

    def sizes(self, *shapes) -> dict[str, int]:
        """Return the sizes of names that only results have, from the operands' shapes
        without vmapped dimensions.
        """
        return {}

    def batch_first(self, operands, batch_dims) -> tuple | None:
        """Batch by a rule of the op's own, to `(results, dims)`; None where the rule of
        all ops applies.
        """
        return None

    def added(self) -> Sequence[int]:
        """Return positions of operands that are added to the first result.

        Where a mesh sums parts of the result, one device adds them.
        """
        return ()

    def on_one_device_only(self) -> bool:
        """Return whether custom calls run on one device only: on a mesh and in a
        `shard_map` the reference runs.
        """
        return False

    def not_on(self, capabilities, *types) -> str | None:
        """Return why `cuda` cannot take these operands on GPUs of these compute
        capabilities; None where it can.
        """
        return None

    def for_gpus(self, ctx, capabilities) -> "Op":
        """Return the op whose `cuda` runs in the program of a lowering rule, for GPUs
        of these compute capabilities.
        """
        return self

    # The rules of all ops -------------------------------------------------------------

    def __init_subclass__(cls) -> None:
        """Make the class a dataclass; make its primitive, and register its rules."""
        dataclasses.dataclass(frozen=True)(cls)
        if "name" not in vars(cls):
            return
        cls.primitive = primitive = Primitive(f"jaxfp8_{cls.name}")
        primitive.multiple_results = True
        primitive.def_abstract_eval(_abstract)
        primitive.def_impl(compiled(primitive))
        ad.primitive_jvps[primitive] = functools.partial(
            not_differentiable, primitive, cls.name
        )
        batching.primitive_batchers[primitive] = _batch
        # The rule without a platform is the default: platforms without a native library
        # lower to the reference.
        for platform in (None, "tpu", "cpu", "cuda"):
            rule = functools.partial(_lower, platform)
            mlir.register_lowering(primitive, rule, platform=platform)
        _compat.need_devices.add(primitive)
        PRIMITIVES.append(primitive)

    def __call__(self, *operands):
        """Bind the primitive."""
        return self.primitive.bind(*operands, op=self)

    def parts(self, operands):
        """Return `names` for these operands."""
        return _names(self, *[x.ndim - self.vmap_dims for x in operands])

    def all_names(self, operands):
        """Return `names` with the vmapped dimensions, which lead in every operand and
        result.
        """
        leading = dims("vmapped", self.vmap_dims)
        before, after = self.parts(operands)
        operand_names = [sum(parts, leading) for parts in before]
        return operand_names, [sum(parts, leading) for parts in after]

    def lower(self, platform, ctx, *operands):
        """Lower to the implementation that runs on a platform; None is one without a
        native library.
        """
        # The names and the reference are those of `self`: `for_gpus` changes how a
        # kernel runs, and not the op's results.
        name, op = self.choose(platform, ctx), self
        if name == "cuda":
            capabilities = _support.capabilities(_support.gpus(ctx))
            op = self.for_gpus(ctx, capabilities)
        devices, tpus, in_jnp = _compat.devices_of(ctx), None, "reference"
        if name == "tpu":
            # JAX registers no custom partitioning for TPUs
            if devices == "mesh" and self.on_shards is not None:
                raise NotImplementedError(
                    f"jaxfp8.ops.{self.name}: expected operands of one device, got a "
                    "mesh of TPUs, where XLA cannot cut this op; call it inside of "
                    "jax.shard_map, each device with its own rows or groups"
                )
            in_jnp, tpus = name, devices
        # XLA partitions jnp code by itself. It would cut a custom call only by the rule
        # of `lower_partitioned`, which needs a known mesh.
        if devices == "unknown" or (devices != "one" and self.on_one_device_only()):
            name = in_jnp
        run = getattr(type(self), name)
        is_custom = run != getattr(type(self), in_jnp)
        with _tpu.devices(tpus):
            if devices == "mesh" and (is_custom or self.on_shards is not None):
                as_bytes = platform == "cpu"
                run = functools.partial(run, op)
                return lower_partitioned(self, run, as_bytes, ctx, operands)
            # On one device, and in jnp code that XLA cuts, nothing chooses between
            # layouts: leave out the second layouts.
            count = len(operands) - len(self.second)
            run, avals = functools.partial(run, op), ctx.avals_in[:count]
            return lower_plain(ctx, run, avals, operands[:count])

    def results(self, *operands):
        """Return the types of the results of these arrays."""
        return _abstract(*map(jax.typeof, operands), op=self)

    def canonical(self, shape, parts):
        """Return the shape in which a custom call takes an array: a dimension for each
        part of its names. The first part has the vmapped dimensions too.
        """
        first, *rest = map(len, parts)
        return merged(shape, self.vmap_dims + first, *rest)[:-1]

    def in_groups(self, operands, types):
        """Return the operands in canonical form, and `(shape, dtype)` of the results,
        which have these types, in that form.
        """
        before, after = self.parts(operands)
        pairs = zip(operands, before, strict=True)
        arrays = [x.reshape(self.canonical(x.shape, parts)) for x, parts in pairs]
        pairs = zip(types, after, strict=True)
        return arrays, [(self.canonical(x.shape, parts), x.dtype) for x, parts in pairs]

    def call_on_groups(self, *operands, aliases=None):
        """Make the custom call of an op on operands in canonical form."""
        types = self.results(*operands)
        arrays, results = self.in_groups(operands, types)
        attributes = self.attributes()
        outputs = _ffi.call(self.name, results, *arrays, aliases=aliases, **attributes)
        return [out.reshape(x.shape) for out, x in zip(outputs, types, strict=True)]

    def choose(self, platform, ctx):
        """Return the name of the method that runs."""
        is_for_tpu = platform == "tpu" and self.implementation in (None, "xla")
        if is_for_tpu or self.implementation == "tpu":
            return "tpu"
        if self.implementation == "xla" and self.by_xla is not None:
            return "by_xla"
        # In an op without `by_xla` the implementation "xla" is the reference.
        if self.implementation not in (None, "ffi"):
            return "reference"
        gpus = _support.gpus(ctx) if platform == "cuda" else []
        reason, instead = self.lacks(platform, gpus, ctx.avals_in), "reference"
        if reason is None and platform == "cuda" and self.by_xla is not None:
            # XLA may have a cuBLASLt of its own.
            reason, instead = _support.lacks_cublaslt(), "by_xla"
        if reason is None:
            return platform
        if self.implementation == "ffi":
            raise RuntimeError(
                f'jaxfp8.ops.{self.name}: implementation("ffi"): {reason}'
            )
        if _ffi.is_loaded(platform):
            _support.warn(reason)
        return instead

    def lacks(self, platform, gpus, types) -> str | None:
        """Return why only the reference can run on a platform, whose GPUs these are; or
        None.
        """
        if not _ffi.is_loaded(platform):
            return "no native library serves this platform"
        reason = self.why_disabled()
        if reason is None and platform == "cuda":
            capabilities = _support.capabilities(gpus)
            reason = _support.lacks_fp8(gpus) or self.not_on(capabilities, *types)
        return reason

    def why_disabled(self) -> str | None:
        """Return the reason if a custom call of the op is switched off; or None."""
        return _support.why_disabled(self.name, self.custom_call)


@functools.lru_cache(maxsize=1024)
def _names(op, *ranks):
    """Return the names of an op, which are asked for several times in a program."""
    operands, results = op.names(*ranks)
    for i in op.second:
        *leading, rows, cols = operands[i]
        operands.append((*leading, cols, rows))
    return operands, results


def merged(shape, *counts):
    """Merge consecutive dimensions of a shape: each count merges that many; the last
    dimension gets the rest.

    `merged((a, b, c, d, e), 2, 1)` is `(a * b, c, d * e)`.
    """
    sizes, rest = [], shape
    for count in counts:
        sizes.append(math.prod(rest[:count]))
        rest = rest[count:]
    return (*sizes, math.prod(rest))


def _abstract(*operands, op):
    """Return the types of the results."""
    operand_names, result_names = op.all_names(operands)
    # A result has the size and the mesh axes of each dimension that an operand has too;
    # other sizes are computed.
    new = op.sizes(*[x.shape[op.vmap_dims :] for x in operands])
    dtypes = op.dtypes(*operands) or [jnp.float32] * len(result_names)
    return _mesh.types(operands, operand_names, result_names, dtypes, new)


def _batch(operands, batch_dims, *, op):
    """Batch an op."""
    # 1. Try the op's own rule: it may make one larger product of a batch, without a
    #    vmapped dimension.
    results = op.batch_first(operands, batch_dims)
    if results is not None:
        return results
    # 2. Move the batch dimension of every operand to the front; repeat an operand that
    #    has none.
    batch = _batching.batch_of(operands, batch_dims)
    operands = [
        _batching.in_front(batch, x, dim, _batching.repeat)
        for x, dim in zip(operands, batch_dims, strict=True)
    ]
    # 3. Bind the same op with one vmapped dimension more, which every result has in
    #    front.
    vmapped = dataclasses.replace(op, vmap_dims=op.vmap_dims + 1)
    outputs = vmapped(*operands)
    return outputs, [0] * len(outputs)


def _lower(platform, ctx, *operands, op):
    return op.lower(platform, ctx, *operands)


class OpOfCpus(Op):
    """An op that is one call on a CPU alone, where each of its operations would be a
    program to compile. XLA fuses them elsewhere, and on a mesh moves reductions of
    amaxes through them.
    """

    def on_one_device_only(self):
        return True

    def cuda(self, *operands):
        return self.reference(*operands)


class OpOfUnits(Op):
    """An op that computes several independent units, such as the quantizers of a
    product.

    Attributes:
        of_units: what is static of each unit.
    """

    of_units: tuple

    def owners(self, operand_count) -> tuple[Sequence[int], Sequence[int]]:
        """Return the number of the unit of each operand, and of each result."""
        raise NotImplementedError

    def of_some(self, indices):
        """Return the op of some units."""
        chosen = tuple([self.of_units[i] for i in indices])
        return dataclasses.replace(self, of_units=chosen)

    def batch_first(self, operands, batch_dims):
        """Make one call for the batched units and one for the rest, whose state stays
        one state.
        """
        # 1. Find the units that are batched.
        ins, outs = self.owners(len(operands))
        pairs = zip(ins, batch_dims, strict=True)
        batched = {unit for unit, dim in pairs if dim is not None}
        rest = set(ins) - batched
        if not rest:
            return None  # the rule of all ops applies
        # 2. Make one call for the units that are not batched, and one under `vmap` for
        #    those that are.
        results, result_dims = [None] * len(outs), [None] * len(outs)
        for chosen in rest, batched:
            places = [i for i, unit in enumerate(ins) if unit in chosen]
            call = self.of_some(sorted(chosen))
            if chosen is batched:
                call = jax.vmap(call, in_axes=tuple(batch_dims[i] for i in places))
            outputs = iter(call(*(operands[i] for i in places)))
            for i, unit in enumerate(outs):
                if unit in chosen:
                    results[i] = next(outputs)
                    result_dims[i] = 0 if chosen is batched else None
        return results, result_dims


def halves(arrays):
    """Return the first half of the arrays, such as the histories of all units, and the
    second, such as their scales.
    """
    count = len(arrays) // 2
    return arrays[:count], arrays[count:]
