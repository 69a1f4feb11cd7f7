"""Intervals of paired differences: Student's t by its printed table."""

import math
import statistics

import pytest
from _compare_runs import interval, student_t

# Two-sided 95 %, as statistical tables print it: three decimals, so within half of the
# last one.
PRINTED = {1: 12.706, 3: 3.182, 7: 2.365, 30: 2.042}


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
