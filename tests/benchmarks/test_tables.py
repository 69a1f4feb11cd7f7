"""Results of GPUs in the docs: the tables that are there, those of a made-up session,
and what is no result.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import tables  # noqa: E402


@pytest.mark.parametrize("name, page", tables.PAGES.items())
def test_the_docs_have_what_was_measured(name, page):
    text = page.read_text()
    assert tables.replaced(text, name, tables.section(name)) == text, (
        "python benchmarks/tables.py"
    )
