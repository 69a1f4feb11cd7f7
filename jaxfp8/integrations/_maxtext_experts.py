"""MaxText's grouped products with FP8 state: each device has a copy of it.

MaxText's experts multiply in a `shard_map` whose types do not tell what devices share,
and take the gradient outside of it. JAX would add up what devices return for the state.
So the state enters the `shard_map` as one more argument, see `train.spread`.
"""

import contextvars
import functools
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from ..nnx import OverwriteWithGradient
from ..recipes import DotGeneralState, Recipe, keeps_state, variable_names
from ..train import spread

# Mesh axes of a pipeline's stages and of the replicas of DiLoCo, by their flag.
STAGES = {
    "stage": "ici_pipeline_parallelism",
    "diloco": "ici_diloco_parallelism",
}
# The states of the products to come, in a `shard_map` of experts that is being traced.
_coming = contextvars.ContextVar("coming", default=None)


class With:
    """An object of MaxText, or a module that it uses, with some other attributes."""

    def __init__(self, original, **values):
        vars(self).update(values, _original=original)

    def __getattr__(self, name):
        return getattr(self._original, name)


def next_state() -> DotGeneralState | None:
    """Return the state of the next grouped product; None outside of the `shard_map`."""
    coming = _coming.get()
    return None if coming is None else next(coming)


def share_among_devices(module, original):
    """Wrap MaxText's experts: their grouped products get the state that MaxText makes
    for the experts' einsums.
    """

    def sparse_matmul(self, *args, **options):
        recipe = getattr(self.quant, "recipe", None)
        # MaxText's method looks up `jax` in its module while it is traced, so the
        # change can end with the call.
        if isinstance(recipe, Recipe) and keeps_state(recipe):
            states = _states(self, recipe)
            module.jax = With(jax, shard_map=_shard_map_with(states))
        try:
            return original(self, *args, **options)
        finally:
            module.jax = jax

    return sparse_matmul


def _states(experts, recipe) -> list[DotGeneralState]:
    """Return the states of the products, in their order."""
    names = ["wi_0", "wi_1", "wo"]
    if experts.config.prefuse_moe_weights:
        # one product of both kernels
        names.remove("wi_1")
    return [_state(recipe, experts.quant_einsums[name]) for name in names]


def _state(recipe, einsum) -> DotGeneralState:
    (variables,) = nnx.to_pure_dict(nnx.state(einsum, OverwriteWithGradient)).values()
    return jax.tree.map(lambda name: variables[name], variable_names(recipe))


def _shard_map_with(states):
    """Return a `jax.shard_map` that takes the states of the products of MaxText's
    experts, in the order of the products.
    """

    def shard_map(f, *, mesh, in_specs, **options):
        for axis, flag in STAGES.items():
            if mesh.shape.get(axis, 1) > 1:
                raise ValueError(
                    f"maxtext: {flag}: expected 1 for experts with sparse_matmul=true "
                    "and a recipe that keeps state, got a mesh with "
                    f"{axis}={mesh.shape[axis]}; set sparse_matmul=false, or for "
                    "example quantization=te_fp8_currentscaling"
                )

        def on_device(copies, *args):
            states = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), copies)
            # MaxText multiplies chunks of tokens, and the branches of a `lax.cond`, one
            # after the other.
            token = _coming.set(itertools.cycle(states))
            try:
                return f(*args)
            finally:
                _coming.reset(token)

        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(jax.P(mesh.axis_names), *in_specs),
            **options,
        )
        return functools.partial(mapped, spread(states, mesh.size))

    return shard_map
