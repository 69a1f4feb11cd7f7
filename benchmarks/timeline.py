"""Estimates the time of programs compiled for H200s, by replaying XLA's schedule. No
GPU is needed.

    python benchmarks/timeline.py [--json FILE]

`tests/aot/timeline.py` has the rates, and what is assumed. The first table is the
check: layers that ran on an H200 (`results/h200_gpu.json`), estimated and measured. The
second has layers on eight H200s: the time, the time if all collectives were hidden,
what the compute stream waits for them in one layer of a scan, or in the program, the
least and the most with another wire (30 %) or memory (20 %); and of a scan compiled
once more, with a profile of the first program, the time and the waits.
"""

import json
import pathlib
import sys

from _environment import result_parser, shown_environment, write

RESULTS = pathlib.Path(__file__).with_name("results")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from aot import compiler  # noqa: E402  (the line above finds it)

# `gpu.py`'s names of a case and its candidates, by those of `aot.programs`.
RECORDED = {
    "dense": (
        "dense",
        {"flax": "flax", "drop-in": "jaxfp8 drop-in", "own": "jaxfp8 own"},
    ),
    "gated mlp": (
        "gated_mlp",
        {"flax": "flax", "drop-in": "jaxfp8 drop-in", "fused": "jaxfp8 own"},
    ),
}


def check(cases) -> list[str]:
    """Return the lines of the table of layers that ran."""
    record = json.loads((RESULTS / "h200_gpu.json").read_text())["cases"]
    lines = [
        "| layer | | estimated, ms | measured, ms | off by |",
        "|---|---|---|---|---|",
    ]
    for case, (name, candidates) in RECORDED.items():
        for candidate, recorded in {"bf16": "bf16", **candidates}.items():
            estimated = cases[case][candidate]["timeline"]["ms"]
            measured = record[name]["rows"][recorded]["us"] / 1e3
            off = estimated / measured - 1
            numbers = f"{estimated:.2f} | {measured:.2f} | {off:+.0%}"
            lines.append(f"| {case} | {candidate} | {numbers} |")
    return lines


def sharded(cases) -> list[str]:
    """Return the lines of the table of layers on eight devices."""
    lines = [
        "| layer | | ms | times bf16 | hidden, ms | waits, us | at other rates, ms "
        "| profiled, ms | waits, us |",
        "|---" * 9 + "|",
    ]
    for case, candidates in cases.items():
        bf16 = candidates["bf16"]["timeline"]["ms"]
        for candidate, counts in candidates.items():
            found = counts["timeline"]
            others = found["perturbed_ms"].values()
            cells = [
                case,
                candidate,
                f"{found['ms']:.1f}",
                f"{bf16 / found['ms']:.2f}",
                f"{found['hidden_ms']:.1f}",
                f"{found['wait_us']:.0f}",
                f"{min(others):.1f} to {max(others):.1f}",
            ]
            if profiled := counts.get("profiled"):
                cells += [f"{profiled['ms']:.1f}", f"{profiled['wait_us']:.0f}"]
            else:
                cells += ["-", "-"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main():
    args = result_parser(__doc__).parse_args()
    if reason := compiler.missing():
        sys.exit(f"benchmarks/timeline.py: {reason}")
    described = shown_environment()
    cases = {
        group: json.loads(compiler.run("programs", "--quickly", group))
        for group in ("dense", "sharded")
    }
    print("\n" + "\n".join(check(cases["dense"])))
    print("\n" + "\n".join(sharded(cases["sharded"])))
    if args.json:
        kept = ("timeline", "profiled")
        times = {
            case: {
                name: {key: found[key] for key in kept if key in found}
                for name, found in candidates.items()
            }
            for group in cases.values()
            for case, candidates in group.items()
        }
        write(args.json, environment=described, cases=times)


if __name__ == "__main__":
    main()
