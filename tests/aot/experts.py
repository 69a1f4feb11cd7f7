"""Compiles the gradients of a mixture of experts' product, with one scale a tensor,
with scales of blocks and in bfloat16, and of a layer of experts, for an H200 and
prints, as JSON, what is in the programs.
"""

import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8

from . import count, hlo
from .programs import AXES, QUICKLY, gpus, on_one

ROWS, WIDTH, HIDDEN, EXPERTS = 4096, 1024, 2048, 16
RECIPES = {
    "fp8": jaxfp8.DelayedScaling(amax_history_len=16),
    "blocks": jaxfp8.Float8BlockScaling(),
    "bf16": jaxfp8.HighPrecision(),
}


def compiled(recipe, mesh):
    """The program of both gradients; rows, and columns of kernels, are cut."""

    def of_shape(shape, dtype, *axes):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def step(x, kernels, sizes, state, grad):
        def product(x, kernels, state):
            options = {"recipe": recipe, "state": state}
            return jaxfp8.ragged_dot(
                x, kernels, sizes, preferred_element_type=jnp.bfloat16, **options
            )

        y, vjp = jax.vjp(product, x, kernels, state)
        return y, vjp(grad)

    x = of_shape((ROWS, WIDTH), jnp.bfloat16, AXES)
    kernels = of_shape((EXPERTS, WIDTH, HIDDEN), jnp.float32, None, AXES)
    sizes = of_shape((EXPERTS,), jnp.int32)
    state = jax.tree.map(
        lambda leaf: of_shape(leaf.shape, leaf.dtype), jaxfp8.init_state(recipe)
    )
    grad = of_shape((ROWS, HIDDEN), jnp.bfloat16, AXES)
    where = jax.tree.map(lambda leaf: leaf.sharding, (grad, (x, kernels, state)))
    jitted = jax.jit(step, out_shardings=where)
    return jitted.lower(x, kernels, sizes, state, grad).compile()


def compiled_layer(recipe):
    """The program of forward and backward of a layer, in which each token has two
    experts.
    """
    layer = jaxfp8.linen.Experts(EXPERTS, HIDDEN, recipe=recipe, dtype=jnp.bfloat16)
    tokens = ROWS // 2
    x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16)
    expert = jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((tokens, 2), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x, expert, weights)

    def step(variables, x, expert, weights, grad):
        def loss(variables, x, weights):
            y = layer.apply(variables, x, expert, weights)
            return jnp.sum((y * grad).astype(jnp.float32)), y

        return jaxfp8.grad(loss, argnums=(0, 1, 2), has_aux=True)(variables, x, weights)

    operands = on_one((variables, x, expert, weights, x))
    return jax.jit(step).lower(*operands).compile(compiler_options=QUICKLY)


def found_in(program) -> dict:
    temporary = program.memory_analysis().temp_size_in_bytes
    return count.summary(program.as_text()) | {"temporary_bytes": temporary}


def main():
    report = {"fsdp": found_in(compiled(RECIPES["fp8"], gpus("h200", (4, 2))))}
    for name, recipe in RECIPES.items():
        program = compiled(recipe, gpus("h200", (1, 1)))
        text = program.as_text()
        calls = re.findall(r'custom_call_target="jaxfp8_(\w+)_v\d+"', text)
        report[name] = found_in(program) | {
            "custom_calls": Counter(calls),
            "loops": text.count(" while("),
            "largest": max(array.elements for array in hlo.arrays(text)),
        }
    for name in ("fp8", "bf16"):
        report[f"{name} layer"] = found_in(compiled_layer(RECIPES[name]))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
