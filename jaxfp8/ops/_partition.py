"""Partition an op on a mesh: each device works on its shards, whatever dimensions the
mesh cuts.

XLA knows nothing of a custom call and would gather its operands. `custom_partitioning`
tells it two things: which dimensions belong together (a Shardy rule, from their names),
and the program of one device. A dimension that a result lacks was reduced: over its
shards the results combine by max (amaxes) or by sum (products, sums of columns). A
dimension whose name begins with `WHOLE` is never cut; scales of blocks are cut where
the blocks are.
"""

import functools
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from .._jax import _compat
from .._jax._mesh import axes_of
from ..numerics import FP8_DTYPES

WHOLE = "whole"
# the dimensions of a scale or an amax: f32[1] for each index of the vmapped dimensions
ONE = (("one",),)
_BLOCKS_OF = "_blocks_of_"


@functools.cache
def dims(name, count):
    """Return the names of `count` dimensions."""
    return tuple([f"{name}{i}" for i in range(count)])


def blocks_of(names, size):
    """Return the name of a dimension that counts blocks of a size along these merged
    dimensions, of one kind; None means one block.
    """
    if size == 1 and len(names) == 1:
        return names[0]
    first = names[0] if names else "none0"
    return f"{first}{_BLOCKS_OF}{size or 0}"


def lower_partitioned(op, run, as_bytes, ctx, operands):
    """Lower an op for all devices of a mesh.

    Args:
        op: the op.
        run: the program of the op on the operands of one device.
        as_bytes: whether FP8 goes in and out as uint8, because XLA's CPU compiler would
            gather FP8 as float16. With other compilers FP8 stays FP8, and XLA gathers a
            tensor once for several ops.
        ctx, operands: the arguments of the lowering rule.
    """
    # The rule below has to name each part of a mesh axis over which XLA may cut a
    # dimension.
    plain, results = map(without_mesh, (ctx.avals_in, ctx.avals_out))
    names = op.all_names(plain)
    mesh = _split(ctx.module_context.axis_context.abstract_mesh)
    uncut = functools.partial(_uncut, ctx, op.on_shards is not None)
    operands = list(map(uncut, names[0], plain, operands))
    raw = _as_bytes if as_bytes else lambda x: x
    dtypes = [aval.dtype for aval in results]
    partitioned = functools.partial(_partitioned, op, run, dtypes, names, raw)
    values = lower_plain(_compat.with_mesh(ctx, mesh), partitioned, plain, operands)
    return list(map(uncut, names[1], results, values))


def without_mesh(avals):
    """Return types of arrays without mesh axes, as the inside of an op has them: the
    types of the op itself say where its results are.
    """
    return [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]


def lower_plain(ctx, function, avals, operands):
    """Lower a function of operands of these types, without their mesh axes: it is
    traced without a mesh.
    """
    ctx = ctx.replace(avals_in=without_mesh(avals))
    with use_abstract_mesh(AbstractMesh((), ())):
        return mlir.lower_fun(function)(ctx, *operands)


def _split(mesh):
    """Return a mesh of the same devices in the same order, whose axes have prime sizes.

    XLA may cut a dimension over a part of an axis, which no PartitionSpec of the mesh
    itself can say: 12 heads over 4 of 8 devices. These are the first devices of the
    axis, as many as divide the dimension.
    """
    parts = tuple(itertools.chain.from_iterable(map(_primes, mesh.axis_sizes)))
    return AbstractMesh(parts, tuple(f"part{i}" for i in range(len(parts))))


def _primes(number):
    """Return the prime factors of a number, the smallest first."""
    primes = []
    for p in range(2, number + 1):
        while number % p == 0:
            primes.append(p)
            number //= p
    return primes


def _names_cuts(mesh, size):
    """Return whether the mesh of `_split` names each cut of a dimension of this size
    over an axis of `mesh`.

    An axis of 6 as 2 by 3 names cuts over 2 and over 6 devices, and none over 3.
    """
    for axis in mesh.axis_sizes:
        cut = _primes(math.gcd(size, axis))
        if _primes(axis)[: len(cut)] != cut:
            return False
    return True


def _uncut(ctx, has_whole, names, aval, value):
    """Return a lowered operand or result that is not cut along a dimension whose name
    says so, with `has_whole`, or where the parts of a mesh axis cannot say the cut.

    XLA may cut blocks along a part of a mesh axis, which `custom_partitioning` cannot
    say.
    """
    mesh = _with_axes(ctx.module_context.axis_context.abstract_mesh, AxisType.Auto)
    entries = [PartitionSpec.UNCONSTRAINED] * len(names)
    for i, name in enumerate(names):
        is_whole = has_whole and name.startswith(WHOLE)
        if is_whole or not _names_cuts(mesh, aval.shape[i]):
            entries[i] = None
    if None not in entries:
        return value
    sharding = NamedSharding(mesh, PartitionSpec(*entries))

    def constrained(x):
        return [lax.with_sharding_constraint(x, sharding)]

    return lower_plain(ctx, constrained, [aval], [value])[0]


def _partitioned(op, run, result_dtypes, names, raw, *operands):
    """Run the program of one device on shards of the operands, whatever shards XLA
    chooses.
    """
    operand_names, result_names = names
    operand_dtypes = [x.dtype for x in operands]
    count = len(operand_names) - len(op.second)
    second_layouts = dict(zip(op.second, range(count, len(operand_names)), strict=True))
    # Amaxes combine by max, products and column sums by sum.
    combines = [lax.pmax if "one" in names else lax.psum for names in result_names]

    def typed(*operands):
        first = map(lax.bitcast_convert_type, operands[:count], operand_dtypes)
        return run(*first, *operands[count:])

    def untyped(*operands):
        return list(map(raw, typed(*operands[:count])))

    def partition(mesh, operands, results):
        # 1. Give each dimension its mesh axes: those that most tensors have there
        #    already, where the op can be cut there.
        tensors = *operands[:count], *results
        names = operand_names[:count] + result_names
        axes, sizes = _assign(mesh, list(zip(tensors, names, strict=True)))
        axes = _whole_blocks(mesh, axes, sizes)
        # 2. Gather one layout, for all products that read the tensor; transpose it
        #    locally to get the first.
        gathered = {}
        for i, j in second_layouts.items():
            if _is_gathered(operands[i].sharding.spec, operand_names[i], axes):
                gathered[i] = j
        # 3. Find the mesh axes over which the shards of each result combine.
        reduced = [_reduced_over(mesh, axes, names) for names in result_names]

        def on_one_device(*shards):
            shards = list(shards)
            # In the program of one device all axes are manual, so that collectives and
            # `axis_index` can name them.
            with use_abstract_mesh(_with_axes(mesh, AxisType.Manual)):
                for i, j in gathered.items():
                    *_, rows, cols = op.parts(shards)[0][j]
                    shards[i] = op.turned(shards[j], len(rows), len(cols))
                # Where the first result is a sum over devices, one device adds the bias
                # to its part of it.
                for i in op.added():
                    if reduced[0]:
                        x, is_first = shards[i], lax.axis_index(reduced[0]) == 0
                        shards[i] = jnp.where(is_first, x, jnp.zeros_like(x))
                shards = shards[:count]
                if op.on_shards is not None:
                    shards = op.on_shards(shards, functools.partial(_cut, mesh, axes))
                outputs = list(map(raw, typed(*shards)))
                for i, over in enumerate(reduced):
                    if over:
                        outputs[i] = combines[i](outputs[i], over)
                return outputs

        def sharding(names):
            return NamedSharding(mesh, PartitionSpec(*map(axes.get, names)))

        # 4. Ask for operands with these axes. The layout that is not read stays where
        #    it is.
        operand_shardings = list(map(sharding, operand_names))
        for i, j in second_layouts.items():
            unread = i if i in gathered else j
            operand_shardings[unread] = operands[unread].sharding
        result_shardings = list(map(sharding, result_names))
        return mesh, on_one_device, result_shardings, tuple(operand_shardings)

    on_all_devices = custom_partitioning(untyped)
    # Shardy expects factors in the order in which the rule has them.
    factors = list(dict.fromkeys(itertools.chain(*operand_names)))
    uncut = tuple(name for name in factors if name.startswith(WHOLE))
    kept = set(uncut).union(*result_names)
    sides = (", ".join(map(" ".join, side)) for side in (operand_names, result_names))
    on_all_devices.def_partition(
        partition=partition,
        sharding_rule=" -> ".join(sides),
        reduction_factors=tuple(name for name in factors if name not in kept),
        need_replication_factors=uncut,
    )
    results = on_all_devices(*map(raw, operands))
    return list(map(lax.bitcast_convert_type, results, result_dtypes))


def _cut(mesh, axes, name):
    """Return the index of this device's shard of a dimension, and how many shards that
    has.
    """
    entry = axes.get(name, ())
    if not entry:
        return 0, 1
    return lax.axis_index(entry), _shards(mesh, entry)


def _shards(mesh, axes):
    return math.prod(mesh.shape[axis] for axis in axes)


def _is_gathered(spec, names, axes):
    """Return whether a tensor with the sharding `spec` has to be gathered along a
    dimension to have `axes`.
    """
    return any(
        not set(axes_of(entry)) <= set(axes.get(name, ()))
        for entry, name in zip(spec, names, strict=False)
    )


def _as_bytes(x):
    return x.view(jnp.uint8) if x.dtype in FP8_DTYPES else x


def _assign(mesh, tensors):
    """Return the mesh axes of each dimension, and its size.

    A mesh axis that cuts several dimensions serves the dimension that it cuts in most
    tensors. So a product keeps the shards of a contracted dimension if both operands
    are cut along it, and gathers the FP8 codes of a kernel that is cut along another
    dimension than the activations.

    Args:
        mesh: the mesh.
        tensors: `(x, names)` of each operand, then of each result.
    """
    # 1. Let every tensor vote for the axes that it has. Scales follow their blocks.
    votes, sizes = Counter(), {}
    for x, names in tensors:
        sizes.update(zip(names, x.shape, strict=True))
        for entry, name in zip(x.sharding.spec, names, strict=False):
            follows = name.startswith(WHOLE) or _BLOCKS_OF in name
            if entry is not None and not follows:
                votes[name, axes_of(entry)] += 1
    # 2. Serve the dimensions by their votes, and in the order of `tensors` where votes
    #    are equal.
    axes, used = {}, set()
    for (name, entry), _ in votes.most_common():
        shards = _shards(mesh, entry)
        # XLA would pad shards of unequal size, and the padding would enter an amax.
        if name not in axes and not used & set(entry) and sizes[name] % shards == 0:
            axes[name] = entry
            used |= set(entry)
    return axes, sizes


def _whole_blocks(mesh, axes, sizes):
    """Return the mesh axes of each dimension such that blocks stay whole, and their
    scales are cut as they are.

    A matrix is cut over as many devices as have whole blocks: 28 blocks that come from
    8 devices over 4 of them, in pairs that hold the same. Scales count merged
    dimensions, so only the first dimension is cut.
    """
    # 1. Find the scales that count blocks of each kind of dimensions.
    scales = {}
    for name in sizes:
        first, _, block = name.partition(_BLOCKS_OF)
        if int(block or 0):
            scales.setdefault(first, {})[name] = int(block)
    for first, blocks in scales.items():
        # 2. Find the most devices of which each has whole blocks; one device has them.
        names = [name for name in dims(first[:-1], len(sizes)) if name in sizes]
        size, entry = math.prod(map(sizes.get, names)), axes.get(first, ())
        multiple = math.lcm(*blocks.values())
        while entry and size // _shards(mesh, entry) % multiple:
            entry = entry[:-1]
        # 3. Cut the first dimension over these, and the scales with it.
        axes = {name: entry for name, entry in axes.items() if name not in names}
        if entry:
            axes |= dict.fromkeys([*blocks, first], entry)
    return axes


def _reduced_over(mesh, axes, names):
    """Return the mesh axes over which a result is combined: those of the dimensions
    that the result lacks.

    A max combines over all axes but those of the result's own dimensions: more devices
    do not change a max, and reductions over the same devices become one collective.
    """
    kept = set().union(*(axes.get(name, ()) for name in names))
    lost = dict.fromkeys(itertools.chain(*axes.values()))
    if "one" in names and not lost.keys() <= kept:
        lost = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    return tuple(axis for axis in lost if axis not in kept)


def _with_axes(mesh, kind):
    """Return the mesh with axes of another kind; the program of one device has manual
    axes.
    """
    kinds = dict.fromkeys(mesh.axis_names, kind)
    return mesh.abstract_mesh.update_axis_types(kinds)
