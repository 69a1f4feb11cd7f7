"""Keeps the results of GPU benchmarks, and writes them into the docs.

    python benchmarks/tables.py [FOLDER ...]

Each FOLDER is the output of a call of tools/gpu_session.sh. Its JSON becomes
`results/DEVICE_NAME.json`, for example `results/h200_kernels.json`. Cases that an
earlier call measured with the same commit and versions stay beside the new cases. Then
the tables of the docs are written again from `results`; without a FOLDER only this is
done.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from _gpu_goals import goals, kernel_goal

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("kernels", "gpu", "selftest")
PAGES = {
    "kernels": ROOT / "benchmarks" / "README.md",
    "gpu": ROOT / "benchmarks" / "README.md",
}
NOT_MEASURED = "Not measured yet."


class NoResult(Exception):
    """A folder holds no result of a GPU; the message says why."""


def keep(folder: pathlib.Path, results: pathlib.Path = RESULTS) -> list[pathlib.Path]:
    """Copy the JSON of one call to `results`; return the paths that were written.

    Raises:
        NoResult: the folder has no JSON of a GPU, or that of a dry run, or of no
            commit.
    """
    # A call may write several records of a kind: gpu_model.json, gpu_scan.json.
    records = [
        (name, json.loads(path.read_text()))
        for name in NAMES
        for path in sorted(folder.glob(f"{name}*.json"))
    ]
    measured = [record["environment"] for _, record in records if "cases" in record]
    if not measured:
        raise NoResult(f"{folder}: no kernels.json or gpu.json")
    for environment in measured:
        if environment["dry_run"] or not environment["commit"]:
            raise NoResult(f"{folder}: a dry run, or without a commit: {environment}")
    written = []
    for name, record in records:
        path = results / f"{_slug(measured[0]['device'])}_{name}.json"
        if "cases" not in record:
            # the self-test, which describes the machine its own way
            record["session"] = measured[0]
        elif path.exists():
            record = _join(json.loads(path.read_text()), record)
        path.write_text(json.dumps(record, indent=1) + "\n")
        written.append(path)
    return written


def _slug(device: str) -> str:
    return "_".join(device.lower().removeprefix("nvidia ").split())


def _join(old: dict, new: dict) -> dict:
    """Return the new record, with further cases and rows of the old record if commit,
    versions and device are equal.
    """

    def but_the_call(record):
        return {
            key: value
            for key, value in record["environment"].items()
            if key != "command"
        }

    if but_the_call(old) != but_the_call(new):
        return new
    cases = old["cases"] | {
        name: _join_case(old["cases"].get(name), case)
        for name, case in new["cases"].items()
    }
    lines = [
        dataclasses.asdict(goal) | {"met": goal.met}
        for goal in goals(cases, dry_run=False)
    ]
    return new | {"cases": cases, "goals": lines}


def _join_case(old: dict | None, new: dict) -> dict:
    if old is None:
        return new
    rows = old["rows"] | new["rows"]
    errors = {
        name: why
        for name, why in (old["errors"] | new["errors"]).items()
        if not _has_row(name, rows, new)
    }
    return new | {"rows": rows, "errors": errors}


def _has_row(name, rows, new) -> bool:
    """Tell whether `name`, a candidate or a kernel, has rows and did not fail in the
    new record.
    """
    return name not in new["errors"] and any(
        row == name or row.startswith(f"{name}, ") for row in rows
    )


def _title(name, environment) -> str:
    versions = f"JAX {environment['jax']}, Python {environment['python']}"
    device = (
        f"{environment['device']}, driver {environment['driver'].split(',')[1].strip()}"
    )
    return (
        f"{device}, {versions}, commit {environment['commit']}: "
        f"`benchmarks/results/{name}.json`."
    )


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def kernels_table(record: dict) -> str:
    """Return a table with a line for each kernel and shape; the line of a kernel that
    failed has the error.
    """
    case, rows = record["cases"]["kernels"], []
    for name, row in case["rows"].items():
        kernel, shape = name.rsplit(", ", 1)
        if "us_a_launch" in row:
            rows.append([kernel, shape, f"{row['us_a_launch']:.2f}", "", "", ""])
            continue
        rate = (
            f"{row['tflops']:.0f} TFLOP/s"
            if "tflops" in row
            else f"{row['gb_s']:.0f} GB/s"
        )
        part = f"{row['of_copy']:.0f} %" if "of_copy" in row else ""
        rate += "" if row["custom_calls"] else ", the reference"
        rows.append(
            [kernel, shape, f"{row['us']:.1f}", rate, part, kernel_goal(kernel)]
        )
    rows += [
        [name, "", "failed", " ".join(why.split())[:80], "", ""]
        for name, why in case["errors"].items()
    ]
    return _markdown(["kernel", "shape", "us", "rate", "of a copy", "goal"], rows)


def goals_table(record: dict) -> str:
    rows = []
    for goal in record["goals"]:
        if goal["case"] not in record["cases"]:
            continue
        digits = 2 if goal["unit"] == "x" else 0
        value = "" if goal["value"] is None else f"{goal['value']:.{digits}f}"
        limits = [f"{goal[key]:.{digits}f}" for key in ("goal", "stretch")]
        rows.append([goal["what"], value, *limits, goal["unit"], goal["met"]])
    return _markdown(["case", "value", "goal", "stretch", "", ""], rows)


TABLES = {"kernels": kernels_table, "gpu": goals_table}


def section(name: str, results: pathlib.Path = RESULTS) -> str:
    """Return the text for the docs between the markers of `name`: a table for each
    device.
    """
    parts = []
    for path in sorted(results.glob(f"*_{name}.json")):
        record = json.loads(path.read_text())
        parts += [_title(path.stem, record["environment"]), TABLES[name](record)]
    return "\n\n".join(parts) or NOT_MEASURED


def replaced(text: str, name: str, table: str) -> str:
    """Return `text` with another table between the markers of `name`."""
    begin, end = f"<!-- gpu: {name} -->", f"<!-- /gpu: {name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=pathlib.Path, metavar="FOLDER")
    for folder in parser.parse_args().folders:
        try:
            print(*keep(folder), sep="\n")
        except NoResult as reason:
            sys.exit(f"tables.py: {reason}")
    for name, page in PAGES.items():
        page.write_text(replaced(page.read_text(), name, section(name)))


if __name__ == "__main__":
    main()
