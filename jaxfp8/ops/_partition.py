"""How an op runs on a mesh: each device works on its shards, whatever the dimensions they are cut along.

XLA knows nothing of a custom call and would gather its operands. `custom_partitioning` tells it two things: which
dimensions belong together (a Shardy rule, from their names), and the program of one device. A dimension that a result
lacks was reduced: over its shards the results combine by max (amaxes) or by sum (products, sums of columns). One whose
name begins with `WHOLE` is never cut.
"""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from .._jax import _compat, _mesh
from ..numerics import FP8_DTYPES

WHOLE = "whole"


def lower(
    run,
    jnp_program,
    operand_names,
    result_names,
    *,
    combine,
    other_layouts,
    added,
    on_one_device_only,
    align,
    as_bytes,
    ctx,
    operands,
):
    """The lowering rule of an op.

    Args:
        run: the op on the operands of one device.
        jnp_program: the same in jnp, which XLA can partition by itself.
        operand_names, result_names: the names of the dimensions.
        combine: `lax.pmax`, `lax.psum` or None; or one of them for each result.
        other_layouts: position of an operand -> position of the same in another order; these come last.
        added: positions of operands that are added to the first result: once, where parts of it are summed.
        on_one_device_only: whether anywhere else `jnp_program` runs.
        align: `(axes, sizes, shards) -> axes`, by the names of dimensions: a last word on how they are cut.
        as_bytes: whether FP8 goes in and out as uint8, because XLA's CPU compiler would gather it as float16. Elsewhere
            it stays what it is, and what several ops gather is gathered once.
        ctx, operands: of the rule.
    """
    # On types without mesh axes: this is the inside of an op, whose own types say where its results are.
    plain = list(map(_mesh.plain, ctx.avals_in))
    devices, count = _compat.devices_of(ctx), len(operands) - len(other_layouts)
    if on_one_device_only and devices != "one":
        run = jnp_program
    elif devices == "mesh" and run.func is not jnp_program.func:
        dtypes = [aval.dtype for aval in plain]
        run = _partitioned(run, dtypes, operand_names, result_names, combine, other_layouts, added, align, as_bytes)
        count = len(operands)
    elif devices == "unknown":
        run = jnp_program
    with use_abstract_mesh(AbstractMesh((), ())):
        rule = mlir.lower_fun(lambda *x: list(run(*x)), multiple_results=True)
        return rule(ctx.replace(avals_in=plain[:count]), *operands[:count])


def _partitioned(run, dtypes, operand_names, result_names, combine, other_layouts, added, align, as_bytes):
    """`run` for any shards."""
    operand_names, result_names = tuple(operand_names), tuple(result_names)
    count = len(operand_names) - len(other_layouts)
    combines = combine if isinstance(combine, (list, tuple)) else [combine] * len(result_names)
    complete = [named for named, by in zip(result_names, combines, strict=True) if by is None]
    raw = _as_bytes if as_bytes else lambda x: x

    def op(*operands):
        def typed(*operands):
            return run(*map(lax.bitcast_convert_type, operands[:count], dtypes))

        def untyped(*operands):
            return list(map(raw, typed(*operands)))

        def partition(mesh, operands, results):
            tensors = list(zip((*operands[:count], *results), operand_names[:count] + result_names, strict=True))
            axes = _assign(mesh, [(x.shape, x.sharding.spec, named) for x, named in tensors])
            sizes = {name: size for x, named in tensors for name, size in zip(named, x.shape, strict=True)}
            shards = {name: math.prod(mesh.shape[axis] for axis in of) for name, of in axes.items()}
            axes = align(axes, sizes, shards)
            axes = {name: of for name, of in axes.items() if all(name in named for named in complete)}
            # One layout crosses devices, for all products that read the tensor; here it is put in order afterwards.
            moved = {
                i: j
                for i, j in other_layouts.items()
                if _is_gathered(operands[i].sharding.spec, operand_names[i], axes)
            }
            reduced = [_reduced_over(mesh, axes, *result) for result in zip(result_names, combines, strict=True)]

            def of_one_device(*shards):
                shards = list(shards)
                with use_abstract_mesh(_manual(mesh)):
                    for i, j in moved.items():
                        order = [operand_names[j].index(name) for name in operand_names[i]]
                        shards[i] = lax.transpose(shards[j], order)
                    if reduced[0]:
                        for i in added:
                            is_first = lax.axis_index(reduced[0]) == 0
                            shards[i] = jnp.where(is_first, shards[i], jnp.zeros_like(shards[i]))
                    outputs = zip(untyped(*shards), combines, reduced, strict=True)
                    return [by(x, over) if over else x for x, by, over in outputs]

            def shardings(names):
                specs = (PartitionSpec(*(axes.get(name) for name in named)) for named in names)
                return [NamedSharding(mesh, spec) for spec in specs]

            wanted = shardings(operand_names)
            for i, j in other_layouts.items():
                unread = i if i in moved else j
                wanted[unread] = operands[unread].sharding
            return mesh, of_one_device, shardings(result_names), tuple(wanted)

        of_all_devices = custom_partitioning(untyped)
        # In the order in which the rule has them, which Shardy expects.
        names = list(dict.fromkeys(name for named in operand_names for name in named))
        uncut = tuple(name for name in names if name.startswith(WHOLE))
        kept = set(uncut).union(*result_names)
        of_all_devices.def_partition(
            partition=partition,
            sharding_rule=" -> ".join(", ".join(map(" ".join, named)) for named in (operand_names, result_names)),
            reduction_factors=tuple(name for name in names if name not in kept),
            need_replication_factors=uncut,
        )
        out_dtypes = [x.dtype for x in jax.eval_shape(typed, *operands)]
        return list(map(lax.bitcast_convert_type, of_all_devices(*map(raw, operands)), out_dtypes))

    return op


def _is_gathered(spec, named, axes) -> bool:
    """Whether a tensor of that sharding has to be gathered along a dimension."""
    return any(
        set(entry if isinstance(entry, tuple) else (entry,)) - set(axes.get(name, ()))
        for entry, name in zip(spec, named, strict=False)
        if entry is not None
    )


def _as_bytes(x):
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype in FP8_DTYPES else x


def _assign(mesh, wanted) -> dict:
    """The mesh axes of each dimension.

    An axis that is wanted for several dimensions serves the one that most tensors want it for: so a product keeps the
    shards of a contracted dimension that both operands have, and gathers the FP8 codes of a kernel that is cut along
    another one than the activations.

    Args:
        mesh: the mesh.
        wanted: `(shape, spec, names)` of each operand, then of each result.
    """
    votes, sizes = Counter(), {}
    for shape, spec, named in wanted:
        sizes.update(zip(named, shape, strict=True))
        for entry, name in zip(spec, named, strict=False):
            if entry is not None and not name.startswith(WHOLE):
                votes[name, entry if isinstance(entry, tuple) else (entry,)] += 1
    axes, used = {}, set()
    for (name, of), _ in votes.most_common():  # in the order of `wanted` where votes are equal
        shards = math.prod(mesh.shape[axis] for axis in of)
        # Shards of unequal size would be padded, and the padding would enter an amax.
        if name not in axes and not used & set(of) and sizes[name] % shards == 0:
            axes[name] = of
            used |= set(of)
    return axes


def _reduced_over(mesh, axes, named, combine) -> tuple[str, ...]:
    """The mesh axes over which a result is combined: those of the dimensions it lacks.

    For a max that is every axis but those of the dimensions it has: more devices change nothing, and reductions over
    the same devices become one collective.
    """
    kept = {axis for name in named for axis in axes.get(name, ())}
    lost = list(dict.fromkeys(axis for of in axes.values() for axis in of if axis not in kept))
    if lost and combine is lax.pmax:
        lost = [axis for axis in mesh.axis_names if axis not in kept and mesh.shape[axis] > 1]
    return tuple(lost)


@functools.lru_cache(maxsize=64)
def _manual(mesh):
    """Inside of a device's program."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Manual,) * len(mesh.axis_names))
