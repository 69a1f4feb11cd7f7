"""Results of GPUs in the docs."""

import pytest
import tables


@pytest.mark.parametrize("name, page", tables.PAGES.items())
def test_the_docs_have_what_was_measured(name, page):
    text = page.read_text()
    assert tables.replaced(text, name, tables.section(name)) == text, (
        "python benchmarks/tables.py"
    )
