"""Prints what a training step holds on an H200 at its peak: bf16, Flax's FP8 and
jaxfp8. No GPU is needed.

    python benchmarks/memory.py [--models llama experts] [--json FILE]

The models are in `tests/aot/memory.py`. XLA compiles each program ahead of time;
nothing runs. "peak" is the memory that XLA reserves for temporaries, in MiB.
Parameters, their gradients and the state are arguments and results, and beside them.
"""

import json
import pathlib
import sys

from _environment import environment, result_parser, write

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from aot import compiler  # noqa: E402  (the line above finds it)

MODELS = ("llama", "experts")
MIB = 2**20


def table(model, candidates) -> str:
    lines = [f"| {model} | peak | of bf16 | state, KiB |", "|---|---|---|---|"]
    bf16 = candidates["bf16"]["temporary_bytes"]
    for name, found in candidates.items():
        cells = [
            f"{found['temporary_bytes'] / MIB:.0f}",
            f"{found['temporary_bytes'] / bf16:.2f}",
            f"{found['state_bytes'] / 1024:.1f}",
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n"


def main():
    parser = result_parser(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        help="(default: all)",
    )
    args = parser.parse_args()
    if reason := compiler.missing():
        sys.exit(f"benchmarks/memory.py: {reason}")
    described = environment()
    models = {}
    for model, candidates in json.loads(compiler.run("memory", *args.models)).items():
        candidates = {
            name: {key: found[key] for key in ("temporary_bytes", "state_bytes")}
            for name, found in candidates.items()
        }
        models[model] = candidates
        print(f"\n{table(model, candidates)}", flush=True)
    write(args.json, environment=described, models=models)


if __name__ == "__main__":
    main()
