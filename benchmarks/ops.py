"""Times the quantization ops on this machine's CPU, beside the fastest program in jnp
and beside memcpy.

    python benchmarks/ops.py [--json PATH] [--heap warm]
                             [--sizes 1024x1024 4096x4096 4096x14336]
                             [--ops quantize ...]

Each answer is checked, bit for bit, before it is timed. Each row comes from a process
of its own, because the cost of a malloc depends on all that was freed before. README.md
says how to read the table.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _timing  # noqa: E402
import _xla_peers as peers  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from _environment import result_parser, shown_environment, write  # noqa: E402
from _memcpy import Memcpy  # noqa: E402

from jaxfp8 import ops  # noqa: E402

DTYPES = {
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
}
# With these settings glibc takes all memory from its heap and returns none of it, so
# results reuse touched pages.
WARM_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
SIZES = ("1024x1024", "4096x4096", "4096x14336")
# elements; for smaller arrays the start of threads takes a part of the time, and goals
# are lower
SMALL = 2**21
SCALE = np.float32(448 / 6.3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table. `dtype` is the high-precision side, `format` the FP8 side
    ("" for amax).
    """

    op: str
    dtype: str
    format: str
    goal: float  # times the best XLA
    small_goal: float  # likewise, below SMALL elements
    memcpy_goal: float  # part of memcpy's speed; for arrays of at least SMALL elements

    def bytes(self, size: int) -> int:
        codes = {"amax": 0, "quantize": 1, "quantize_transpose": 2, "dequantize": 1}[
            self.op
        ]
        return size * (jnp.dtype(DTYPES[self.dtype]).itemsize + codes)


CASES = [
    *(Case("amax", dtype, "", 1, 1, 0.6) for dtype in ("bf16", "f32")),
    *(Case("quantize", "bf16", format, 6, 4, 0.6) for format in ("e4m3", "e5m2")),
    *(Case("quantize", "f32", format, 4, 3, 0.6) for format in ("e4m3", "e5m2")),
    *(
        Case("quantize_transpose", "bf16", format, 4, 4, 0.35)
        for format in ("e4m3", "e5m2")
    ),
    *(
        Case("quantize_transpose", "f32", format, 3, 3, 0.35)
        for format in ("e4m3", "e5m2")
    ),
    *(Case("dequantize", "bf16", format, 3, 3, 0.6) for format in ("e4m3", "e5m2")),
    *(Case("dequantize", "f32", format, 1.3, 1.3, 0.6) for format in ("e4m3", "e5m2")),
]


def inputs(case: Case, m: int, n: int):
    """Make arrays for the op: normal numbers, of which the largest reach the format's
    limit.
    """
    x = np.random.default_rng(0).standard_normal((m, n), np.float32)
    if case.op == "amax":
        return (jnp.asarray(x, DTYPES[case.dtype]),)
    if case.op == "dequantize":
        return jnp.asarray((x * SCALE).astype(DTYPES[case.format])), jnp.float32(
            1 / SCALE
        )
    return jnp.asarray(x, DTYPES[case.dtype]), jnp.float32(SCALE)


def ours(case: Case):
    """Return the op in `jax.jit`, as programs use it, and its static argument."""
    name = {"amax": "", "dequantize": case.dtype}.get(case.op, case.format)
    dtype = (DTYPES[name],) if name else ()
    return jax.jit(lambda *arrays: getattr(ops, case.op)(*arrays, *dtype)), dtype


def expected(case: Case, arrays):
    """Compute the answer by numpy and ml_dtypes, which share no code with jaxfp8."""
    x = np.asarray(arrays[0]).astype(np.float32)
    if case.op == "amax":
        return (np.max(np.abs(x)),)
    if case.op == "dequantize":
        return ((x * np.float32(arrays[1])).astype(DTYPES[case.dtype]),)
    format = DTYPES[case.format]
    top = np.float32(ml_dtypes.finfo(format).max)
    data = np.clip(x * SCALE, -top, top).astype(format)
    amax = np.max(np.abs(x))
    return (data, amax) if case.op == "quantize" else (data, data.T, amax)


def check(name: str, got, want):
    """Raise an AssertionError unless `got` has the bits of `want`."""
    for index, (g, w) in enumerate(zip(jax.tree.leaves(got), want, strict=True)):
        g, w = np.ascontiguousarray(g), np.ascontiguousarray(w)
        if g.dtype != w.dtype or not np.array_equal(g.view(np.uint8), w.view(np.uint8)):
            raise AssertionError(
                f"{name}: result {index} is not bitwise the expected one"
            )


def measure(case: Case, m: int, n: int, turns: int) -> dict:
    """Measure one row: check, then time the op, the fastest peers and memcpy in
    turns.
    """
    arrays = inputs(case, m, n)
    run, dtype = ours(case)
    want = expected(case, arrays)
    check(f"jaxfp8 {case.op}", run(*arrays), want)
    exact = peers.jitted(peers.EXACT[case.op], *dtype)
    inexact = peers.jitted(peers.INEXACT[case.op], *dtype)
    for name, call in exact.items():
        check(f"XLA, {name}", call(*arrays), want)
    del want

    def bound(functions):
        return {
            name: lambda call=call: call(*arrays) for name, call in functions.items()
        }

    candidates, first_round = _timing.shortlist(bound(exact), keep=2)
    others, other_round = _timing.shortlist(bound(inexact), keep=1)
    memcpy = Memcpy(case.bytes(m * n))
    timings = _timing.interleaved(
        {"jaxfp8": lambda: run(*arrays), "memcpy": memcpy, **candidates, **others},
        turns=turns,
    )
    memcpy.close()
    best = min(candidates, key=lambda name: timings[name].median)
    seconds = {
        "jaxfp8": timings["jaxfp8"].median,
        "xla": timings[best].median,
        "memcpy": timings["memcpy"].median,
    }
    small = m * n < SMALL
    goal, memcpy_goal = (
        (case.small_goal, 0.0) if small else (case.goal, case.memcpy_goal)
    )
    ratio, of_memcpy = (
        seconds["xla"] / seconds["jaxfp8"],
        seconds["memcpy"] / seconds["jaxfp8"],
    )
    return {
        "op": case.op,
        "dtype": case.dtype,
        "format": case.format,
        "shape": f"{m}x{n}",
        "jaxfp8_ms": 1e3 * seconds["jaxfp8"],
        "jaxfp8_spread": timings["jaxfp8"].spread,
        "xla_ms": 1e3 * seconds["xla"],
        "xla_peer": best,
        "xla_inexact_ms": min(
            (1e3 * timings[name].median for name in others), default=None
        ),
        "first_round_ms": {
            name: 1e3 * best for name, best in (first_round | other_round).items()
        },
        "memcpy_ms": 1e3 * seconds["memcpy"],
        "ratio": ratio,
        "goal": goal,
        "of_memcpy": of_memcpy,
        "memcpy_goal": memcpy_goal,
        "passed": ratio >= goal and of_memcpy >= memcpy_goal,
    }


HEADER = (
    f"{'op':18} {'dtype':5} {'format':6} {'shape':>11} {'jaxfp8 ms':>9} "
    f"{'best XLA ms':>11} {'ratio':>6} {'goal':>5} {'% of memcpy':>11} {'goal':>5}  "
    f"{'result':6} {'inexact XLA ms':>14}"
)


def line(row: dict) -> str:
    memcpy_goal = f"{100 * row['memcpy_goal']:4.0f}%" if row["memcpy_goal"] else "    -"
    inexact = (
        f"{row['xla_inexact_ms']:14.3f}" if row["xla_inexact_ms"] else f"{'-':>14}"
    )
    return (
        f"{row['op']:18} {row['dtype']:5} {row['format']:6} {row['shape']:>11} "
        f"{row['jaxfp8_ms']:9.3f} {row['xla_ms']:11.3f} {row['ratio']:6.2f} "
        f"{row['goal']:5.1f} {100 * row['of_memcpy']:10.0f}% {memcpy_goal}  "
        f"{'pass' if row['passed'] else 'FAIL':6} {inexact}"
    )


def main():
    parser = result_parser(__doc__, turns=15)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="MxN")
    parser.add_argument(
        "--ops", nargs="+", default=sorted({case.op for case in CASES}), metavar="OP"
    )
    parser.add_argument(
        "--heap",
        choices=("default", "warm"),
        default="default",
        help="warm: no fresh pages (glibc)",
    )
    args = parser.parse_args()

    described = shown_environment(heap=args.heap)
    print(HEADER)
    if args.heap == "warm":
        # read by the processes of the rows when they start
        os.environ.update(WARM_HEAP)
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=spawn, max_tasks_per_child=1
    ) as processes:
        for size in args.sizes:
            m, n = map(int, size.split("x"))
            for case in CASES:
                if case.op in args.ops:
                    rows.append(
                        processes.submit(measure, case, m, n, args.turns).result()
                    )
                    print(line(rows[-1]), flush=True)
    print(f"{sum(row['passed'] for row in rows)} of {len(rows)} rows reach their goals")
    write(args.json, environment=described, rows=rows)


if __name__ == "__main__":
    main()
