"""The counts that are committed, and the test that programs compiled now have them, for
modules with such a `GROUP`.
"""

import json
import pathlib

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "aot_h200.json").read_text())


def test_the_counts_are_those_of_the_programs(counts):
    if jax.__version__ != RESULTS["environment"]["jax"]:
        pytest.skip(
            f"counted with JAX {RESULTS['environment']['jax']}; XLA's part of a "
            "program differs"
        )
    keys = "launches kinds gemms fp8_gemms bytes copies reads collectives".split()
    keys.append("residual_bytes")
    for case in counts.keys() & RESULTS["cases"]:
        for name, row in counts[case].items():
            committed = RESULTS["cases"][case][name]
            assert [row[key] for key in keys] == [committed[key] for key in keys], (
                f"{case}, {name}"
            )
            # machine code that is not optimized may hold a little more
            temporary = pytest.approx(committed["temporary_bytes"], rel=0.05)
            assert row["temporary_bytes"] == temporary, f"{case}, {name}"
