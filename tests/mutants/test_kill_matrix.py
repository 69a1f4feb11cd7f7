"""The kill matrix of a package of a few lines."""

import os
import subprocess
import sys

import pytest

from mutants import kill_matrix

PACKAGE = """\
'''A docstring is no mutant.'''
import os

OUTSIDE = 1 + 1


def larger(a: int = 3, b: float = 2.0):
    if a is b:
        raise ValueError("no" * 2)
    return a if a > b else b


def same(x):
    return x + 0 * x


def stop(condition):
    if condition:
        os._exit(0)


def never():
    return 5
"""
TESTS = """\
import pytest
from small import numbers


@pytest.mark.parametrize("b", [1, 2])
def test_larger(b):
    assert numbers.larger(0, b) == b


def test_same():
    assert numbers.same(2) == 2


def test_stop():
    assert numbers.stop(False) is None


def test_broken():
    assert False
"""
LARGER = {f"larger[{b}]" for b in (1, 2)}
KILLS = {
    "larger comparison 1": {"larger[1]", "larger[2]"},  # `is not`
    "larger true 1": LARGER,
    "larger false 1": set(),
    "larger return 1": LARGER,
    "larger true 2": LARGER,
    "larger false 2": set(),
    "larger comparison 2": set(),  # the larger of two that are equal
    "same return 1": {"same"},
    "same operator 1": set(),  # x - 0
    "same operator 2": set(),  # x + 0 / x
    "same constant 1": {"same"},
    "stop true 1": {"stop"},  # it dies
    "stop false 1": set(),
    "stop constant 1": None,  # no test runs this line
    "never return 1": None,
    "never constant 1": None,
}


def small_package(folder):
    for name, text in {
        "small/numbers.py": PACKAGE,
        "tests/test_small.py": TESTS,
    }.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With two parts; the second run reads what the first has found out."""
    folder = small_package(tmp_path_factory.mktemp("kill_matrix"))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, kill_matrix.__file__, "--package", "small", "tests"]
    for part in "12":
        options = ["--part", f"{part}/2", "--out", f"{part}.json"]
        subprocess.run(
            [*program, *options, "--baseline", "kept.json"],
            cwd=folder,
            env=environment,
            check=True,
        )
    return folder


def short(test):
    return test.removeprefix("tests/test_small.py::test_")


def test_who_kills_whom(folder, monkeypatch, capsys):
    whole = folder / "whole.json"
    parts = [str(folder / f"{part}.json") for part in "12"]
    monkeypatch.setattr(sys, "argv", ["", "--out", str(whole), "--merge", *parts])
    kill_matrix.main()
    matrix, printed = kill_matrix.load(whole), capsys.readouterr().out
    rows = {
        name.removeprefix("small/numbers.py "): row
        for name, row in matrix["mutants"].items()
    }
    kills = {
        name: {short(test) for test in row["fail"]}
        if row["fail"] + row["pass"]
        else None
        for name, row in rows.items()
    }
    assert kills == KILLS
    assert rows["larger comparison 2"]["at"] == "10:16"
    # a test that fails without a mutant is no witness
    assert {short(test) for test in matrix["tests"]} == LARGER | {"same", "stop"}
    assert "16 mutants: 7 killed, 6 survive\n3 that no test reaches\n" in printed
    assert "survives: small/numbers.py larger comparison 2, 10:16; 0 tests" in printed
    assert printed.count("could leave:") == 1  # one of test_larger's two cases
