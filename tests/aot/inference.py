"""Forward passes for inference compiled for an H200: in bf16, in FP8, frozen; prints as
JSON what `count` finds.

    python -m aot.inference

Each is a Dense layer of 8192 by 8192 on 2048 rows in bfloat16. `bf16` has its kernel in
bfloat16, as models are served; `fp8` is a trained layer as it is, with a float32 kernel
and state; `frozen` what `jaxfp8.freeze` makes of it. `drop-in` is an `nn.Dense`, the
others are `jaxfp8.linen.Dense`; `frozen <recipe>` have other recipes.
"""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxfp8

from . import count, programs

ROWS, SIZE = 2048, 8192
OPTIONS = {"use_bias": False, "dtype": jnp.bfloat16}


def frozen(model, variables, x):
    return jax.eval_shape(functools.partial(jaxfp8.freeze, model), variables, x)


def as_it_is(model, variables, x):
    del model, x
    return variables


def own(recipe=None):
    return jaxfp8.linen.Dense(SIZE, recipe=recipe, **OPTIONS)


CASES = {
    "bf16": (nn.Dense(SIZE, param_dtype=jnp.bfloat16, **OPTIONS), as_it_is),
    "fp8": (own(), as_it_is),
    "frozen": (own(), frozen),
    "fp8 drop-in": (
        nn.Dense(SIZE, dot_general_cls=jaxfp8.Fp8DotGeneral, **OPTIONS),
        as_it_is,
    ),
    "frozen drop-in": (
        nn.Dense(SIZE, dot_general_cls=jaxfp8.Fp8DotGeneral, **OPTIONS),
        frozen,
    ),
    "frozen current": (own(programs.RECIPES["current"]), frozen),
    "frozen row-wise": (own(programs.RECIPES["row-wise"]), frozen),
    "frozen block": (own(programs.RECIPES["block"]), frozen),
}


def report(model, make) -> dict:
    """What is in the program of one forward pass."""
    x = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.bfloat16)
    variables = make(model, jax.eval_shape(model.init, jax.random.key(0), x), x)
    lowered = jax.jit(model.apply).lower(*programs.on_one((variables, x)))
    compiled = lowered.compile(programs.LIBRARY_GEMMS | programs.QUICKLY)
    # A conditional takes the amax of a tensor whose history is empty, which that of a
    # trained model is not.
    text = compiled.as_text()
    return count.summary(text, taken=False) | {
        "weights": count.total_bytes(variables),
        "conditionals": text.count(" conditional("),
    }


def main():
    print(json.dumps({name: report(*case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
