"""Compiles the gradients of a mixture of experts' product, with one scale a tensor,
with scales of blocks and in bfloat16, and of a layer of experts, for an H200 and
prints, as JSON, what is in the programs.
"""

import json
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from mesh.hlo import collectives

import jaxfp8

from . import count
from .programs import AXES, QUICKLY, gpus

ROWS, WIDTH, HIDDEN, EXPERTS = 4096, 1024, 2048, 16
RECIPES = {
    "fp8": jaxfp8.DelayedScaling(amax_history_len=16),
    "blocks": jaxfp8.Float8BlockScaling(),
    "bf16": None,
}


def compiled(name, place):
    """The program of both gradients; `place(*axes)` is the sharding of an operand, None
    for one that is whole.
    """
    recipe = RECIPES[name]

    def of_shape(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(*axes))

    def product(x, kernels, sizes, state):
        if recipe is not None:
            return jaxfp8.ragged_dot(
                x,
                kernels,
                sizes,
                recipe=recipe,
                state=state,
                preferred_element_type=jnp.bfloat16,
            )
        return jax.lax.ragged_dot(
            x, kernels.astype(jnp.bfloat16), sizes, preferred_element_type=jnp.bfloat16
        )

    def step(x, kernels, sizes, state, grad):
        y, vjp = jax.vjp(
            lambda x, kernels, state: product(x, kernels, sizes, state),
            x,
            kernels,
            state,
        )
        return y, vjp(grad)

    state = jax.tree.map(
        lambda leaf: of_shape(leaf.shape, leaf.dtype),
        jaxfp8.init_state(recipe or RECIPES["fp8"]),
    )
    operands = (
        of_shape((ROWS, WIDTH), jnp.bfloat16, AXES),
        of_shape((EXPERTS, WIDTH, HIDDEN), jnp.float32, None, AXES),
        of_shape((EXPERTS,), jnp.int32),
        state,
        of_shape((ROWS, HIDDEN), jnp.bfloat16, AXES),
    )
    x, kernels, _, _, grad = (
        jax.tree.map(lambda leaf: leaf.sharding, operand) for operand in operands
    )
    whole = jax.tree.map(lambda leaf: leaf.sharding, state)
    return (
        jax.jit(step, out_shardings=(grad, (x, kernels, whole)))
        .lower(*operands)
        .compile()
    )


def compiled_layer(recipe, place):
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

    operands = variables, x, expert, weights, x
    operands = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        operands,
    )
    return jax.jit(step).lower(*operands).compile(compiler_options=QUICKLY)


def main():
    mesh = gpus("h200", (4, 2))
    report = {}
    of_shards = collectives(
        compiled("fp8", lambda *axes: NamedSharding(mesh, P(*axes))).as_text()
    )
    report["fsdp"] = [
        {"kind": c.kind, "bytes": c.bytes, "what": str(c)} for c in of_shards
    ]
    for name in RECIPES:
        program = compiled(
            name, lambda *axes: SingleDeviceSharding(mesh.devices.flat[0])
        )
        text = program.as_text()
        entry = text[text.index("ENTRY") :]
        report[name] = {
            "custom_calls": Counter(
                re.findall(r'custom_call_target="jaxfp8_(\w+)_v\d+"', text)
            ),
            "while_loops": len(re.findall(r" while\(", text)),
            # what XLA launches itself
            "fusions": len(re.findall(r" (?:fusion|copy|transpose)\(", entry)),
            "dots": len(re.findall(r" dot\(|__cublas|__triton_gemm", text)),
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
            "largest": max(
                math.prod(map(int, shape.split(",")))
                for shape in re.findall(r"\b[a-z]+\d+\w*\[([\d,]+)\]", text)
            ),
        }
    for name, recipe in (("fp8", RECIPES["fp8"]), ("bf16", jaxfp8.HighPrecision())):
        place = SingleDeviceSharding(mesh.devices.flat[0])
        program = compiled_layer(recipe, place)
        found = count.summary(program.as_text())
        report[f"{name} layer"] = {
            "launches": found["launches"],
            "kinds": found["kinds"],
            "fp8_gemms": found["fp8_gemms"],
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
