"""Counts what is in the programs that XLA compiles for an H200: bf16, Flax's FP8 and
jaxfp8. No GPU is needed.

    python benchmarks/aot.py [--groups dense recipes layers sharded] [--json FILE]

The programs are in `tests/aot/programs.py`, the rules of counting in
`tests/aot/count.py`. The tables have counts and bytes, but no times of programs,
because no program runs and none is autotuned. The time of compilation is a multiple of
bf16's, from one run of each, so a rough number. Residuals are those of all devices
together, all other numbers are those of one device.
"""

import json
import pathlib
import sys

from _environment import result_parser, shown_environment, write

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from aot import compiler  # noqa: E402  (the line above finds it)

GROUPS = ("dense", "recipes", "layers", "sharded")
MIB = 2**20
HEADER = (
    "layers", "launches", "FP8 GEMMs", "non-GEMM MiB", "copies",
    "reads of x / kernel / grad", "residuals, MiB", "temporaries, MiB",
    "StableHLO ops", "compilation",
)  # fmt: skip


def collectives_of(found) -> str:
    """Return a text such as `"3 all-gather f8e4m3fn, 168 MiB"` for each kind and dtype
    of collective.
    """
    sums = {}
    for c in found["collectives"]:
        name = "amax all-reduce" if c["reducer"] == "maximum" else c["kind"]
        row = sums.setdefault((name, "+".join(c["dtypes"]), c["in_loop"]), [0, 0])
        row[0] += c["times"]
        row[1] += c["times"] * c["bytes"]
    cells = []
    for (name, dtypes, in_loop), (times, size) in sums.items():
        bytes_ = "" if name.startswith("amax") else f", {size / MIB:.0f} MiB"
        cells.append(f"{times} {name} {dtypes}{bytes_}{' (in the loop)' * in_loop}")
    return "; ".join(cells)


def table(case, candidates) -> str:
    has_collectives = any(found["collectives"] for found in candidates.values())
    header = (*HEADER, *("collectives",) * has_collectives)
    lines = [f"**{case}**", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    of_bf16 = candidates.get("bf16", {}).get("compile_seconds")
    for name, found in candidates.items():
        cells = [
            name,
            found["launches"],
            f"{found['fp8_gemms']} of {found['gemms']}",
            f"{found['bytes'] / MIB:.0f}",
            found["copies"],
            "/".join(map(str, found["reads"])),
            f"{found['residual_bytes'] / MIB:.0f}",
            f"{found['temporary_bytes'] / MIB:.0f}",
            found["operations"],
            f"{found['compile_seconds'] / of_bf16:.1f}" if of_bf16 else "-",
            *(collectives_of(found),) * has_collectives,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main():
    parser = result_parser(__doc__)
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=GROUPS,
        default=list(GROUPS),
        help="(default: all)",
    )
    args = parser.parse_args()
    if reason := compiler.missing():
        sys.exit(f"benchmarks/aot.py: {reason}")
    described = shown_environment()
    cases = {}
    for group in args.groups:
        found = json.loads(compiler.run("programs", group))
        cases |= found
        for case, candidates in found.items():
            print(f"\n{table(case, candidates)}", flush=True)
    write(args.json, environment=described, cases=cases)


if __name__ == "__main__":
    main()
