"""`fp8_residuals`: the inputs of activations and norms are kept as e4m3 codes with a
power of two as their scale.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.count import residual_bytes
from equality import assert_same_bits
from parametrize import each_row

import jaxfp8
from jaxfp8.dot import _fused_input
from jaxfp8.recipes import as_codes

ROWS, WIDTH, HIDDEN = 32, 16, 48


class ReluMLP(nn.Module):
    """A derivative without arithmetic, which XLA would round in another way beside that
    of a dequantized input.
    """

    recipe: jaxfp8.DelayedScaling

    @nn.compact
    def __call__(self, x):
        hidden = jaxfp8.linen.Dense(HIDDEN, recipe=self.recipe, use_bias=False)(
            x, activation="relu"
        )
        return jaxfp8.linen.Dense(WIDTH, recipe=self.recipe, use_bias=False)(hidden)


LAYERS = {
    "gated mlp": lambda recipe: jaxfp8.linen.GatedMLP(
        HIDDEN, recipe=recipe, use_bias=False
    ),
    "norm": lambda recipe: jaxfp8.linen.NormDense(
        HIDDEN, recipe=recipe, use_bias=False
    ),
}


def results(layer, x, **options):
    """y and all gradients of a layer, scales being those of the tensors."""
    layer = layer(jaxfp8.DelayedScaling(first_step="current", **options))
    variables = layer.init(jax.random.key(0), x)
    kernels = jax.tree.map(lambda leaf: jnp.sign(leaf), variables["params"])
    variables = {**variables, "params": kernels}
    y, vjp = jax.vjp(jax.jit(layer.apply), variables, x)
    return y, vjp(jax.random.normal(jax.random.key(1), y.shape, y.dtype))


@pytest.mark.parametrize("layer", [ReluMLP, LAYERS["norm"]], ids=["mlp", "norm"])
def test_what_e4m3_holds_is_kept_exactly(layer):
    """x of one element a row and kernels of signs make products that are e4m3 numbers:
    all bits are those without.
    """
    x = jnp.float32(
        np.where(np.arange(ROWS)[:, None] % WIDTH == np.arange(WIDTH), 3, 0)
    )
    assert_same_bits(results(layer, x, fp8_residuals=True), results(layer, x))


@each_row("layer", LAYERS)
def test_only_gradients_differ_and_by_little(layer):
    """e4m3 rounds by at most 2**-4 of an element: of the factor that multiplies the
    gradient, and of what the derivative of silu or the norm is taken at, which passes
    on no more. So 2**-3 in all.
    """
    x = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))
    y, gradients = results(layer, x, fp8_residuals=True)
    expected_y, expected = results(layer, x)
    assert_same_bits(y, expected_y)
    (variables, dx), (expected_variables, expected_dx) = gradients, expected
    error = np.linalg.norm(dx - expected_dx) / np.linalg.norm(expected_dx)
    assert 0 < error < 2**-3
    for got, kernel in zip(
        jax.tree.leaves(variables["params"]),
        jax.tree.leaves(expected_variables["params"]),
        strict=True,
    ):
        assert np.linalg.norm(got - kernel) <= 2**-3 * np.linalg.norm(kernel)


def test_scale_is_a_power_of_two_of_the_tensor():
    x = jax.random.normal(jax.random.key(3), (ROWS, WIDTH)) * 1e-6
    q = as_codes(_fused_input.compressed(x))
    amax = np.max(np.abs(x))
    assert np.log2(q.scale_inv[0]) % 1 == 0
    assert 224 < amax / q.scale_inv[0] <= 448
    codes = np.asarray(np.float32(x) / q.scale_inv[0]).astype(jaxfp8.Format.E4M3.dtype)
    assert_same_bits(q.data, jnp.asarray(codes))


def test_a_byte_an_element_is_kept():
    """Of gate and up `[ROWS, 2, HIDDEN]`, in float32 here."""
    x = jnp.ones((ROWS, WIDTH))
    kept = {}
    for is_fp8 in (False, True):
        layer = LAYERS["gated mlp"](jaxfp8.DelayedScaling(fp8_residuals=is_fp8))
        kept[is_fp8] = residual_bytes(layer.apply, layer.init(jax.random.key(0), x), x)
    assert kept[False] - kept[True] == 3 * ROWS * 2 * HIDDEN - 4  # and a scale
