"""SQNR figures: what must hold between recipes, that they come out again, and that the
docs have them.
"""

import json
from pathlib import Path

import pytest

NAME, ROOT = "sqnr", Path(__file__).parents[2]


def rows(program):
    return json.loads(program.RESULTS.read_text())["rows"]


def test_the_docs_have_the_table(program):
    text = (ROOT / "benchmarks" / "losses.md").read_text()
    between = text.split("<!-- sqnr -->")[1].split("<!-- /sqnr -->")[0]
    assert between.strip() == program.table(rows(program))


def test_measured_again(program):
    """Codes are the same everywhere, so are the figures; a product's last bits are
    not.
    """
    kept = [
        row
        for row in rows(program)
        if row["format"] == "e4m3" and row["tensor"] in ("columns x10000", "constant")
    ]
    again = program.measure(("columns x10000", "constant"), ("e4m3",))
    assert len(again) == len(kept)
    for new, old in zip(again, kept, strict=True):
        assert {**new, "product_db": 0} == {**old, "product_db": 0}
        assert new["product_db"] == pytest.approx(old["product_db"], abs=0.11)
