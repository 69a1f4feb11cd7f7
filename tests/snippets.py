"""The Python of a page of docs: its blocks, run one after the other as one program."""

import pathlib
import re

import jax

ROOT = pathlib.Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page: str) -> dict:
    """Runs every block of a page, with JAX as a user has it; returns its names. Tracebacks say the line of the page."""
    path, names = ROOT / page, {"__name__": "docs"}
    text = path.read_text()
    found = list(_BLOCK.finditer(text))
    assert found, f"{page} has no Python"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in found:
            before = text[: block.start(1)].count("\n")
            exec(compile("\n" * before + block[1], path, "exec"), names)
    return names
