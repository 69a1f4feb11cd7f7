"""benchmarks/losses.md: its table is what the benchmark found. docs/recipes.md: each
recipe by a known name is one that a product runs with.
"""

import json
import re

import jax
import jax.numpy as jnp
import pytest
import snippets

import jaxfp8

BY_NAME = re.findall(
    r"^\| [^|`]+.* \| `(\w+\(.*?\))` \| .* \|$",
    (snippets.ROOT / "docs" / "recipes.md")
    .read_text()
    .partition("## Recipes by the names")[2]
    .partition("\n## ")[0],
    re.MULTILINE,
)
PAGE = "benchmarks/losses.md"


def test_table_is_the_record():
    """Each row of the table is in the record, and where ours is worse is in the
    table.
    """
    rows = json.loads(
        (snippets.ROOT / "benchmarks/results/custom_recipe.json").read_text()
    )["rows"]
    lines = [f"| {of(row)} |" for row in rows]
    text = (snippets.ROOT / PAGE).read_text().splitlines()
    table = [line for line in text if line.startswith("| ") and " dB |" in line]
    assert table and set(table) <= set(lines)
    assert {
        line for line, row in zip(lines, rows, strict=True) if row["better_by"] < 0
    } <= set(table)


def of(row) -> str:
    where = f"{row['tensors']}: {row['of']}, {row['figure']}"
    best = row["dB"][row["best_stock"]]
    better = f"{row['better_by']:+.1f} +- {row['confidence_95']:.1f} dB"
    return (
        f"{where} | {best:.1f} ({row['best_stock']}) | {row['dB']['rotated']:.1f} | "
        f"{better}"
    )


def test_the_names_are_read():
    assert len(BY_NAME) == 8 and len(set(BY_NAME)) == 8


@pytest.mark.parametrize("code", BY_NAME)
def test_a_recipe_by_its_name_runs(code):
    rows = jaxfp8.Float8RowwiseScaling(jaxfp8.Format.E4M3)
    recipe = eval(code, vars(jaxfp8) | {"rows": rows})
    dimensions, state = (((1,), (0,)), ((), ())), jaxfp8.init_state(recipe)

    def product(x, kernel, state):
        y = jaxfp8.dot_general(x, kernel, dimensions, recipe=recipe, state=state)
        return jnp.sum(y)

    x = jax.random.normal(jax.random.key(0), (32, 128))
    gradients = jax.grad(product, argnums=(0, 1, 2))(x, jnp.ones((128, 64)), state)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
