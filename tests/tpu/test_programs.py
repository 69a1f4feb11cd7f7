"""A Dense on eight TPUs beside Flax's in one run, and the page that quotes the counts that are committed."""

import json
import pathlib

import pytest

from . import compiler

ROOT = pathlib.Path(__file__).parents[2]
DENSE = json.loads((ROOT / "benchmarks" / "results" / "tpu_v7.json").read_text())["cases"]["dense"]


@pytest.fixture(scope="module")
def rows():
    if reason := compiler.missing():
        pytest.skip(reason)
    return json.loads(compiler.run("programs", "dp-8", "--size", "1024", "--candidates", "flax", "drop-in"))["dp-8"]


def test_products_are_of_codes(rows):
    assert rows["drop-in"]["products"] == {"f8e4m3fn x f8e4m3fn": 1, "f8e4m3fn x f8e5m2": 2}


def test_a_drop_in_takes_no_more_cycles_than_flax(rows):
    assert 0 < rows["drop-in"]["cycles"] <= 1.02 * rows["flax"]["cycles"]


def test_devices_move_the_bytes_that_flax_moves(rows):
    assert rows["drop-in"]["collectives"] == rows["flax"]["collectives"]
    assert rows["drop-in"]["collectives"]["all-reduce bf16"]["bytes"] == 2 * 1024**2


def test_compilation_is_no_trap(rows):
    assert rows["drop-in"]["compile_seconds"] <= 4 * rows["flax"]["compile_seconds"] + 20


@pytest.mark.parametrize("name", DENSE)
def test_the_page_has_the_counts(name):
    ratio = DENSE[name]["cycles"] / DENSE["flax"]["cycles"]
    line = f"| {name} | {DENSE[name]['cycles'] / 1000:.0f} | {ratio:.2f} |"
    assert line in (ROOT / "docs" / "tpu.md").read_text()
