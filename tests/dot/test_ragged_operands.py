"""Operands of ragged_dot that are codes already, or become codes where they are
computed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from jax import lax
from lowering import cuda_text
from parametrize import each_row
from programs import cases as transforms
from programs.known_amax import used_state

import jaxfp8

from .ragged_cases import RECIPE, SIZES, WITHOUT, operands

DELAYED = transforms.RECIPE
STATE = transforms.pack(used_state())
RECIPES = {
    "delayed": (DELAYED, STATE),
    "delayed, no state": (DELAYED, WITHOUT),
    "current": (jaxfp8.Float8CurrentScaling(), WITHOUT),
    "block": (jaxfp8.Float8BlockScaling(), WITHOUT),
    "mx": (jaxfp8.MXFP8BlockScaling(), WITHOUT),
}
EXPERTS = np.int32(SIZES["rows beyond"])


def ragged_dot(lhs, rhs, recipe, state):
    return jaxfp8.ragged_dot(lhs, rhs, EXPERTS, recipe=recipe, state=state)


def quantized(rhs, recipe):
    return jaxfp8.quantize_params({"moe": {"up": rhs}}, None, recipe, where="moe/.*")[
        "moe"
    ]["up"]


def gradients(recipe, prepare, lhs, rhs, grad, state):
    """y, and the gradients of lhs, rhs and the state, with operands
    `prepare(lhs, rhs, state)`.
    """

    @jax.jit
    def step(lhs, rhs, state):
        y, vjp = jax.vjp(
            lambda *args: ragged_dot(*prepare(*args), recipe, args[2]), lhs, rhs, state
        )
        return y, vjp(grad)

    return step(lhs, rhs, state)


@each_row("recipe, state", RECIPES)
def test_quantized_experts(recipe, state):
    """Kernels that are quantized before the product give its bits, and so do their
    gradients and the state.
    """
    args = *operands(len(EXPERTS)), state
    expected = gradients(recipe, lambda lhs, rhs, state: (lhs, rhs), *args)

    def prepare(lhs, rhs, state):
        if state == WITHOUT:
            return lhs, quantized(rhs, recipe)
        return lhs, jaxfp8.quantize_params({"up": rhs}, {"up": state}, recipe)["up"]

    assert_same_bits(gradients(recipe, prepare, *args), expected, "y and gradients")


@pytest.mark.parametrize("name", ["current", "block"])
def test_codes_on_both_sides(name):
    """Sources get the gradients. A second layout that is missing is the transposed
    codes, where these are the same.
    """
    recipe, state = RECIPES[name]
    lhs, rhs, grad = operands(len(EXPERTS))
    lhs[sum(EXPERTS) :] = 0  # codes are taken as they are, and so is their amax
    expected = gradients(
        recipe, lambda lhs, rhs, state: (lhs, rhs), lhs, rhs, grad, state
    )

    def prepare(lhs, rhs, _):
        x, _ = recipe.quantizers()[0].quantize(lax.stop_gradient(lhs), None)
        x = dataclasses.replace(x, source=lhs)
        kernel = dataclasses.replace(
            quantized(rhs, recipe), data_t=None, scale_inv_t=None
        )
        return x if name == "block" else dataclasses.replace(x, data_t=None), kernel

    assert_same_bits(
        gradients(recipe, prepare, lhs, rhs, grad, state), expected, "y and gradients"
    )


def test_codes_are_not_decoded(cuda_custom_calls):
    """The forward multiplies the codes that it is given."""
    recipe = jaxfp8.Float8CurrentScaling()
    lhs, rhs, _ = operands(len(EXPERTS))
    x, _ = recipe.quantizers()[0].quantize(jnp.asarray(lhs), None)
    text = cuda_text(
        lambda x, rhs: ragged_dot(x, rhs, recipe, WITHOUT), x, quantized(rhs, recipe)
    )
    assert "custom_call @jaxfp8_ragged_matmul" in text
    assert "jaxfp8_quantize" not in text and "jaxfp8_dequantize" not in text


def test_codes_without_source():
    recipe = jaxfp8.Float8BlockScaling()
    lhs, rhs, _ = operands(len(EXPERTS))
    q = quantized(rhs, recipe)
    codes = dataclasses.replace(q, source=None)
    y = ragged_dot(lhs, codes, recipe, None)
    oracle.assert_bitwise(y, np.asarray(ragged_dot(lhs, q, recipe, None)), "y")
    jax.grad(lambda lhs: jnp.sum(ragged_dot(lhs, codes, recipe, None)))(lhs)
    with pytest.raises(
        TypeError, match="ragged_dot: rhs: a QTensor without its source has no gradient"
    ):
        jax.grad(lambda q: jnp.sum(ragged_dot(lhs, q, recipe, None)), allow_int=True)(
            codes
        )


def test_codes_that_do_not_fit():
    lhs, rhs, _ = operands(len(EXPERTS))
    int8 = jaxfp8.QTensor(np.int8(np.sign(lhs)), np.ones(1, np.float32))
    with pytest.raises(
        ValueError, match=r"ragged_dot: .*fprop: .*FP8 codes with one scale.*int8"
    ):
        ragged_dot(int8, rhs, RECIPE, WITHOUT)
    stock = jaxfp8.recipes.Float8CurrentScalingQuantizer
    own = type("Own", (stock,), {"qgemm": lambda *operands, **options: None})
    recipe = jaxfp8.CustomRecipe(lambda role: own(jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="ragged_dot: .*without a qgemm"):
        ragged_dot(lhs, rhs, recipe, WITHOUT)
    recipe = jaxfp8.MXFP8BlockScaling()
    one_layout = dataclasses.replace(
        quantized(rhs, recipe), data_t=None, scale_inv_t=None
    )
    with pytest.raises(
        ValueError,
        match=r"ragged_dot: rhs: a QTensor with a scale for each block of \(1, 32\)",
    ):
        ragged_dot(lhs, one_layout, recipe, None)


# ------------------------------------------------------------------------- fused inputs

FUSED = {
    "silu_gated": lambda x: jaxfp8.activated(x, "silu_gated"),
    "gelu": lambda x: jaxfp8.activated(x[:, 0], "gelu"),
    "rms": lambda x: jaxfp8.normalized(x[:, 0], jnp.full(x.shape[-1], 1.5), kind="rms"),
    "layer": lambda x: jaxfp8.normalized(
        x[:, 0], jnp.ones(x.shape[-1]), jnp.full(x.shape[-1], 9.0), kind="layer"
    ),
}


@each_row("fused", FUSED)
@pytest.mark.parametrize(
    "recipe", [DELAYED, jaxfp8.Float8BlockScaling()], ids=["delayed", "block"]
)
def test_fused_inputs(fused, recipe):
    """They are what their values are. Values differ by the rounding of float32 between
    two programs, so some codes may be their neighbours.
    """
    lhs, rhs, grad = operands(len(EXPERTS))
    x = np.stack([lhs, 0.5 * lhs[::-1]], axis=1)
    state = STATE if recipe is DELAYED else WITHOUT

    def step(use):
        def product(x, rhs, state):
            return ragged_dot(use(fused(x)), rhs, recipe, state)

        y, vjp = jax.vjp(product, x, rhs, state)
        return jax.tree.leaves((y, vjp(grad)))

    for got, wanted in zip(step(lambda h: h), step(lambda h: h.value), strict=True):
        assert np.linalg.norm(got - wanted) <= 2.0**-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
@pytest.mark.parametrize("kind", ["silu_gated", "rms", "layer"])
@pytest.mark.parametrize(
    "recipe",
    [DELAYED, dataclasses.replace(DELAYED, fp8_residuals=True)],
    ids=["", "residuals"],
)
def test_rows_beyond_the_last_group_reach_no_gradient_of_a_fused_input(
    recipe, kind, garbage
):
    """What they hold changes no bit: neither the scale of the residual, nor a sum over
    rows. They get zeros.
    """
    lhs, rhs, grad = operands(len(EXPERTS))
    inside = slice(0, sum(EXPERTS))
    scale = np.full(lhs.shape[-1], 1.5, np.float32)

    def product(x, scale, state):
        if kind == "silu_gated":
            fused = jaxfp8.activated(x, kind)
        else:
            fused = jaxfp8.normalized(
                x[:, 0], scale, None if kind == "rms" else 3 * scale, kind=kind
            )
        return ragged_dot(fused, rhs, recipe, state)

    def results(beyond):
        x = np.stack([lhs, 0.5 * lhs[::-1]], axis=1) * np.float32(1e-3)
        x[inside.stop :] = beyond
        y, vjp = jax.vjp(product, x, scale, STATE)
        return y, *vjp(grad)

    got = results(garbage)
    assert_same_bits(got, results(0))
    assert np.any(got[1][inside]) and not np.any(got[1][inside.stop :])


def test_strict_promotion_with_64_bits():
    lhs, rhs, _ = operands(len(EXPERTS))
    expected = ragged_dot(lhs, rhs, DELAYED, STATE)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert_same_bits(ragged_dot(lhs, rhs, DELAYED, STATE), expected)


def test_fused_input_is_quantized_where_it_is_computed(cuda_custom_calls):
    """Its values are not in the forward: nothing but codes is written."""
    _, rhs, _ = operands(len(EXPERTS))
    x = jnp.ones((90, 2, rhs.shape[1]), jnp.bfloat16)
    for name, op in (("silu_gated", "quantize_activation"), ("rms", "quantize_norm")):
        text = cuda_text(
            lambda x, name=name: ragged_dot(FUSED[name](x), rhs, DELAYED, STATE), x
        )
        assert f"custom_call @jaxfp8_{op}" in text
