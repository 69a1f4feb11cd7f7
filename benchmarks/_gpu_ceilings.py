"""Rates of the device, by products and copies without jaxfp8, and the cost of
launches.
"""

import jax.numpy as jnp
from _gpu_inputs import normal
from _gpu_timing import attempt, measure, program
from jax import lax

from jaxfp8 import ops


def ceilings(options):
    """Measure the rates of the day: a bfloat16 product of 8192^3, and copies of
    gigabytes on the device.
    """
    n = options.size(8192)
    pairs = [(normal(i, (n, n)), normal(10 + i, (n, n))) for i in range(2)]
    candidates, errors = {}, {}
    for suffix, compiler in options.compilers().items():
        attempt(
            candidates,
            errors,
            f"bf16 matmul{suffix}",
            lambda c=compiler: program(jnp.matmul, pairs, c),
        )
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["tflops"] = 2 * n**3 / row["us"] * 1e-6
    for gigabytes in (2, 4):
        words = options.size(gigabytes * 2**28, 2**12)
        source = [(jnp.arange(words, dtype=jnp.int32),)]
        copies = {
            "copy kernel": program(lambda x: x ^ 1, source),
            "copy by the driver": program(jnp.copy, source),
        }
        for name, row in measure(copies, options.turns).items():
            rows[f"{name}, {gigabytes} GB"] = row | {
                "gb_s": 8 * words / row["us"] * 1e-3
            }
    return rows, errors


def launches(options):
    """Measure the cost of a launch in a program of many small kernels: XLA's fusions,
    and jaxfp8's custom calls.
    """
    count = options.size(200, 4)

    def chain(step):
        def run(x):
            for _ in range(count):
                x = lax.optimization_barrier(step(x))
            return x

        return run

    def scale(x):
        return ops.amax_to_scale(x, x, fp8_max=448.0)[0]

    small = jnp.ones((1,), jnp.float32)
    candidates = {
        "XLA fusion": program(chain(lambda x: x + 1), [(small,)]),
        "jaxfp8 custom call": program(chain(scale), [(small,)]),
    }
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["us_a_launch"] = row["us"] / count
    return rows, {}
