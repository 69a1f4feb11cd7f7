"""The tiers of tests: each value of a parameter runs in CI, beside what is slow."""

import pathlib

import pytest
import tiers


class Case:
    """A stand-in of a collected test with two parameters."""

    def __init__(self, page, runs, is_slow):
        self.name = f"test_programs[{page}-{runs}]"
        self.path = pathlib.Path("docs/test_pages.py")
        self.nodeid = f"docs/test_pages.py::{self.name}"
        self.callspec = type("", (), {"params": {"page": page, "runs": runs}})
        self.marks = {"slow"} if is_slow else set()

    def iter_markers(self, name):
        return [pytest.mark.parametrize(names, []).mark for names in ("page", "runs")]

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, name):
        self.marks.add(name)


@pytest.mark.parametrize("is_slow", [False, True])
def test_each_value_runs_in_ci(is_slow):
    """Where the second run is slow by itself, no page meets it on the diagonal."""
    pages, runs = ["a", "b", "c", "d"], [1, 2]
    cases = [Case(page, run, is_slow and run == 2) for page in pages for run in runs]
    tiers.mark(cases, pathlib.Path())
    in_ci = [case.callspec.params for case in cases if "slow" not in case.marks]
    assert [params["page"] for params in in_ci] == pages
    assert {params["runs"] for params in in_ci} == ({1} if is_slow else {1, 2})
