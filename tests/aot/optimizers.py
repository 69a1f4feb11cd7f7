"""Updates of AdamW and Lion compiled for an H200, with float32 and FP8 moments; prints
as JSON what `count` finds.

    python -m aot.optimizers

Parameters are kernels in float32; they and the state are updated in place.
"""

import json
import math

import jax
import jax.numpy as jnp
import optax

from jaxfp8 import optim

from . import count, programs

ONE = [(8192, 8192)]
FOUR = [(4096, 4096)] * 3 + [(2048, 8192)]
SMALL = [(512, 1024)] * 32
ADAMW, LION, FUSED = optax.adamw(1e-3), optax.lion(1e-3), optim.adamw(1e-3)
# name -> the transformation, the shapes of the kernels. `apply` writes the parameters
# of those that can.
PROGRAMS = {
    "float32": (ADAMW, ONE),
    "fp8": (optim.quantized(ADAMW), ONE),
    "fp8, four leaves": (optim.quantized(ADAMW), FOUR),
    "adamw, update": (FUSED, ONE),
    "adamw, apply": (FUSED, ONE),
    "adamw, apply, clipped": (optim.adamw(1e-3, max_norm=1.0), ONE),
    "float32, clipped": (optax.chain(optax.clip_by_global_norm(1.0), ADAMW), ONE),
    "adamw, apply, four leaves": (FUSED, FOUR),
    "adamw, apply, 32 small leaves": (FUSED, SMALL),
    "float32, 32 small leaves": (ADAMW, SMALL),
    "lion, float32": (LION, ONE),
    "lion, fp8": (optim.quantized(LION), ONE),
}


def report(name, tx, shapes) -> dict:
    """What is in the program of one update. Gradients are temporary in a step, so they
    may be written over.
    """

    def update(params, opt_state, grads):
        if "apply" in name:
            return tx.apply(grads, opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = programs.on_one(
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    )
    size = sum(map(math.prod, shapes))
    opt_state = programs.on_one(jax.eval_shape(tx.init, params))
    compiled = (
        jax.jit(update, donate_argnums=(0, 1))
        .lower(params, opt_state, params)
        .compile()
    )
    found = count.summary(compiled.as_text())
    return {
        "launches": found["launches"],
        "bytes_per_parameter": found["bytes"] / size,
        "temporary_bytes_per_parameter": compiled.memory_analysis().temp_size_in_bytes
        / size,
    }


if __name__ == "__main__":
    print(
        json.dumps({name: report(name, *program) for name, program in PROGRAMS.items()})
    )
