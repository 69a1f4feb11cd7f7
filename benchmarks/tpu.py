"""Counts what is in the programs that XLA compiles for a TPU: bf16, Flax's FP8 and
jaxfp8. No TPU is needed.

    python benchmarks/tpu.py [--cases dense ...] [--size 8192]
                             [--topology tpu7x:2x2x1] [--json FILE]

The programs are in `tests/tpu/programs.py`, the rules of counting in
`tests/tpu/count.py`. Cycles are XLA's estimates: only ratios in one table mean
something. Nothing runs, and seconds of compilation are from one run each.
"""

import json
import pathlib
import sys

from _environment import environment, result_parser, write

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from tpu import compiler  # noqa: E402  (the line above finds it)

CASES = ("dense", "gated mlp", "scan", "ragged", "dp-8", "fsdp-8")
HEADER = (
    "layers",
    "products",
    "cycles, k",
    "of Flax's",
    "collectives",
    "compilation, s",
)


def table(case, candidates) -> str:
    """The table of one case."""
    lines = [f"**{case}**", "", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for name, found in candidates.items():
        products = "; ".join(
            f"{times} {dtypes}" for dtypes, times in found["products"].items()
        )
        moved = "; ".join(
            f"{kind}, {c['bytes'] / 2**20:.0f} MiB"
            for kind, c in found["collectives"].items()
        )
        ratio = (
            f"{found['cycles'] / candidates['flax']['cycles']:.2f}"
            if "flax" in candidates
            else ""
        )
        cells = (
            name,
            products,
            f"{found['cycles'] / 1000:.0f}",
            ratio,
            moved,
            found["compile_seconds"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main():
    parser = result_parser(__doc__)
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="(default: all)"
    )
    parser.add_argument(
        "--size", default="8192", help="the size of matrices (default: %(default)s)"
    )
    parser.add_argument(
        "--topology", default="tpu7x:2x2x1", help="TPUs (default: %(default)s)"
    )
    args = parser.parse_args()
    if reason := compiler.missing():
        sys.exit(f"benchmarks/tpu.py: {reason}")
    libtpu = next(
        compiler.LIBRARY.parents[1].glob("libtpu-*.dist-info")
    ).stem.removeprefix("libtpu-")
    cases, described = (
        {},
        environment()
        | {"topology": args.topology, "size": int(args.size), "libtpu": libtpu},
    )
    for case in args.cases:
        options = ("--size", args.size, "--topology", args.topology)
        cases |= json.loads(compiler.run("programs", case, *options))
        print(table(case, cases[case]), flush=True)
        write(args.json, environment=described, cases=cases)


if __name__ == "__main__":
    main()
