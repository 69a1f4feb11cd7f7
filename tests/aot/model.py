"""The GPU benchmark's model in training, `benchmarks/_gpu_training.py`, compiled for an
H200; prints as JSON what `count` finds, and the memory.

    python -m aot.model

Attention is cuDNN's, as on a GPU; cuDNN decides its workspace there, so it is not in
the memory. "scan" is the model as a scan.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

# At the end: its `aot` is another.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import _gpu_models as models  # noqa: E402
import _gpu_training as training  # noqa: E402

from . import count, programs  # noqa: E402

BATCH = jax.ShapeDtypeStruct((2, 4097), jnp.int32)


def report(name: str, in_a_scan: bool) -> dict:
    """What is in the program of an arm's step."""
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    )
    model = models.llama(name, training.LLAMA, attention, in_a_scan)
    tokens = jnp.zeros(BATCH.shape, BATCH.dtype)
    state = jax.eval_shape(lambda: training.create(name, model, tokens))
    compiled = (
        jax.jit(training.train_step, donate_argnums=0)
        .lower(*programs.on_one((state, BATCH)))
        .compile(training.NO_TRITON | programs.QUICKLY)
    )
    found = count.summary(compiled.as_text())
    return {key: found[key] for key in ("launches", "gemms", "fp8_gemms")} | {
        "memory_mib": training.memory_mib(compiled),
    }


def main():
    # what a machine with a Hopper GPU says
    cudnn.check_cudnn_version = lambda: 91400
    cudnn.check_compute_capability = lambda capability: capability <= "9.0"
    cudnn.is_cuda_compute_capability_equal = lambda capability: capability == "9.0"
    kinds = {"model": False, "scan": True}
    print(
        json.dumps(
            {
                kind: {name: report(name, in_a_scan) for name in training.ARMS}
                for kind, in_a_scan in kinds.items()
            }
        )
    )


if __name__ == "__main__":
    main()
