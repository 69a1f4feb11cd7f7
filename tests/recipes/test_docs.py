"""docs/recipes.md: each recipe by a known name is one that a product runs with."""

import re

import jax
import jax.numpy as jnp
import pytest
import snippets
from draws import KEY

import jaxfp8
from recipes.cases import MATMUL

BY_NAME = re.findall(
    r"^\| [^|`]+.* \| `(\w+\(.*?\))` \| .* \|$",
    (snippets.ROOT / "docs" / "recipes.md")
    .read_text()
    .partition("## Recipes by the names")[2]
    .partition("\n## ")[0],
    re.MULTILINE,
)


def test_the_table_is_read():
    assert len(BY_NAME) == 8


@pytest.mark.parametrize("code", BY_NAME)
def test_a_recipe_by_its_name_runs(code):
    rows = jaxfp8.Float8RowwiseScaling(jaxfp8.Format.E4M3)
    recipe = eval(code, vars(jaxfp8) | {"rows": rows})
    state = jaxfp8.init_state(recipe)

    def product(x, kernel, state):
        y = jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)
        return jnp.sum(y)

    x = jax.random.normal(KEY, (32, 128))
    gradients = jax.grad(product, argnums=(0, 1, 2))(x, jnp.ones((128, 64)), state)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
