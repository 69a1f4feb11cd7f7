"""`benchmarks/aot.py` as a user runs it, for the group with every kind of case; what it counts is in `tests/aot`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from aot import compiler

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_prints_tables_and_writes_json(tmp_path):
    if reason := compiler.missing():
        pytest.skip(reason)
    path = tmp_path / "counts.json"
    call = [sys.executable, ROOT / "benchmarks" / "aot.py", "--groups", "recipes", "--json", path]
    done = subprocess.run(call, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    cases = json.loads(path.read_text())["cases"]
    assert list(cases) == ["dense by recipe", "on eight devices"]
    for name, candidates in cases.items():
        lines = done.stdout.split(f"**{name}**")[1].split("**")[0].split("\n")
        rows = {
            cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in lines) if cells
        }
        for candidate, found in candidates.items():
            assert rows[candidate][0] == str(found["launches"]), name
            assert rows[candidate][1] == f"{found['fp8_gemms']} of {found['gemms']}", name
            assert (rows[candidate][8] == "-") == ("bf16" not in candidates), "compilation, in units of bf16's"
