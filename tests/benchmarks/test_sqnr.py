"""SQNR figures: what must hold between recipes, that they come out again, and that the docs have them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sqnr():
    sys.path.append(str(ROOT / "benchmarks"))
    import sqnr

    return sqnr


@pytest.fixture(scope="module")
def rows(sqnr):
    return json.loads(sqnr.RESULTS.read_text())["rows"]


@pytest.fixture
def figure(rows):
    by = {(row["format"], row["recipe"], row["tensor"]): row for row in rows}
    return lambda recipe, tensor, key="tensor_db", fmt="e4m3": by[fmt, recipe, tensor][key]


def test_the_docs_have_the_table(sqnr, rows):
    text = (ROOT / "docs" / "recipes.md").read_text()
    between = text.split("<!-- sqnr -->")[1].split("<!-- /sqnr -->")[0]
    assert between.strip() == sqnr.table(rows)


@pytest.mark.slow
def test_every_recipe_on_every_tensor(sqnr, rows):
    pairs = {(row["format"], row["recipe"], row["tensor"]) for row in rows}
    wanted = {(f, r, t) for f in sqnr.FORMATS for r in sqnr.recipes(sqnr.FORMATS[f]) for t in sqnr.tensors()}
    assert pairs == wanted and len(rows) == len(wanted)


@pytest.mark.slow
def test_measured_again(sqnr, rows):
    """Codes are the same everywhere, so are the figures; a product's last bits are not."""
    kept = [row for row in rows if row["format"] == "e4m3" and row["tensor"] in ("columns x10000", "constant")]
    again = sqnr.measure(("columns x10000", "constant"), ("e4m3",))
    assert len(again) == len(kept)
    for new, old in zip(again, kept, strict=True):
        assert {**new, "product_db": 0} == {**old, "product_db": 0}
        assert new["product_db"] == pytest.approx(old["product_db"], abs=0.11)


def test_definition(sqnr):
    """A tenth of the amplitude as noise is 20 dB; nothing lost is None."""
    x = np.float32([3, -4])
    assert sqnr.sqnr(x, x * np.float32(1.1)) == 20
    assert sqnr.sqnr(x, x) is None and sqnr.sqnr(x, 0 * x) == 0


@pytest.mark.parametrize("fmt, least", [("e4m3", 30), ("e5m2", 24)])
def test_ordinary_numbers(figure, fmt, least):
    """Three or two bits of mantissa: an error of at most 2**-4 or 2**-3 of an element, uniform in its binade.

    A number with m mantissa bits, in [1, 2), is off by at most d = 2**-(m + 1), with mean square d**2 / 3, and itself
    has a mean square of 7 / 3: 10 log10(7 / d**2) = 32.5 and 26.5 dB. A normal tensor's binades are not filled evenly.
    """
    for recipe in ("current", "row-wise", "block", "MXFP8, ceil", "delayed, history matches"):
        assert least < figure(recipe, "normal", fmt=fmt) < least + 4


def test_delayed(figure):
    """A history that matches is current scaling. Too large costs a normal tensor nothing, too small saturates."""
    for tensor in ("normal", "student t, 3", "columns x100", "gradient"):
        for key in ("tensor_db", "product_db"):
            exact = figure("current", tensor, key)
            assert figure("delayed, history matches", tensor, key) == exact
            assert figure("delayed, history 4x too small", tensor, key) < exact - 10
    assert abs(figure("delayed, history 4x too large", "normal") - figure("current", "normal")) < 0.5


def test_finer_scales(figure):
    """The finer, the more is left: of all by energy, where scales are not rounded; of small elements much more."""
    for tensor in ("student t, 3", "columns x100", "columns x10000", "gradient"):
        assert figure("current", tensor) < figure("row-wise", tensor) < figure("block", tensor)
    for tensor, margin in (("columns x10000", 10), ("gradient", 20)):
        one, row, block, mx = (
            figure(recipe, tensor, "small_db") for recipe in ("current", "row-wise", "block", "MXFP8, ceil")
        )
        assert one + margin < mx and one < row < block
        assert figure("block, power of 2", tensor, "small_db") < mx  # 32 instead of 128


def test_ceil_and_floor(figure):
    """Saturation costs more than half a bit of scale."""
    for tensor in ("normal", "student t, 3", "columns x100", "columns x10000", "gradient"):
        for key in ("tensor_db", "product_db"):
            assert figure("MXFP8, floor", tensor, key) < figure("MXFP8, ceil", tensor, key)


def test_formats(figure):
    """e4m3 has a bit more of mantissa, 6 dB; e5m2 more exponents, which small numbers need where there is one scale."""
    for recipe in ("current", "block", "MXFP8, ceil"):
        gain = figure(recipe, "normal") - figure(recipe, "normal", fmt="e5m2")
        assert gain == pytest.approx(6, abs=0.6)
    small = [figure("current", "gradient", "small_db", fmt) for fmt in ("e4m3", "e5m2")]
    assert small[0] < 5 < 20 < small[1]


def test_constants(figure):
    """A constant is one code, which scales by amax hit exactly."""
    for recipe in ("current", "row-wise", "block", "delayed, history matches"):
        assert figure(recipe, "constant") is None
    assert figure("MXFP8, ceil", "constant") < 40
