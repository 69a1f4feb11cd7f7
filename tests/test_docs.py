"""The Python of README.md and of pages under docs/ runs as it is printed.

Pages whose programs and tables are looked at more closely have their tests where their subject has: mixed_precision.md,
custom_recipes.md, xla.md.
"""

import pytest
import snippets


@pytest.mark.parametrize("page", ["README.md", "docs/rules.md"])
def test_programs(page):
    snippets.run(page)
