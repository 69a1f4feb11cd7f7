"""Docstrings for Sphinx: they are Markdown with Google's sections, and it reads
reStructuredText.
"""

import re

_SECTION = re.compile(
    r"(Args|Attributes|Returns|Yields|Raises|References|Example|Examples|Note):\s*$"
)
_CODE = re.compile(r"(`+)(?=\S)(.+?)(?<=\S)\1(\w?)", re.DOTALL)
# The names of *args and **kwargs in a section are napoleon's.
_SPECIAL = re.compile(r"^\s*\*{1,2}\w+:|[*|]|_\b", re.MULTILINE)


def to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Rewrites the lines of a docstring in place; a listener of Sphinx's
    `autodoc-process-docstring`.
    """
    paragraphs = re.split(r"\n[ ]*\n", "\n".join(lines))
    lines[:] = "\n\n".join(_paragraphs(paragraphs)).splitlines()


def _paragraphs(paragraphs):
    in_section = False
    for paragraph in paragraphs:
        first = paragraph.splitlines()[0] if paragraph else ""
        in_section = in_section and first.startswith(" ") or bool(_SECTION.match(first))
        if paragraph.lstrip().startswith("| "):
            yield "::\n\n" + re.sub("^", "    ", paragraph, flags=re.MULTILINE)
        elif first.startswith("    ") and not in_section:
            yield "::\n\n" + paragraph  # a program or a formula
        else:
            yield inline(paragraph)


def inline(paragraph: str) -> str:
    """Code in double backticks, and nothing else that reStructuredText would read."""
    found, last = [], 0
    for code in _CODE.finditer(paragraph):
        text = re.sub(r"\s*\n\s*", " ", code[2])
        found += [
            escaped(paragraph[last : code.start()]),
            f"``{text}``",
            f"\\ {code[3]}" if code[3] else "",
        ]
        last = code.end()
    return "".join([*found, escaped(paragraph[last:])])


def escaped(text: str) -> str:
    return _SPECIAL.sub(
        lambda found: found[0] if len(found[0]) > 1 else f"\\{found[0]}", text
    )
