"""docs/troubleshooting.md quotes the messages that the package has, and every warning
of it.
"""

import re
import sys

import pytest
import snippets

sys.path.insert(0, str(snippets.ROOT / "docs"))

import messages  # noqa: E402

SECTION = (
    (snippets.ROOT / "docs" / "troubleshooting.md")
    .read_text()
    .partition("## By error text")[2]
    .partition("\n## ")[0]
)
QUOTES = re.findall(r"^\| `(.+?)` \|", SECTION, re.MULTILINE)
MESSAGES = messages.messages()


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_of_the_package(quote):
    assert len(quote.split()) > 1 and any(quote in text for *_, text in MESSAGES)


def test_every_warning_is_quoted():
    warnings = [text for _, kind, text in MESSAGES if kind in messages.WARNINGS]
    assert len(QUOTES) > 30 and len(warnings) >= 5
    assert [
        text for text in warnings if not any(quote in text for quote in QUOTES)
    ] == []
