"""Speed on a GPU against goals and peers, with the ceilings of the day first.

    python benchmarks/gpu.py [--only CASE ...] [--parts PART ...] [--budget SECONDS]
                             [--json PATH] [--turns N] [--peers-once]
    # every case at a small size: does it run at all?
    python benchmarks/gpu.py --tiny --platform cpu

Every answer is checked before it is timed, by the protocol in _gpu_timing.py. Each case
has a process of its own (_gpu_process.py), also because XLA's flags are per process.
The JSON is written after each case.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

from _gpu_process import INTERRUPTED, run_case, run_in_a_process


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", help="names of cases, or how they begin"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        metavar="PART",
        help="of cases with parts (kernels), how their names begin",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=540,
        help="seconds in which to start cases (default: 540)",
    )
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/gpu.json")
    )
    parser.add_argument(
        "--turns", type=int, default=9, help="timed turns of each candidate"
    )
    parser.add_argument(
        "--peers-once",
        action="store_true",
        help="compile peers only as XLA chooses, which takes half",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="small sizes, one call a turn, all cases in this process",
    )
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--child", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args()


def describe(args) -> dict:
    """Return the machine and the versions; a child asks the device, so that this
    process holds none of its memory.
    """
    script = (
        "import jax; d = jax.devices()[0]; print(d.device_kind); "
        "print(getattr(d.client, 'platform_version', ''))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    if asked.returncode != 0:
        reason = next(
            (line for line in reversed(asked.stderr.splitlines()) if "Error" in line),
            "",
        )
        sys.exit(
            f"gpu.py: JAX has no {args.platform} device: {reason}; a dry run: --tiny "
            "--platform cpu"
        )
    device, *version = asked.stdout.splitlines()
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        driver = ""
    from _environment import environment

    from jaxfp8.inspect._machine import versions

    return environment(
        **versions(("flax", "nvidia-cublas", "torch"))
        | {"device": device, "driver": driver},
        platform_version=" ".join(version),
        dry_run=args.platform == "cpu",
    )


def facts(row: dict) -> str:
    """Return the rates and GEMMs of a row as one line."""
    gemms = ", ".join(
        f"{count:g} {kind}" for kind, count in row.get("gemms", {}).items()
    )
    units = (
        ("tflops", "TFLOP/s"),
        ("gb_s", "GB/s"),
        ("of_copy", "% of a copy"),
        ("memory_mib", "MiB"),
        ("us_a_launch", "us a launch"),
        ("tokens_a_second", "tokens/s"),
        ("host_ms", "ms on the host"),
        ("loss", "nat"),
    )
    rates = [f"{row[key]:.4g} {unit}" for key, unit in units if key in row]
    if "kernel" in row and not row["custom_calls"]:
        rates.append("the reference, no custom call")
    return "  ".join(rates + ([f"GEMMs: {gemms}"] if gemms else []))


def show(name: str, result: dict) -> None:
    print(f"\n{name}")
    width = max(map(len, (*result["rows"], *result["errors"])), default=0)
    for candidate, row in result["rows"].items():
        print(
            f"  {candidate:{width}} {row['us']:9.1f} us +-{100 * row['spread']:3.0f} "
            f"%  {facts(row)}"
        )
    for candidate, error in result["errors"].items():
        print(f"  {candidate:{width}} no result: {' '.join(error.split())[-300:]}")
    sys.stdout.flush()


def main():
    args = parse_arguments()
    os.environ["JAX_PLATFORMS"] = args.platform
    # Leave memory for PyTorch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.70")
    from _gpu_cases import CASES
    from _gpu_goals import goals, table
    from _gpu_inputs import Options

    options = Options(
        tiny=args.tiny, turns=1 if args.tiny else args.turns, peers_once=args.peers_once
    )
    if args.child:
        run_case(args.child, CASES[args.child], options, args.parts or [], args.json)
        return

    started = time.monotonic()
    described = describe(args)
    for key, value in described.items():
        print(f"{key}: {value}")
    chosen = [
        name
        for name in CASES
        if not args.only or any(name.startswith(only) for only in args.only)
    ]
    # one process cannot have the XLA flags of these cases, so they would repeat others
    if args.tiny:
        chosen = [name for name in chosen if not CASES[name].xla_flags]
    if not chosen:
        sys.exit(
            f"gpu.py: --only: no case begins with {args.only}; there are "
            f"{', '.join(CASES)}"
        )
    child = [
        "--turns",
        str(args.turns),
        "--platform",
        args.platform,
        *["--peers-once"] * args.peers_once,
    ]
    # Whatever ends this program early, each case that was asked for has a row or an
    # error in the record.
    cases = {name: {"rows": {}, "errors": {name: "not started"}} for name in chosen}
    for name in chosen:
        case, left = CASES[name], args.budget - (time.monotonic() - started)
        parts = [
            part
            for part in case.parts
            if not args.parts or any(part.startswith(begin) for begin in args.parts)
        ]
        if left <= 0:
            cases[name] = {
                "rows": {},
                "errors": {
                    name: f"not started: the budget of {args.budget:.0f} s is spent"
                },
            }
        elif args.tiny:
            cases[name] = run_case(name, case, options, parts)
        else:
            cases[name] = run_in_a_process(
                name, case.xla_flags, parts, child, min(case.seconds, left + 30)
            )
        if not cases[name]["rows"] and not cases[name]["errors"]:
            cases[name]["errors"][name] = "the case gave no rows"
        show(name, cases[name])
        lines = goals(cases, described["dry_run"])
        record = {
            "environment": described,
            "cases": cases,
            "goals": [dataclasses.asdict(g) | {"met": g.met} for g in lines],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
        if INTERRUPTED in cases[name]["errors"].values():
            sys.exit(
                f"gpu.py: interrupted in {name}; what was measured is in {args.json}"
            )
    shown = [line for line in lines if line.case in cases]
    print(f"\nwritten to {args.json}\n\n{table(shown, described['dry_run'])}")
    blank = [name for name in chosen if not cases[name]["rows"]]
    if blank:
        sys.exit(f"gpu.py: no row of {', '.join(blank)}")


if __name__ == "__main__":
    main()
