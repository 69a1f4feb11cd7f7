"""Intervals of paired differences: Student's t by its printed table, and what
`benchmarks/compare.py` prints.
"""

import math
import statistics

import _compare_report
import pytest
from _compare_runs import Run, interval, student_t, summarize

# Two-sided 95 %, as statistical tables print it: three decimals, so within half of the
# last one.
PRINTED = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    5: 2.571,
    7: 2.365,
    15: 2.131,
    30: 2.042,
    1000: 1.962,
}


@pytest.mark.parametrize("degrees", PRINTED)
def test_student_t(degrees):
    assert student_t(degrees) == pytest.approx(PRINTED[degrees], abs=0.0005)


def test_interval():
    differences = [0.004, 0.009, -0.001, 0.006]
    found = interval(differences)
    # the table's digits: half of 0.001 in 3.182
    half = PRINTED[3] * statistics.stdev(differences) / math.sqrt(4)
    assert found["mean"] == pytest.approx(statistics.fmean(differences))
    assert found["seeds"] == 4
    assert found["high"] - found["mean"] == pytest.approx(half, rel=0.0005 / 3.182)
    assert found["mean"] - found["low"] == pytest.approx(half, rel=0.0005 / 3.182)
    assert interval([0.004]) == {"mean": 0.004, "low": None, "high": None, "seeds": 1}


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_table_has_intervals_of_several_seeds(seeds):
    losses = {"bf16": (1.3, 1.4), "delayed": (1.301, 1.405)}
    runs = [
        {name: Run([9.0, 1.0], [4.0], [(2, losses[name][seed])]) for name in losses}
        for seed in range(seeds)
    ]
    results = summarize(runs)
    for row in results.values():
        row |= {"peak_bytes": 1, "kept_bytes": 1, "skipped": [0] * seeds}
    head, bf16, delayed = _compare_report.table(results).splitlines()
    assert ("95 %" in head) == (seeds == 2)
    if seeds == 2:  # a mean of 0.003, and 12.706 * 0.004 / sqrt(2) / sqrt(2) beside it
        assert "+0.0030" in delayed
        assert "-0.0224 to +0.0284" in delayed
        assert " to " not in bf16
