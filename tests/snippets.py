"""The Python of a page of docs: its blocks, run one after the other as one program."""

import pathlib
import re

import jax

ROOT = pathlib.Path(__file__).parents[1]
# What does not run says so, and why, where readers see it.
_BLOCK = re.compile(r"^(?P<excused>\*Not run here: [^*]+\*\n\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """README.md and every page under docs/."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


def has_program(page: str) -> bool:
    return bool(_BLOCK.search((ROOT / page).read_text()))


def run(page: str) -> dict:
    """Runs every block of a page, with JAX as a user has it; returns its names. Tracebacks say the line of the page."""
    path, names = ROOT / page, {"__name__": "docs"}
    text = path.read_text()
    found = list(_BLOCK.finditer(text))
    assert found, f"{page} has no Python"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in found:
            if not block["excused"]:
                before = text[: block.start("code")].count("\n")
                exec(compile("\n" * before + block["code"], path, "exec"), names)
    return names
