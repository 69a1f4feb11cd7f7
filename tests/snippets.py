"""The Python of a page of docs: its blocks, or the cells of a notebook, run one after
the other as one program.
"""

import json
import pathlib
import re

from promotion import as_users_have_jax

ROOT = pathlib.Path(__file__).parents[1]
# A block that does not run has the reason in front of it, where readers see it.
_BLOCK = re.compile(
    r"^(?P<excused>\*Not run here: [^*]+\*\n\n)?```python\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


def pages() -> list[str]:
    """README.md and every page under docs/."""
    return ["README.md", *_in_docs("*.md")]


def notebooks() -> list[str]:
    return _in_docs("*.ipynb")


def _in_docs(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob(pattern))


def has_program(page: str) -> bool:
    return bool(_BLOCK.search(text_of(page)))


def text_of(page: str) -> str:
    """The Markdown of a page; of a notebook, its cells, with code between fences."""
    text = (ROOT / page).read_text()
    if not page.endswith(".ipynb"):
        return text
    fences = {"code": "```python\n{}\n```\n", "markdown": "{}\n"}
    cells = json.loads(text)["cells"]
    return "\n".join(
        fences[cell["cell_type"]].format("".join(cell["source"])) for cell in cells
    )


def run(page: str, names: dict | None = None) -> dict:
    """Runs every block of a page, with JAX as a user has it; returns its names.
    Tracebacks say the line of the page.

    Args:
        names: those of an earlier run, for a second one in the same process.
    """
    path = ROOT / page
    names = names or {"__name__": "docs"}
    text = text_of(page)
    found = list(_BLOCK.finditer(text))
    assert found, f"{page} has no Python"
    with as_users_have_jax():
        for block in found:
            if not block["excused"]:
                before = text[: block.start("code")].count("\n")
                exec(compile("\n" * before + block["code"], path, "exec"), names)
    return names
