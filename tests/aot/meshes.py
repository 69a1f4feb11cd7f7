"""Compiles a scan over layers for eight H200s and prints, as JSON, how often each
all-reduce of amaxes runs in a step.
"""

import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8

from . import count
from .programs import AXES, gpus

BATCH, LENGTH, WIDTH, LAYERS = 16, 512, 1024, 8
RECIPE = jaxfp8.DelayedScaling(amax_history_len=16)
ROWS_BY_COLUMNS = (((2,), (0,)), ((), ()))


def scanned(mesh, in_shard_map, policy) -> str:
    """Return the compiled gradient of a scan over eight layers with FSDP, whose bodies
    `jax.checkpoint` wraps.
    """
    specs = (P(None, AXES), P(), P(AXES))

    def loss(kernels, states, x):
        def layer(x, kernel_and_state):
            kernel, state = kernel_and_state
            if in_shard_map:
                kernel = jax.lax.all_gather(kernel, AXES, axis=0, tiled=True)
            y = jaxfp8.dot_general(
                x,
                kernel,
                ROWS_BY_COLUMNS,
                recipe=RECIPE,
                state=state,
                preferred_element_type=jnp.bfloat16,
            )
            return jnp.tanh(y), None

        layer = (
            layer
            if policy is None
            else jax.checkpoint(layer, policy=policy, prevent_cse=False)
        )
        total = jnp.sum(
            jax.lax.scan(layer, x, (kernels, states))[0].astype(jnp.float32) ** 2
        )
        return jax.lax.psum(total, AXES) if in_shard_map else total

    step = jaxfp8.grad(loss, argnums=(0, 1))
    if in_shard_map:
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    states = jax.eval_shape(
        lambda: jax.tree.map(
            lambda leaf: jnp.stack([leaf] * LAYERS), jaxfp8.init_state(RECIPE)
        )
    )
    kernels = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    step = jax.jit(step, in_shardings=shardings, out_shardings=tuple(shardings[:2]))
    return step.lower(kernels, states, x).compile().as_text()


POLICIES = {
    "all saved": None,
    "codes saved": jaxfp8.checkpoint_policies.save_fp8_residuals,
    "nothing saved": jax.checkpoint_policies.nothing_saveable,
}


def main():
    mesh = gpus("h200", (4, 2))
    report = {}
    for name, policy in POLICIES.items():
        for in_shard_map in (False, True):
            found = count.summary(scanned(mesh, in_shard_map, policy))["collectives"]
            amaxes = [c["times"] for c in found if c["reducer"] == "maximum"]
            report[f"{'shard_map' if in_shard_map else 'jit'}, {name}"] = amaxes
    print(json.dumps(report))


if __name__ == "__main__":
    main()
