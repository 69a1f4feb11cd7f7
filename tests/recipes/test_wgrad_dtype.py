"""`wgrad_dtype`: the kernel's gradient is rounded to that dtype in its product, and is
in the kernel's dtype all the same.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from equality import assert_same_bits
from oracle import BF16, F16, F32

import jaxfp8
import jaxfp8.nnx
from recipes import cases
from recipes.cases import RECIPES, SHAPES

# The product of each kind of scales, and one in high precision.
PRODUCTS = [*cases.KINDS, "static", "current | block | None"]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, dtype):
    """The oracle's product with that result; y and dx are those without the option."""
    (recipe, rule), shapes = RECIPES[name], SHAPES["7x5x3"]
    x, kernel, grad, _ = shapes.arrays()
    narrow = dataclasses.replace(recipe, wgrad_dtype=dtype)
    y, dx, dkernel, _ = cases.run(shapes, narrow, x, kernel, grad)
    wanted = cases.step(
        rule, x[None], kernel.T[None], grad[None], kernel_dtype=dtype
    ).dkernel
    rounded = np.asarray(dkernel).astype(dtype)
    wanted.check(rounded.T[None], name)
    if not name.endswith("None"):  # XLA may leave out a rounding in high precision
        oracle.assert_bitwise(dkernel, rounded.astype(F32), name)
    in_f32 = cases.run(shapes, recipe, x, kernel, grad)
    assert_same_bits((y, dx), in_f32[:2], name)
    assert not np.array_equal(dkernel, in_f32[2])


def test_wider_than_the_kernel():
    """A float32 product of a bfloat16 kernel is rounded afterwards: the same bits."""
    shapes, recipe = SHAPES["7x5x3"], jaxfp8.Float8CurrentScaling()
    shapes = dataclasses.replace(shapes, kernel_dtype=BF16)
    x, kernel, grad, _ = shapes.arrays()
    wide = dataclasses.replace(recipe, wgrad_dtype=F32)
    expected = cases.run(shapes, recipe, x, kernel, grad)
    assert_same_bits(cases.run(shapes, wide, x, kernel, grad), expected)


def test_equal_dtypes_are_equal_recipes():
    names = [jnp.bfloat16, "bfloat16", BF16]
    recipes = {jaxfp8.DelayedScaling(wgrad_dtype=name) for name in names}
    assert recipes == {jaxfp8.DelayedScaling(wgrad_dtype=BF16)}


def test_ragged_dot():
    x, kernel = np.ones((6, 5), F32) / 3, np.ones((2, 5, 3), F32) / 3
    grad = normal(6, 3)
    sizes = np.int32([4, 2])

    def gradient(wgrad_dtype):
        recipe = jaxfp8.Float8CurrentScaling(wgrad_dtype=wgrad_dtype)
        product = lambda k: jaxfp8.ragged_dot(x, k, sizes, recipe=recipe)  # noqa: E731
        return jax.vjp(product, kernel)[1](grad)[0]

    rounded = np.asarray(gradient(None)).astype(BF16).astype(F32)
    oracle.assert_bitwise(gradient(BF16), rounded, "ragged_dot")
