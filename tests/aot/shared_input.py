"""Layers that multiply one x, as q, k and v of an attention do, compiled for an H200;
prints as JSON what `count` finds, by program and recipe.

    python -m aot.shared_input

- "alone": the three products, forward and backward; "scan": eight times these, in a
  loop that runs over their states.
- "each": every layer quantizes x. "once": x is quantized by the scale of the first
  layer, and every layer records its amax. "one product": the kernels are one kernel.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
from jax import lax

import jaxfp8
from jaxfp8 import recipes
from jaxfp8.ops import _ffi

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


WAYS = {"each": each, "once": once, "one product": one_product}


def forward(way, recipe, layers, x):
    return WAYS[way](recipe, x, jaxfp8.max_grad(layers))


def forward_of_scan(way, recipe, layers, x):
    def body(x, layers):
        q, k, v = WAYS[way](recipe, x, layers)
        return x + q * jnp.tile(k + v, (1, 4)), None

    return lax.scan(body, x, jaxfp8.max_grad(layers))[0]


FORWARDS = {"alone": forward, "scan": forward_of_scan}


def layers_of(way, recipe):
    columns = (sum(COLUMNS),) if way == "one product" else COLUMNS
    return [
        (jnp.zeros((programs.WIDTH, n)), jaxfp8.init_state(recipe)) for n in columns
    ]


def report(program: str, way: str, name: str) -> dict:
    """What is in the program of a recipe: all gradients and the next state."""
    recipe, run = programs.RECIPES[name], FORWARDS[program]
    layers = jax.eval_shape(lambda: layers_of(way, recipe))
    if program == "scan":
        layers = jax.tree.map(
            lambda leaf: leaf.update(shape=(programs.LAYERS, *leaf.shape)), layers
        )
    x = jax.ShapeDtypeStruct((programs.TOKENS, programs.WIDTH), jnp.bfloat16)
    grad = jax.eval_shape(lambda *args: run(way, recipe, *args), layers, x)

    def step(layers, x, grad):
        y, vjp = jax.vjp(lambda *args: run(way, recipe, *args), layers, x)
        # as where a loss is between them
        y, grad = lax.optimization_barrier((y, grad))
        return y, vjp(grad)

    compiled = (
        jax.jit(step)
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
    # nothing runs here: the build may have code for one GPU alone
    _ffi.cuda_architectures = list
    cases = [("alone", "each", name) for name in RECIPES]
    cases += [("scan", way, "current") for way in ("each", "once")]
    cases += [("alone", way, "delayed") for way in ("once", "one product")]
    cases += [("scan", way, "delayed") for way in WAYS]
    print(json.dumps({", ".join(case): report(*case) for case in cases}))


if __name__ == "__main__":
    main()
