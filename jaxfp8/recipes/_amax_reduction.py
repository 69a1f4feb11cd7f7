"""Reduce an amax over the devices of a `shard_map` that share a state: types tell them,
or `recipe.pipeline_axes`.
"""

import dataclasses

import jax
from jax import lax

from .._jax import _warnings
from .._jax._mesh import varying
from ._state import keeps_state
from ._warning import FP8StateWarning


@dataclasses.dataclass(frozen=True)
class AmaxReduction:
    """The reduction of an amax over the devices of a `shard_map` that share a state.

    Attributes:
        axes: the mesh axes to reduce over with `check_vma=False`, where types do not
            tell them; else None: the call finds the axes over which the amax varies and
            its state does not.
        pipeline_axes: `recipe.pipeline_axes`, the axes along which each stage keeps its
            own state; `()` for None.
    """

    axes: tuple[str, ...] | None
    pipeline_axes: tuple[str, ...]

    @staticmethod
    def for_recipe(recipe) -> "AmaxReduction":
        """Return the reduction for products of a recipe, at this place in a program.

        Raises:
            ValueError: with `check_vma=False`, `pipeline_axes` names an axis that the
                `shard_map` or `pmap` lacks.
        """
        mesh, stages = jax.sharding.get_abstract_mesh(), recipe.pipeline_axes or ()
        manual = mesh.manual_axes
        # An option of JAX takes axes of one device out of all types.
        longest = max(manual, key=mesh.shape.get, default=None)
        if longest is None or varying(lax.axis_index(longest)):
            return AmaxReduction(None, stages)
        if not set(stages) <= set(manual):
            needed = f"axes of this shard_map or pmap, which has {manual}"
            raise ValueError(
                f"dot_general: recipe.pipeline_axes: expected {needed}, got {stages}"
            )
        axes = tuple(axis for axis in manual if axis not in stages)
        reduces = keeps_state(recipe) or any(
            q.reduces_amax for q in recipe.quantizers()
        )
        if recipe.pipeline_axes is None and reduces:
            _warnings.warn(
                "shard_map(check_vma=False) and pmap hide over which axes FP8 state "
                f"differs: amaxes are reduced over {axes}. If the stages of a "
                "pipeline lie along one of them, set the recipe's "
                "pipeline_axes=(name,); if not, say so with pipeline_axes=()",
                FP8StateWarning,
            )
        return AmaxReduction(axes, stages)

    def __call__(self, amax, state, combine=lax.pmax):
        """Reduce `amax` by `combine` over the devices that share `state`, any arrays
        that vary as the state does.

        A reduction goes over all devices that share the state, also over axes along
        which `amax` does not vary: a maximum stays the same, and reductions over the
        same devices become one collective. Without a state (`state=None`) the reduction
        goes over the devices that hold parts of one tensor.

        Raises:
            ValueError: the state is the same for all stages along a pipeline axis over
                which `amax` varies.
        """
        if self.axes is not None:
            return combine(amax, self.axes) if self.axes else amax
        manual_axes = jax.sharding.get_abstract_mesh().manual_axes
        if not manual_axes:
            return amax
        stages, amax_axes = set(self.pipeline_axes), varying(amax)
        state_axes = amax_axes & stages
        if state is not None:
            state_axes = varying(*jax.tree.leaves(state))
        one_state = (amax_axes - state_axes) & stages
        if one_state:
            raise ValueError(
                f"dot_general: recipe.pipeline_axes names {sorted(one_state)}, but "
                "the state does not vary over it; give each stage its own: stack the "
                "states and pass them with that axis in in_specs"
            )
        axes = ()
        if not amax_axes <= state_axes:
            axes = tuple([axis for axis in manual_axes if axis not in state_axes])
        unlike = state_axes.union(axes) - amax_axes
        if unlike:
            amax = lax.pcast(amax, tuple(sorted(unlike)), to="varying")
        return combine(amax, axes) if axes else amax
