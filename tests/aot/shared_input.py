"""Layers that multiply one x, as q, k and v of an attention do, compiled for an H200;
prints as JSON what `count` finds, by program and recipe.

    python -m aot.shared_input

- "alone": the three products, forward and backward; "scan": eight times these, in a
  loop that runs over their states.
- "each": every layer quantizes x. "once": x is quantized by the scale of the first
  layer, and every layer records its amax. "one product": the kernels are one kernel.
- "rotary" and "rotary scan": q and k are rotated by their positions, as the next
  operation of an attention. Layers are three `nn.Dense`, "apart" or made one product
  "by rule".
"""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

import jaxfp8
from jaxfp8 import recipes

from . import count, programs, timeline

COLUMNS = (4096, 1024, 1024)  # of q, k and v with grouped queries
MATMUL = (((1,), (0,)), ((), ()))
RECIPES = ("delayed", "current", "row-wise", "block", "static")


def each(recipe, x, layers):
    multiply = functools.partial(
        jaxfp8.dot_general, recipe=recipe, preferred_element_type=jnp.bfloat16
    )
    return [multiply(x, kernel, MATMUL, state=state) for kernel, state in layers]


def once(recipe, x, layers):
    quantizers, (_, state) = recipe.quantizers(), layers[0]
    scale = recipes.scales_of(quantizers, recipes.read(quantizers, state)).input
    scale, values = lax.stop_gradient((scale, x))
    q, _ = quantizers.input.quantize_operand(values, scale)
    return each(recipe, dataclasses.replace(q, source=x), layers)


def one_product(recipe, x, layers):
    (y,) = each(recipe, x, layers)
    return jnp.split(y, (COLUMNS[0], COLUMNS[0] + COLUMNS[1]), axis=1)


class Projections(nn.Module):
    """Layers as a model of Flax has them."""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        names = zip(("query", "key", "value"), COLUMNS, strict=True)
        return [dense(n, name=name)(x) for name, n in names]


def quantized(way, recipe):
    joined = jaxfp8.linen.Dense.of("query", "key", "value", recipe=recipe)
    rule = ("", joined) if way == "by rule" else (".*", recipe)
    return jaxfp8.quantize(Projections(), [rule])


def of_flax(way):
    return lambda recipe, x, variables: quantized(way, recipe).apply(variables, x)


WAYS = {
    "each": each,
    "once": once,
    "one product": one_product,
    "apart": of_flax("apart"),
    "by rule": of_flax("by rule"),
}


def rotated(x):
    """The heads of x `[tokens, n]` by their positions, as Llama rotates them."""
    size = 128
    angles = jnp.arange(x.shape[0])[:, None] / 500_000 ** jnp.linspace(0, 1, size // 2)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.reshape(-1, x.shape[1] // size, size), 2, -1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    y = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return y.reshape(x.shape).astype(x.dtype)


def forward(way, recipe, layers, x):
    return WAYS[way](recipe, x, jaxfp8.max_grad(layers))


def rotary(way, recipe, layers, x):
    q, k, v = forward(way, recipe, layers, x)
    return rotated(q), rotated(k), v


def in_scan(forward):
    def run(way, recipe, layers, x):
        def body(x, layers):
            q, k, v = forward(way, recipe, layers, x)
            return x + q * jnp.tile(k + v, (1, 4)), None

        return lax.scan(body, x, jaxfp8.max_grad(layers))[0]

    return run


FORWARDS = {
    "alone": forward,
    "scan": in_scan(forward),
    "rotary": rotary,
    "rotary scan": in_scan(rotary),
}


def layers_of(way, recipe):
    if way in ("apart", "by rule"):
        x = jnp.zeros((1, programs.WIDTH))
        return quantized(way, recipe).init(jax.random.key(0), x)
    columns = (sum(COLUMNS),) if way == "one product" else COLUMNS
    return [
        (jnp.zeros((programs.WIDTH, n)), jaxfp8.init_state(recipe)) for n in columns
    ]


def report(program: str, way: str, name: str) -> dict:
    """What is in the program of a recipe: all gradients and the next state."""
    recipe, run = programs.RECIPES[name], FORWARDS[program]
    layers = jax.eval_shape(lambda: layers_of(way, recipe))
    if program.endswith("scan"):
        layers = jax.tree.map(
            lambda leaf: leaf.update(shape=(programs.LAYERS, *leaf.shape)), layers
        )
    x = jax.ShapeDtypeStruct((programs.TOKENS, programs.WIDTH), jnp.bfloat16)
    forward = functools.partial(run, way, recipe)
    grad = jax.eval_shape(forward, layers, x)
    compiled = (
        jax.jit(programs.training_step(forward))
        .lower(*programs.on_one((layers, x, grad)))
        .compile(programs.LIBRARY_GEMMS | programs.QUICKLY)
    )
    text = compiled.as_text()
    found = count.summary(text, ("x",) if program == "alone" else ())
    return {
        "launches": found["launches"],
        "mib": found["bytes"] / 2**20,
        "reads": found["reads"],
        "ms": timeline.summary(text)["ms"],
        "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
    }


def main():
    cases = [("alone", "each", name) for name in RECIPES]
    cases += [("scan", way, "current") for way in ("each", "once")]
    cases += [("alone", way, "delayed") for way in ("once", "one product")]
    cases += [("scan", way, "delayed") for way in ("each", "once", "one product")]
    for program in ("rotary", "rotary scan"):
        cases += [(program, way, "delayed") for way in ("apart", "by rule")]
    print(json.dumps({", ".join(case): report(*case) for case in cases}))


if __name__ == "__main__":
    main()
