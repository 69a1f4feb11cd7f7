"""docs/mixed_precision.md: its table of operations is that of the package."""

import re

import jax.numpy as jnp
import snippets

from jaxfp8 import mixed_precision

ROWS = re.findall(
    r"^\| .* \| (`compute_dtype`|float32|None).* \| (.*) \|$",
    (snippets.ROOT / "docs" / "mixed_precision.md").read_text(),
    re.MULTILINE,
)


def test_table_of_operations():
    policy = mixed_precision.Policy(compute_dtype="float16")
    dtypes = {
        "`compute_dtype`": jnp.dtype("float16"),
        "float32": jnp.dtype("float32"),
        "None": None,
    }
    assert len(ROWS) == 3
    for dtype, examples in ROWS:
        names = re.findall(r"`(\w+)`", examples)
        assert len(names) >= 5
        assert {policy.dtype_of(name) for name in names} == {dtypes[dtype]}
