"""What the types of values say about a mesh: the axes they vary over inside `shard_map`, their sharding outside.

Where XLA cuts the arrays of a program (`jit`), there is nothing to do: values are those of the whole mesh. Inside
`shard_map` they are those of one device, and amaxes and the gradients of what is replicated have to be combined.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ._warning import FP8StateWarning


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


class _NotSaid(tuple):
    """`pipeline_axes` that nobody gave: in a program whose types do not tell, that is worth a warning."""

    def __reduce__(self):
        return "NOT_SAID"


NOT_SAID = _NotSaid()


@dataclasses.dataclass(frozen=True)
class AmaxReduction:
    """The reduction of an amax over the devices of a `shard_map` that share a state.

    Attributes:
        axes: the mesh axes, where types do not tell (`check_vma=False`); None where they do: those over which the amax
            varies and its state does not.
        pipeline_axes: `recipe.pipeline_axes`: stages keep their own.
    """

    axes: tuple[str, ...] | None
    pipeline_axes: tuple[str, ...]

    @staticmethod
    def of(recipe) -> "AmaxReduction":
        """The one for products of a recipe, at the place in a program where it is called."""
        stages, manual = recipe.pipeline_axes, jax.sharding.get_abstract_mesh().manual_axes
        if not manual or varying(lax.axis_index(manual[0])):
            return AmaxReduction(None, stages)
        if not set(stages) <= set(manual):
            raise ValueError(
                f"dot_general: recipe.pipeline_axes: expected axes of this shard_map, which has {manual}, got {stages}"
            )
        axes = tuple(axis for axis in manual if axis not in stages)
        if stages is NOT_SAID:
            warnings.warn(
                "shard_map(check_vma=False) hides over which mesh axes FP8 state differs: amaxes are reduced over "
                f"{axes}. If the stages of a pipeline lie along one of them, set the recipe's pipeline_axes=(name,); "
                "if not, say so with pipeline_axes=()",
                FP8StateWarning,
                stacklevel=3,
            )
        return AmaxReduction(axes, stages)

    def __call__(self, amax, state, combine=lax.pmax):
        """`amax` of the whole tensor, as far as it shares `state` (None: all of it); or what `combine` makes of it.

        If there is anything to reduce it is done over all devices that share the state: more of them change nothing,
        and reductions over the same devices become one collective.

        Raises:
            ValueError: an axis is called a pipeline axis, but the state is the same for all stages.
        """
        if self.axes is not None:
            return combine(amax, self.axes) if self.axes else amax
        stages = set(self.pipeline_axes)
        own = varying(amax) & stages if state is None else varying(*jax.tree.leaves(state))
        one_state = (varying(amax) - own) & stages
        if one_state:
            raise ValueError(
                f"dot_general: recipe.pipeline_axes names {sorted(one_state)}, but the state does not vary over "
                "it; give each stage its own: stack the states and pass them with that axis in in_specs"
            )
        missing = tuple(sorted(own - varying(amax)))
        amax = lax.pcast(amax, missing, to="varying") if missing else amax
        if varying(amax) <= own:
            return amax
        axes = [axis for axis in jax.sharding.get_abstract_mesh().manual_axes if axis not in own]
        unlike = tuple(axis for axis in axes if axis not in varying(amax))
        return combine(lax.pcast(amax, unlike, to="varying") if unlike else amax, tuple(axes))
