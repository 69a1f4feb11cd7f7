"""What the types of values say about a mesh: the axes they vary over inside `shard_map`, their sharding outside.

Where XLA cuts the arrays of a program (`jit`), there is nothing to do: values are those of the whole mesh. Inside
`shard_map` they are those of one device, and amaxes and the gradients of what is replicated have to be combined.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def varying(*values) -> frozenset:
    """The manual mesh axes over which any of the values, or types, varies; empty with `check_vma=False`."""
    avals = (x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x) for x in values)
    return frozenset().union(*(aval.manual_axis_type.varying for aval in avals))


def plain(aval):
    """The type of an array on one device."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def types(operands, operand_names, result_names, dtypes, new_sizes) -> list:
    """The types of an op's results: sizes and shardings go by the names of dimensions; `new_sizes` of new names."""
    sizes, axes = dict(new_sizes), {}
    for operand, named in zip(operands, operand_names, strict=True):
        sizes.update(zip(named, operand.shape, strict=True))
        sizes.setdefault("one", 1)
        for name, axis in zip(named, operand.sharding.spec, strict=True):
            axes[name] = axes.get(name) or axis
    first = next((of for of in operands if not of.sharding.mesh.empty), operands[0])  # constants know no mesh
    manual = first.manual_axis_type.update(varying=varying(*operands))
    return [
        first.update(
            shape=tuple(sizes[name] for name in named),
            dtype=jnp.dtype(dtype),
            sharding=NamedSharding(first.sharding.mesh, PartitionSpec(*_once(axes.get(name) for name in named))),
            manual_axis_type=manual,
            weak_type=False,
        )
        for named, dtype in zip(result_names, dtypes, strict=True)
    ]


def _once(entries):
    """Entries of a PartitionSpec without mesh axes that an earlier one has."""
    used = set()
    for entry in entries:
        axes = entry if isinstance(entry, tuple) else (entry,) if entry is not None else ()
        yield None if used & set(axes) else entry
        used |= set(axes)


def with_varying(aval, axes):
    """A type that varies over these manual axes."""
    if aval.sharding.mesh.empty:  # a constant's
        aval = aval.update(sharding=aval.sharding.update(mesh=jax.sharding.get_abstract_mesh()))
    return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=frozenset(axes)))


def placed_as(aval, x):
    """`x` with the sharding of `aval`, on a mesh with explicit axes."""
    if aval.sharding.mesh.empty or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def cotangent_of(aval, ct):
    """`ct` as the cotangent of a value of type `aval`: summed over the axes over which that does not vary."""
    axes = varying(ct) - varying(aval)
    return placed_as(aval, lax.psum(ct, tuple(sorted(axes))) if axes else ct)
