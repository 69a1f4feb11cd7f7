"""Prints what a training step holds on an H200 at its peak, by kind: bf16, Flax's FP8
and jaxfp8. No GPU is needed.

    python benchmarks/memory.py [--models llama experts] [--json FILE]

The models are in `tests/aot/memory.py`. XLA compiles each program ahead of time; its
buffer assignment says which temporaries are alive together. Nothing runs. "peak" is the
memory that XLA reserves for temporaries, and the columns after it are its parts at the
worst moment, in MiB. Parameters, their gradients and the state are arguments and
results, and beside them.
"""

import json
import pathlib
import sys

from _environment import environment, result_parser, write

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from aot import compiler  # noqa: E402  (the line above finds it)

MODELS = ("llama", "experts")
KINDS = ("codes", "transposed codes", "codes of kernels", "f32", "bf16", "other")
MIB = 2**20


def table(model, candidates) -> str:
    header = ("peak", "of bf16", *KINDS, "state, KiB")
    lines = [f"| {model} | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
    bf16 = candidates["bf16"]["temporary_bytes"]
    for name, found in candidates.items():
        parts = [found["held"].get(kind, 0) for kind in KINDS]
        cells = [
            f"{found['temporary_bytes'] / MIB:.0f}",
            f"{found['temporary_bytes'] / bf16:.2f}",
        ]
        cells += [f"{size / MIB:.0f}" for size in parts] + [
            f"{found['state_bytes'] / 1024:.1f}"
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
    models = json.loads(compiler.run("memory", *args.models))
    for model, candidates in models.items():
        print(f"\n{table(model, candidates)}", flush=True)
    write(args.json, environment=described, models=models)


if __name__ == "__main__":
    main()
