"""The mesh in the types of values: the axes they vary over inside `shard_map`, their
sharding outside.

Where XLA cuts the arrays of a program (`jit`), there is nothing to do: values are those
of the whole mesh. Inside `shard_map` values are those of one device, and amaxes and the
cotangents of replicated operands have to be combined.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def varying(*values):
    """Return the manual mesh axes over which any value, or type, varies; empty with
    `check_vma=False`.
    """
    axes = frozenset()
    for x in values:
        if not isinstance(x, jax.core.AbstractValue):
            x = jax.typeof(x)
        axes |= x.manual_axis_type.varying
    return axes


def types(operands, operand_names, result_names, dtypes, new_sizes):
    """Return the types of an op's results, from sizes and shardings by the names of
    dimensions.

    Args:
        operands: the types of the operands.
        operand_names, result_names: the names of the dimensions of each operand and
            each result.
        dtypes: the dtypes of the results.
        new_sizes: `{name: size}` of the dimensions that only results have.
    """
    # 1. Read sizes and mesh axes by the names of dimensions.
    sizes, axes = dict(new_sizes), {}
    for operand, named in zip(operands, operand_names, strict=True):
        sizes.update(zip(named, operand.shape, strict=True))
        # An op without a scale may have an amax, whose dimension no operand names.
        sizes.setdefault("one", 1)
        for name, axis in zip(named, operand.sharding.spec, strict=True):
            # Operands may be cut differently along a dimension: the first that is cut
            # decides.
            axes[name] = axes.get(name) or axis
    # 2. Write them into the types of the results.
    # constants know no mesh
    on_mesh = [x for x in operands if not x.sharding.mesh.empty]
    first = (on_mesh or operands)[0]
    manual = first.manual_axis_type.update(varying=varying(*operands))
    results = []
    for named, dtype in zip(result_names, dtypes, strict=True):
        spec = once([axes.get(name) for name in named])
        result = first.update(
            shape=tuple(map(sizes.get, named)),
            dtype=jnp.dtype(dtype),
            sharding=NamedSharding(first.sharding.mesh, spec),
            manual_axis_type=manual,
            weak_type=False,
        )
        results.append(result)
    return results


def axes_of(entry):
    """Return the mesh axes of an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def once(entries):
    """Return a PartitionSpec without the mesh axes that an earlier entry has."""
    used, kept = set(), []
    for entry in entries:
        axes = set(axes_of(entry))
        kept.append(None if used & axes else entry)
        used |= axes
    return PartitionSpec(*kept)


def varying_alike(avals, values):
    """Return types that vary over each manual axis over which one of them, or one of
    `values`, varies.
    """
    axes, results = varying(*avals, *values), []
    for aval in avals:
        if aval.sharding.mesh.empty:  # the type of a constant
            mesh = jax.sharding.get_abstract_mesh()
            aval = aval.update(sharding=aval.sharding.update(mesh=mesh))
        manual = aval.manual_axis_type.update(varying=axes)
        results.append(aval.update(manual_axis_type=manual))
    return results


def placed_as(aval, x):
    """Give `x` the sharding of `aval`, on a mesh with explicit axes."""
    if aval.sharding.mesh.empty or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)


def without_reduced(x):
    """Give `x` a type without `reduced` axes, which no op takes; its gradient becomes
    `unreduced` over them.
    """
    spec = jax.typeof(x).sharding.spec
    if not spec.reduced:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*spec.partitions))


def cotangent_of(aval, ct):
    """Turn `ct` into a cotangent of type `aval`: sum it over the axes over which that
    type does not vary.

    On a mesh with explicit axes XLA is told the sharding also where types agree: where
    the cotangent becomes `unreduced`, XLA would take the sums of our products for the
    parts of one device, and add them up again.
    """
    axes = varying(ct) - varying(aval)
    if axes:
        ct = lax.psum(ct, tuple(sorted(axes)))
    if aval.sharding.mesh.explicit_axes:
        return jax.sharding.reshard(ct, aval.sharding)
    return placed_as(aval, ct)
