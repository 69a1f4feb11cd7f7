"""Updates of AdamW compiled for an H200, with moments in float32 and in FP8; prints as JSON what `count` finds.

    python -m aot.optimizers

The parameter is a kernel of 8192 by 8192 in float32; parameters and state are updated in place.
"""

import json

import jax
import jax.numpy as jnp
import optax

from jaxfp8 import optim
from jaxfp8.ops import _ffi

from . import count, programs

SIZE = 8192
TRANSFORMATIONS = {"float32": optax.adamw(1e-3), "fp8": optim.quantized(optax.adamw(1e-3))}


def report(tx) -> dict:
    """What is in the program of one update."""

    def update(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = programs.on_one({"kernel": jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)})
    opt_state = programs.on_one(jax.eval_shape(tx.init, params))
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, opt_state, params).compile()
    found = count.summary(compiled.as_text())
    return {
        "launches": found["launches"],
        "bytes_per_parameter": found["bytes"] / SIZE**2,
        "temporary_bytes_per_parameter": compiled.memory_analysis().temp_size_in_bytes / SIZE**2,
    }


if __name__ == "__main__":
    _ffi.cuda_architectures = list  # nothing runs here: the build may have code for one GPU alone
    print(json.dumps({name: report(tx) for name, tx in TRANSFORMATIONS.items()}))
