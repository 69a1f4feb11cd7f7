"""Compiles a two-layer MLP for eight H200s and prints, as JSON, the collectives and
custom calls of each layout.

Of a scan over layers it prints how often each all-reduce of amaxes runs in a step.
"""

import dataclasses
import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from mesh.hlo import collectives

import jaxfp8

from . import count
from .programs import AXES, gpus

BATCH, LENGTH, WIDTH, HIDDEN = 16, 512, 1024, 4096
RECIPE = jaxfp8.DelayedScaling(amax_history_len=16)
ROWS_BY_COLUMNS = (((2,), (0,)), ((), ()))
# x and y [b, s, d], w1 [d, f], w2 [f, d], h [b, s, f]
LAYOUTS = {
    "dp": (P(AXES), P(), P(), P(AXES)),
    "fsdp": (P(AXES), P(AXES), P(AXES), P(AXES)),
    "tp": (P("fsdp"), P(None, "tp"), P("tp", None), P("fsdp", None, "tp")),
    "fsdp+tp": (P("fsdp"), P("fsdp", "tp"), P("tp", "fsdp"), P("fsdp", None, "tp")),
    "sp": (P("fsdp", "tp"), P(None, "tp"), P("tp", None), P("fsdp", None, "tp")),
}


def dot(fp8, x, kernel, state):
    if fp8:
        return jaxfp8.dot_general(
            x,
            kernel,
            ROWS_BY_COLUMNS,
            recipe=RECIPE,
            state=state,
            preferred_element_type=jnp.bfloat16,
        )
    return jax.lax.dot_general(
        x,
        kernel.astype(jnp.bfloat16),
        ROWS_BY_COLUMNS,
        preferred_element_type=jnp.bfloat16,
    )


def compiled(mesh, fp8, x, w1, w2, h) -> str:
    """The gradients of both kernels and of the state, with each kernel's gradient where
    the kernel is.
    """

    def of_shape(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(weights, states, batch):
        hidden = jnp.tanh(dot(fp8, batch, weights["w1"], states["w1"]))
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, h))
        y = dot(fp8, hidden, weights["w2"], states["w2"])
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, x))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    weights = {
        "w1": of_shape((WIDTH, HIDDEN), jnp.float32, w1),
        "w2": of_shape((HIDDEN, WIDTH), jnp.float32, w2),
    }
    states = {name: jaxfp8.init_state(RECIPE) for name in weights}
    states = jax.tree.map(lambda leaf: of_shape(leaf.shape, leaf.dtype, P()), states)
    placed = (
        {name: leaf.sharding for name, leaf in weights.items()},
        NamedSharding(mesh, P()),
    )
    step = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=placed)
    return (
        step.lower(weights, states, of_shape((BATCH, LENGTH, WIDTH), jnp.bfloat16, x))
        .compile()
        .as_text()
    )


def scanned(mesh, in_shard_map, policy) -> str:
    """Return the compiled gradient of a scan over eight layers with FSDP, whose bodies
    `jax.checkpoint` wraps.
    """
    layers = 8
    specs = (P(None, AXES), P(), P(AXES))

    def loss(kernels, states, x):
        def layer(x, kernel_and_state):
            kernel, state = kernel_and_state
            if in_shard_map:
                kernel = jax.lax.all_gather(kernel, AXES, axis=0, tiled=True)
            return jnp.tanh(dot(True, x, kernel, state)), None

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
            lambda leaf: jnp.stack([leaf] * layers), jaxfp8.init_state(RECIPE)
        )
    )
    kernels = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
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
    report = {"scan": {}}
    for name, policy in POLICIES.items():
        for in_shard_map in (False, True):
            found = count.summary(scanned(mesh, in_shard_map, policy))["collectives"]
            amaxes = [c["times"] for c in found if c["reducer"] == "maximum"]
            report["scan"][f"{'shard_map' if in_shard_map else 'jit'}, {name}"] = amaxes
    for name, layout in LAYOUTS.items():
        for fp8 in (True, False):
            text = compiled(mesh, fp8, *layout)
            calls = Counter(re.findall(r'custom_call_target="jaxfp8_(\w+)_v\d+"', text))
            report[f"{name} {'fp8' if fp8 else 'bf16'}"] = {
                "collectives": [
                    dataclasses.asdict(c) | {"groups": []} for c in collectives(text)
                ],
                "custom_calls": calls,
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
