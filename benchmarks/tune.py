"""Measures cuBLASLt's algorithms for the products of common layers; --ship stores the plans in the package.

    python benchmarks/tune.py [--ship]

The program needs a GPU that runs nothing else. The layers are those of the benchmarks: forward and backward, f32
kernels, e5m2 gradients. Without --ship, the plans go where `jaxfp8.autotune` keeps them. Products that a table already
has are not measured again.
"""

import argparse

import jax
import jax.numpy as jnp

import jaxfp8
from jaxfp8.autotune import _plan_files

# The rows of x, the features in and the features out of each layer: small and square ones, and those of Llama 8B.
LAYERS = [
    (2048, 1024, 1024),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 4096, 14336),  # up and gate
    (8192, 14336, 4096),  # down
    (8192, 4096, 28672),  # up and gate in one
    (8192, 4096, 4096),  # q, out
    (8192, 4096, 1024),  # k, v
    (8192, 4096, 6144),  # q, k and v in one
]
RECIPE = jaxfp8.DelayedScaling(amax_history_len=16)


def step(x, kernel, grad, state):
    """Compute fprop, dgrad and wgrad of one layer."""

    def product(x, kernel, state):
        dims = (((1,), (0,)), ((), ()))
        return jaxfp8.dot_general(x, kernel, dims, recipe=RECIPE, state=state, preferred_element_type=x.dtype)

    y, vjp = jax.vjp(product, x, kernel, state)
    return y, vjp(grad)


def steps(layers):
    """Return all layers as one program, and its arguments."""

    def of_shape(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    arguments = [
        (of_shape(m, k), of_shape(k, n, dtype=jnp.float32), of_shape(m, n), jaxfp8.init_state(RECIPE))
        for m, k, n in layers
    ]
    return (lambda arguments: [step(*of_layer) for of_layer in arguments]), arguments


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ship", action="store_true", help="write to jaxfp8/autotune/_plans")
    options = parser.parse_args()
    program, arguments = steps(LAYERS)
    report = jaxfp8.autotune(program, arguments)
    print(report)
    if options.ship:
        # Ship the plans of this run's products only, not others that this machine has measured.
        path = _plan_files.SHIPPED / _plan_files.file_name(report.platform)
        known = _plan_files.store.on(report.platform)
        plans = {row["gemm"]: known[row["gemm"]] for row in report.rows}
        _plan_files.write(path, report.platform, _plan_files.read(path)[1] | plans)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
