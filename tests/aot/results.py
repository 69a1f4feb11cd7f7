"""The counts that are committed, and the test that programs compiled now have them, for
modules with such a `GROUP`.
"""

import json
import pathlib

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "aot_h200.json").read_text())


def ours(counts, case) -> dict:
    """The counts of a case by candidate, without its peers."""
    return {
        name: found
        for name, found in counts[case].items()
        if name not in ("bf16", "flax")
    }


def test_the_counts_are_those_of_the_programs(counts):
    if jax.__version__ != RESULTS["environment"]["jax"]:
        pytest.skip(
            f"counted with JAX {RESULTS['environment']['jax']}; XLA's part of a "
            "program differs"
        )
    keys = ("launches", "gemms", "fp8_gemms", "bytes", "copies")
    for case, rows in counts.items():
        for name, row in rows.items():
            committed = RESULTS["cases"][case][name]
            assert [row[key] for key in keys] == [committed[key] for key in keys], (
                f"{case}, {name}"
            )
