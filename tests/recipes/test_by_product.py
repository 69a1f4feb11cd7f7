"""ByProduct: the state of each quantizer, codes that products share, layers, codes made
outside, and errors.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY, normal
from equality import assert_same_bits
from flax import nnx
from oracle import E4M3, E5M2, F32, assert_bitwise
from parametrize import each_row

import jaxfp8
from jaxfp8.recipes import HighPrecisionQuantizer, SharedCodes
from recipes import cases
from recipes.cases import CURRENT, PLAIN
from recipes.delayed_cases import training_step

DELAYED = jaxfp8.DelayedScaling(amax_history_len=3)
SHORT = jaxfp8.DelayedScaling(1, 2, "most_recent")
SHAPES = cases.dense(5, 36, 4)
STATE = "_overwrite_with_gradient"


def run(recipe, arrays, state=None):
    """y, dx, dkernel and the next state, by one program of a recipe."""
    state = jaxfp8.init_state(recipe) if state is None else state
    return training_step(recipe)(*arrays[:3], state)


def test_each_product_has_the_quantizers_of_its_recipe():
    """Also for its result; of two equal ones the second has the codes of the first."""
    e5m2 = jaxfp8.recipes.Float8CurrentScalingQuantizer(jnp.float8_e5m2)
    results = ("linear_output", "linear_grad_input")
    custom = jaxfp8.CustomRecipe(lambda role: e5m2 if role in results else None)
    got = jaxfp8.ByProduct(custom, DELAYED, SHORT).quantizers()
    kept = HighPrecisionQuantizer()
    shared = SharedCodes()
    delayed = DELAYED.quantizers()
    assert got.input == got.kernel == kept and got.output == e5m2
    assert got.dgrad_kernel == delayed.kernel and got.input_grad == kept
    assert got.output_grad == delayed.output_grad
    assert got.wgrad_input == SHORT.quantizers().input
    assert got.wgrad_output_grad == SHORT.quantizers().output_grad
    assert delayed[5:] == (shared,) * 3
    two = jaxfp8.ByProduct(DELAYED, None, DELAYED).quantizers()
    assert two[5:] == (shared, kept, delayed.output_grad)


def test_two_histories_of_one_operand():
    """Where the products of x, and those of grad, have other quantizers; both of the
    kernel's have equal ones.
    """
    recipe = jaxfp8.ByProduct(
        DELAYED,
        jaxfp8.DelayedScaling(amax_history_len=3, fp8_format=jaxfp8.Format.E4M3),
        SHORT,
    )
    state = jaxfp8.init_state(recipe)
    assert [name for name, value in vars(state).items() if value is not None] == [
        "input",
        "kernel",
        "output_grad",
        "wgrad_input",
        "wgrad_output_grad",
    ]
    arrays = [SHAPES.arrays(seed) for seed in (0, 1)]
    states = [state]
    for values in arrays:
        *results, new = run(recipe, values, states[-1])
        states.append(jaxfp8.update_state(states[-1], new))
    # The second step has the scales of the first one's amaxes; that of wgrad has a
    # margin of 1.
    amaxes = [[oracle.amax(a) for a in values[:3]] for values in arrays]
    bounds = amaxes[0]
    rules = [dict(bounds=bounds, backward=fmt) for fmt in (E5M2, E4M3)]
    twice = cases.Rule(bounds=tuple(2 * bound for bound in bounds))
    rule = cases.ByProduct(cases.Rule(**rules[0]), cases.Rule(**rules[1]), twice)
    SHAPES.check(SHAPES.expected(rule, *arrays[1][:3]), *results)
    recorded = [
        state.amax_history[0]
        for state in jax.tree.leaves(
            states[-1], is_leaf=lambda s: isinstance(s, jaxfp8.recipes.QuantizerState)
        )
    ]
    x, kernel, grad = amaxes[1]
    assert recorded == [x, kernel, grad, x, grad]


@pytest.mark.parametrize(
    "recipe",
    [DELAYED, jaxfp8.MXFP8BlockScaling(), jaxfp8.StaticScaling(2.0, 3.0)],
    ids=lambda r: type(r).__name__,
)
def test_three_equal_recipes_are_that_recipe(recipe):
    """To the bit, and with the same ops: equal quantizers share their codes."""
    arrays, by_product = SHAPES.arrays(), jaxfp8.ByProduct(recipe, recipe, recipe)
    assert_same_bits(run(by_product, arrays)[:3], run(recipe, arrays)[:3], "results")
    texts = [
        str(jax.make_jaxpr(lambda *a, r=r: run(r, (*a, None)))(*arrays[:3]))
        for r in (recipe, by_product)
    ]
    assert texts[0].count("quantize") == texts[1].count("quantize")


def test_only_what_is_differentiated_is_quantized_again():
    """A frozen kernel needs no x for wgrad: its history stays empty."""
    recipe = jaxfp8.ByProduct(DELAYED, None, SHORT)
    x, kernel, grad, _ = SHAPES.arrays()

    def product(x, state):
        return jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe, state=state)

    y, vjp = jax.vjp(product, x, jaxfp8.init_state(recipe))
    dx, new = vjp(grad)
    assert new.input.amax_history[0] == oracle.amax(x) and not np.any(
        new.wgrad_input.amax_history
    )
    assert new.output_grad is None and not np.any(new.wgrad_output_grad.amax_history)
    np.testing.assert_allclose(dx, grad @ kernel.T, rtol=1e-5, atol=1e-5)


def test_bias_and_activation():
    """The bias's gradient is a sum of unquantized gradients; a fused activation is
    computed where products differ.
    """
    x, kernel, grad, _ = SHAPES.arrays()
    bias = np.linspace(-1, 1, 4, dtype=F32)

    def loss(recipe, x, kernel, bias):
        h = jaxfp8.dot_general(
            x, kernel, cases.MATMUL, recipe=recipe, bias=bias, activation="silu"
        )
        y = jaxfp8.dot_general(h, kernel.T, cases.MATMUL, recipe=recipe)
        return jnp.sum(y**2)

    recipe = jaxfp8.Float8CurrentScaling()
    gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    exact = gradient(None, x, kernel, bias)
    for names in ((recipe, recipe, None), (None, None, recipe)):
        got = gradient(jaxfp8.ByProduct(*names), x, kernel, bias)
        for name, a, b in zip(("x", "kernel", "bias"), got, exact, strict=True):
            assert jnp.linalg.norm(a - b) < 0.1 * jnp.linalg.norm(b), (name, names)


def test_products_in_bfloat16():
    """None multiplies in the layer's dtype, also where the kernel is float32, and
    accumulates in float32.
    """
    recipe = jaxfp8.ByProduct(jaxfp8.Float8CurrentScaling(), None, None)
    x, kernel = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 4), jnp.float32)
    model = jaxfp8.linen.Dense(4, recipe=recipe, use_bias=False, dtype=jnp.bfloat16)
    text = jax.jit(
        jax.grad(lambda *args: jnp.sum(model.apply(*args)), argnums=(0, 1))
    ).lower({"params": {"kernel": kernel}}, x)
    types = re.findall(r"stablehlo.dot_general .* : (.*)", text.as_text())
    dots = sorted(tuple(re.findall(r"x(b?f\d+)>", each)) for each in types)
    assert dots == [("bf16", "bf16", "bf16"), ("bf16", "bf16", "f32")]


def test_layers():
    """Of Linen and NNX: state where a quantizer keeps it, under its own name."""
    recipe, x = jaxfp8.ByProduct(DELAYED, None, SHORT), jnp.ones((8, 16))
    names = {"input", "kernel", "wgrad_input", "wgrad_output_grad"}
    wanted = {f"{name}_{leaf}" for name in names for leaf in ("amax_history", "scale")}
    layer = nn.Dense(4, dot_general_cls=jaxfp8.make_dot_general_cls(recipe))
    variables = layer.init(KEY, x)
    assert set(variables[STATE]["Fp8DotGeneral_0"]) == wanted
    grads = jaxfp8.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(variables)
    new = jaxfp8.update_state(variables, grads)[STATE]["Fp8DotGeneral_0"]
    assert all(new[f"{name}_amax_history"][0] > 0 for name in names)
    module = nnx.Linear(
        16, 4, dot_general=jaxfp8.nnx.Fp8DotGeneral(recipe), rngs=nnx.Rngs(0)
    )
    module(x)
    state = nnx.to_pure_dict(nnx.state(module, jaxfp8.nnx.OverwriteWithGradient))
    assert set(state["dot_general"]) == wanted


def test_kernels_that_are_quantized_before():
    """`quantize_params` makes the codes of fprop; dgrad quantizes the kernel itself
    where its recipe is another.
    """
    for names, rules in (
        ((jaxfp8.Float8CurrentScaling(), None, None), (CURRENT, PLAIN, PLAIN)),
        (
            (jaxfp8.Float8CurrentScaling(), jaxfp8.Float8BlockScaling(), None),
            (CURRENT, cases.BLOCK, PLAIN),
        ),
    ):
        recipe, (x, kernel, grad, _) = jaxfp8.ByProduct(*names), SHAPES.arrays()

        def product(x, kernel, recipe=recipe):
            codes = jaxfp8.quantize_params(
                {"kernel": kernel}, None, recipe, where="kernel"
            )["kernel"]
            return jaxfp8.dot_general(x, codes, cases.MATMUL, recipe=recipe)

        y, vjp = jax.vjp(product, x, kernel)
        SHAPES.check(
            SHAPES.expected(cases.ByProduct(*rules), x, kernel, grad), y, *vjp(grad)
        )


@pytest.mark.parametrize("role", ["linear_input", "linear_weight"])
def test_a_ragged_product_of_codes_and_numbers(role):
    """One operand alone is FP8: all three products are those of its dequantized codes,
    in float32.
    """
    rng, sizes = np.random.default_rng(0), np.int32([5, 7])
    lhs, rhs, grad = (
        rng.uniform(-1, 1, shape).astype(F32) for shape in ((12, 6), (2, 6, 5), (12, 5))
    )
    lhs[0, 0] = rhs[0, 0, 0] = 1.75  # the amax, of which the scale is 448 / 1.75 = 2**8
    quantizer = jaxfp8.recipes.Float8CurrentScalingQuantizer(jnp.float8_e4m3fn)
    recipe = jaxfp8.CustomRecipe(lambda asked: quantizer if asked == role else None)

    def rounded(x):
        return oracle.widen(oracle.quantize(x, F32(2**8), E4M3)[0]) / F32(2**8)

    def results(recipe, *operands):
        y, vjp = jax.vjp(
            lambda *both: jaxfp8.ragged_dot(*both, sizes, recipe=recipe), *operands
        )
        return y, *vjp(grad)

    exact = (rounded(lhs), rhs) if role == "linear_input" else (lhs, rounded(rhs))
    # Sums of at most 12 products below 2: 2 * 12 * 2**-24 * 12 * 2.
    for got, wanted in zip(
        results(recipe, lhs, rhs), results(None, *exact), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-5)


@pytest.mark.parametrize("plain", ("fprop", "dgrad", "wgrad"))
def test_negative_group_sizes(plain):
    """All products read the rows of sizes with 0 in place of a negative size, whichever
    stays in high precision.
    """
    recipe = jaxfp8.ByProduct(
        **(
            dict.fromkeys(("fprop", "dgrad", "wgrad"), jaxfp8.Float8CurrentScaling())
            | {plain: None}
        )
    )
    lhs, rhs, grad = (normal(*shape) for shape in ((12, 6), (3, 6, 5), (12, 5)))

    def results(*sizes):
        y, vjp = jax.vjp(
            lambda *x: jaxfp8.ragged_dot(*x, np.int32(sizes), recipe=recipe), lhs, rhs
        )
        return [y, *vjp(grad)]

    for got, expected in zip(results(5, -3, 6), results(5, 0, 6), strict=True):
        assert_bitwise(np.asarray(got), np.asarray(expected), plain)


def test_ragged_products_in_high_precision_under_vmap():
    current, sizes = jaxfp8.Float8CurrentScaling(), np.int32([[5, 7], [8, 4], [0, 12]])
    weights = np.linspace(-1, 1, 60, dtype=F32).reshape(12, 5)
    lhs, rhs = (normal(*shape) for shape in ((3, 12, 6), (2, 6, 5)))

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(lhs, rhs, sizes):
        recipe = jaxfp8.ByProduct(current, current, None)
        return jnp.sum(jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=recipe) * weights)

    for got, each in zip(
        jax.vmap(gradients, (0, None, 0))(lhs, rhs, sizes),
        zip(*map(gradients, lhs, [rhs] * 3, sizes), strict=True),
        strict=True,
    ):
        # Sums of at most 12 terms below 4 in float32, in two orders: 2 * 12 * 2**-24 *
        # 12 * 4.
        np.testing.assert_allclose(got, np.stack(each), rtol=0, atol=1e-4)


WRONG = {
    "nothing": (
        (),
        ValueError,
        r"ByProduct: expected a recipe with FP8 .*got None or .*recipe "
        r"HighPrecision\(\)",
    ),
    "high precision": (
        (None, jaxfp8.HighPrecision()),
        ValueError,
        "ByProduct: expected a recipe with FP8",
    ),
    "string": (
        ("mx",),
        TypeError,
        r"ByProduct: fprop .*: expected a recipe, .*got 'mx'",
    ),
    "class": (
        (None, jaxfp8.MXFP8BlockScaling),
        TypeError,
        "ByProduct: dgrad .*call the class",
    ),
    "nested": (
        (None, None, jaxfp8.ByProduct(DELAYED)),
        TypeError,
        "ByProduct: wgrad: expected the recipe of one product",
    ),
    "min_size": (
        (jaxfp8.DelayedScaling(min_size=64),),
        ValueError,
        "ByProduct: fprop: .*got 64; give min_size= to ByP",
    ),
    "precise": (
        (None, jaxfp8.DelayedScaling(precise=())),
        ValueError,
        r"ByProduct: dgrad: .*got \(\); give precise=",
    ),
}


@each_row("recipes, error, message", WRONG)
def test_errors(recipes, error, message):
    with pytest.raises(error, match=message):
        jaxfp8.ByProduct(*recipes)


def test_state_of_another_recipe():
    """A product that reads the codes of the first one keeps no history."""
    recipe = jaxfp8.ByProduct(DELAYED, DELAYED, DELAYED)
    state = jaxfp8.DotGeneralState(
        *[jaxfp8.init_state(DELAYED).input] * 3,
        wgrad_input=jaxfp8.init_state(DELAYED).input,
    )
    with pytest.raises(
        TypeError, match="dot_general: state.wgrad_input: .* of shapes None, got"
    ):
        run(recipe, SHAPES.arrays(), state)
