"""Speed on a GPU against goals and peers, with the ceilings of the day first.

    python benchmarks/gpu.py [--only CASE ...] [--budget SECONDS] [--json PATH] [--turns N]
    python benchmarks/gpu.py --tiny --platform cpu          every case at a small size: does it run at all?

Every answer is checked before it is timed; how it is timed is said in _gpu_timing.py. Each case has a process of its
own: a kernel that fails takes down its case only, and XLA's flags are per process. The JSON is written after each.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases, or how they begin")
    parser.add_argument("--budget", type=float, default=540, help="seconds in which to start cases (default: 540)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/gpu.json"))
    parser.add_argument("--turns", type=int, default=9, help="timed turns of each candidate")
    parser.add_argument("--tiny", action="store_true", help="small sizes, one call a turn, all cases in this process")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--child", metavar="CASE", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_case(name: str, args) -> dict:
    """Rows and errors of one case, here."""
    from _gpu_cases import CASES, Options

    start = time.monotonic()
    try:
        rows, errors = CASES[name].run(Options(tiny=args.tiny, turns=1 if args.tiny else args.turns))
    except Exception as error:  # the other cases go on
        traceback.print_exc()
        rows, errors = {}, {name: f"{type(error).__name__}: {error}"[:1500]}
    return {"rows": rows, "errors": errors, "seconds": time.monotonic() - start}


def run_in_a_process(name: str, case, args, seconds: float) -> dict:
    """The same in a process with the case's flags, for at most `seconds`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {case.xla_flags}".strip()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "case.json")
        command = [sys.executable, __file__, "--child", name, "--json", str(out), "--turns", str(args.turns)]
        command += ["--platform", args.platform] + ["--tiny"] * args.tiny
        try:
            done = subprocess.run(
                command, env=os.environ | {"XLA_FLAGS": flags}, timeout=seconds, stderr=subprocess.PIPE
            )
        except subprocess.TimeoutExpired:
            return {"rows": {}, "errors": {name: f"took more than {seconds:.0f} s"}}
        sys.stderr.write(done.stderr.decode(errors="replace"))
        if done.returncode == 0 and out.exists():
            return json.loads(out.read_text())
        last = done.stderr.decode(errors="replace")[-1500:]
        return {"rows": {}, "errors": {name: f"exit status {done.returncode}: {last}"}}


def describe(args) -> dict:
    """The machine and the versions; the device is asked in a process, so that this one holds no memory of it."""
    script = "import jax; d = jax.devices()[0]; print(d.device_kind); print(getattr(d.client, 'platform_version', ''))"
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if asked.returncode != 0:
        reason = next((line for line in reversed(asked.stderr.splitlines()) if "Error" in line), "")
        sys.exit(f"gpu.py: JAX has no {args.platform} device: {reason}; a dry run: --tiny --platform cpu")
    device, *version = asked.stdout.splitlines()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        driver = ""
    from _environment import environment

    return environment(device=device, platform_version=" ".join(version), driver=driver, dry_run=args.platform == "cpu")


def facts(row: dict) -> str:
    """Rates and GEMMs of a row, in one line."""
    gemms = ", ".join(f"{count:g} {kind}" for kind, count in row.get("gemms", {}).items())
    units = (("tflops", "TFLOP/s"), ("gb_s", "GB/s"), ("memory_mib", "MiB"), ("us_a_launch", "us a launch"))
    rates = [f"{row[key]:.4g} {unit}" for key, unit in units if key in row]
    return "  ".join(rates + ([f"GEMMs: {gemms}"] if gemms else []))


def show(name: str, result: dict) -> None:
    print(f"\n{name}")
    for candidate, row in result["rows"].items():
        print(f"  {candidate:36} {row['us']:11.1f} us  +-{100 * row['spread']:3.0f} %  {facts(row)}")
    for candidate, error in result["errors"].items():
        print(f"  {candidate:36} no result: {' '.join(error.split())[-300:]}")
    sys.stdout.flush()


def main():
    args = parse_arguments()
    os.environ["JAX_PLATFORMS"] = args.platform
    # Room for PyTorch beside JAX.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.70")
    if args.child:
        args.json.write_text(json.dumps(run_case(args.child, args)))
        return

    started = time.monotonic()
    described = describe(args)
    for key, value in described.items():
        print(f"{key}: {value}")
    from _gpu_cases import CASES
    from _gpu_goals import goals, table

    chosen = [name for name in CASES if not args.only or any(name.startswith(only) for only in args.only)]
    if args.tiny:  # in one process XLA's flags are those of all cases: the others would be the same again
        chosen = [name for name in chosen if not CASES[name].xla_flags]
    if not chosen:
        sys.exit(f"gpu.py: --only: no case begins with {args.only}; there are {', '.join(CASES)}")
    cases = {}
    for name in chosen:
        left = args.budget - (time.monotonic() - started)
        if left <= 0:
            cases[name] = {"rows": {}, "errors": {name: f"not started: the budget of {args.budget:.0f} s is spent"}}
        elif args.tiny:
            cases[name] = run_case(name, args)
        else:
            cases[name] = run_in_a_process(name, CASES[name], args, min(CASES[name].seconds, left + 30))
        show(name, cases[name])
        lines = goals(cases, described["dry_run"])
        record = {
            "environment": described,
            "cases": cases,
            "goals": [dataclasses.asdict(g) | {"met": g.met} for g in lines],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {args.json}\n\n{table(lines, described['dry_run'])}")


if __name__ == "__main__":
    main()
