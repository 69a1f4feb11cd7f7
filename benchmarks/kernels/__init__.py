"""The case `kernels`: every kernel by itself, at two shapes, beside a copy of as many
bytes.

A part of the case is one kernel. Its answer is checked. Then it is timed in turns with
the driver's copy of as many bytes as it reads and writes, but for products whose limit
is their operations; or, where a launch is all it costs, as a chain of launches that
wait for each other.
"""

import functools
import math

import jax
import jax.numpy as jnp
from _gpu_timing import measure, program

from . import _launches, _memory, _products

# Tokens by the width of a Llama 8B layer, and the square of the goals.
SHAPES, TINY_SHAPES = ((8192, 4096), (8192, 8192)), ((64, 128), (128, 256))
KERNELS = {
    **{
        name: (make, SHAPES)
        for name, make in (_memory.KERNELS | _products.KERNELS).items()
    },
    **_launches.KERNELS,
}
# 35 kernels, two shapes, two candidates: some 10 s in all.
TURN_SECONDS = 6e-3
# Bytes of one program: a few times the L2 cache, and longer on the device than the
# program's dispatch takes.
PROGRAM_BYTES = 800e6


def kernels(options, part):
    """Check and time one kernel at its shapes; return `(rows, errors)`, as every case
    does.
    """
    make, shapes = KERNELS[part]
    if options.tiny and shapes is SHAPES:
        shapes = TINY_SHAPES
    launches = options.size(100, 4)  # of a chain
    candidates, rows = {}, {}
    for shape in shapes:
        name, work = f"{part}, {'x'.join(map(str, shape))}", make(*shape)
        arguments = work.arguments(0)
        work.check(jax.jit(work.step)(*arguments), *arguments)
        rows[name] = {"kernel": part}
        if work.chain:
            candidates[name] = program(
                functools.partial(_chain, work, launches), [arguments]
            )
            continue
        traffic = _traffic(work, arguments)
        count = (
            2 if options.tiny else max(2, min(8, math.ceil(PROGRAM_BYTES / traffic)))
        )
        candidates[name] = program(
            work.step, [arguments, *(work.arguments(seed) for seed in range(1, count))]
        )
        if work.operations:
            rows[name]["operations"] = work.operations
        if work.is_copied or not work.operations:
            rows[name]["bytes"] = traffic
            candidates[_copy_of(name)] = _copies(traffic, count)
    times = measure(candidates, options.turns, TURN_SECONDS)
    for name, row in rows.items():
        row |= times[name]
        if "bytes" in row:
            row["gb_s"] = row["bytes"] / row["us"] * 1e-3
            row["of_copy"] = 100 * times[_copy_of(name)]["us"] / row["us"]
        if "operations" in row:
            row["tflops"] = row["operations"] / row["us"] * 1e-6
        if not row.keys() & {"bytes", "operations"}:
            row["us_a_launch"] = row["us"] / launches
    return rows, {}


def _chain(work, launches, *arguments):
    for _ in range(launches):
        results = work.step(*arguments)
        arguments = work.chain(results, arguments)
    return results


def _traffic(work, arguments) -> int:
    """Bytes that the kernel reads and writes: its arguments as often as it reads them,
    its results once.
    """

    def size(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    return (
        size(arguments)
        + (work.reads - 1) * size(arguments[0])
        + size(jax.eval_shape(work.step, *arguments))
    )


def _copy_of(name):
    return f"copy for {name}"


def _copies(traffic, count):
    words = math.ceil(traffic / 8)  # half of the bytes are read, half are written
    return program(
        jnp.copy, [(jnp.arange(i, i + words, dtype=jnp.int32),) for i in range(count)]
    )
