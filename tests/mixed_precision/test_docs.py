"""docs/mixed_precision.md: its table of operations is that of the package."""

import re

import jax.numpy as jnp
import snippets

from jaxfp8 import mixed_precision

TEXT = (snippets.ROOT / "docs" / "mixed_precision.md").read_text()


def rows_below(header) -> list[list[str]]:
    lines = TEXT[TEXT.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table_of_operations():
    policy = mixed_precision.Policy.parse("p=f32,c=f16")
    dtypes = {
        "`compute_dtype`": jnp.dtype("float16"),
        "float32": jnp.dtype("float32"),
        "None": None,
    }
    rows = rows_below("| operations | dtype |")
    assert len(rows) == 3
    for _, dtype, examples in rows:
        names = re.findall(r"`(\w+)`", examples)
        assert len(names) >= 5
        assert {policy.dtype_of(name) for name in names} == {
            dtypes[dtype.split(":")[0]]
        }
