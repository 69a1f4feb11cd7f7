"""linen.Experts: values, gradients and state against a loop over experts in numpy, and
what else holds for a layer.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from flax.traverse_util import flatten_dict
from recipes.cases import RECIPES

import jaxfp8
from jaxfp8.linen import Experts
from jaxfp8.ops import ClampedSwiGLU, is_gated
from linen.expert_cases import (
    CHOSEN,
    COUNT,
    F32,
    HIDDEN,
    HISTORY,
    WIDTH,
    case,
    loop,
    next_states,
)

KEY = jax.random.key(0)

OWG, BF16 = jaxfp8.OVERWRITE_WITH_GRADIENT, oracle.BF16
RECIPE = jaxfp8.DelayedScaling(amax_history_len=HISTORY)
HIGH = jaxfp8.HighPrecision()
RELU = Experts(COUNT, HIDDEN, activation="relu", recipe=RECIPE)
GATED = Experts(COUNT, HIDDEN, recipe=RECIPE)


def variables_of(layer, c):
    """Variables of a layer before its first step, with the kernels of a case."""
    variables = layer.init(KEY, c.x, c.expert, c.weights)
    return variables | {"params": {"wi": {"kernel": c.wi}, "wo": {"kernel": c.wo}}}


def step(layer, c, wrap=lambda f: f):
    """One jitted step: the result and the gradients, by the names of `loop`, and the
    next state.
    """

    @jax.jit
    def run(variables, x, weights):
        def loss(variables, x, weights):
            y = wrap(layer.apply)(variables, x, c.expert, weights)
            return jnp.sum(y.astype(F32) * c.grad), y

        gradients, y = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(
            variables, x, weights
        )
        return y, *gradients

    dtype = np.dtype(F32) if layer.dtype is None else layer.dtype
    y, of_variables, dx, dweights = run(
        variables_of(layer, c), c.x.astype(dtype), c.weights
    )
    params = of_variables["params"]
    results = {"y": y, "x": dx, "weights": dweights}
    results |= {name: params[name]["kernel"] for name in ("wi", "wo")}
    return results, of_variables.get(OWG)


def compare_with_loop(name, recipe=RECIPE, dtype=None, wrap=lambda f: f):
    """Operands are exact in FP8 and bf16, and so are sums: all results are the loop's
    to the bit, but for the signs of zeros.
    """
    c = case(name)
    results, state = step(RELU.clone(recipe=recipe, dtype=dtype), c, wrap)
    for key, expected in loop(c).items():
        wanted = dtype if dtype is not None and key in ("y", "x") else F32
        assert results[key].dtype == wanted, key
        np.testing.assert_array_equal(results[key].astype(F32), expected, err_msg=key)
    if recipe == RECIPE:
        state = {name: tree["Fp8RaggedDot_0"] for name, tree in state.items()}
        assert_same_bits(state, next_states(c), "state")
    else:
        assert state is None


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_a_loop_over_experts(name, dtype):
    compare_with_loop(name, dtype=dtype)


def test_high_precision():
    compare_with_loop("no expert", HIGH, BF16)
    with jaxfp8.autocast(enabled=False):
        c = case("two")
        variables = RELU.init(KEY, c.x, c.expert, c.weights)
        assert OWG not in variables


def test_remat():
    compare_with_loop("two", wrap=jax.checkpoint)


def tokens(*leading, seed=0, dtype=F32, chosen=2):
    """Random x, experts (one of eight times none) and weights."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*leading, WIDTH)).astype(dtype)
    expert = rng.integers(0, COUNT, (*leading, chosen)).astype(np.int32)
    expert = np.where(rng.random(expert.shape) < 0.125, -1, expert)
    return x, expert, rng.random((*leading, chosen)).astype(F32)


def used_variables(layer, *args):
    """Variables with scales that are no powers of two."""
    variables = jax.jit(layer.init)(KEY, *args)
    rng = np.random.default_rng(1)
    draw = lambda leaf: rng.uniform(1, 2, leaf.shape).astype(F32)  # noqa: E731
    return {
        name: jax.tree.map(draw, tree) if name == OWG else tree
        for name, tree in variables.items()
    }


def state_of(variables, name):
    """The state of a product as the functions take it; None for a recipe without."""
    if OWG not in variables:
        return None
    leaves = variables[OWG][name]["Fp8RaggedDot_0"]
    return jaxfp8.DotGeneralState(
        *(
            jaxfp8.recipes.QuantizerState(
                leaves[f"{operand}_amax_history"], leaves[f"{operand}_scale"]
            )
            for operand in ("input", "kernel", "output_grad")
        )
    )


def written_out(layer, variables, x, expert, weights):
    """The layer by hand, as docs/experts.md has it for routes of one's own."""
    flat = expert.reshape(-1)
    order = np.argsort(np.where(flat < 0, COUNT, flat), stable=True)
    sizes = np.bincount(flat[flat >= 0], minlength=COUNT).astype(np.int32)
    rows = jnp.repeat(x.reshape(-1, WIDTH), expert.shape[-1], axis=0)[order]
    dtype = x.dtype if layer.dtype is None else layer.dtype

    def product(name, rows):
        return jaxfp8.ragged_dot(
            rows,
            variables["params"][name]["kernel"],
            sizes,
            recipe=layer.recipe,
            state=state_of(variables, name),
            preferred_element_type=dtype,
        )

    hidden = product("wi", rows)
    if is_gated(layer.activation):
        hidden = hidden.reshape(-1, 2, HIDDEN)
    results = product("wo", jaxfp8.activated(hidden, layer.activation))
    y = results[np.argsort(order)].reshape(*expert.shape, WIDTH).astype(F32)
    return jnp.sum(y * weights[..., None], axis=-2).astype(dtype)


@pytest.mark.parametrize("recipe, activation, dtype", [
    ("delayed", "silu_gated", F32), ("mx", "relu_squared", F32),
    ("block", ClampedSwiGLU(0.5, alpha=1.702, offset=1.0), BF16),
])  # fmt: skip
def test_is_made_of_the_functions(recipe, activation, dtype):
    """Whose numbers dot/ compares with the oracle; batches are tokens."""
    recipe = RECIPE if recipe == "delayed" else RECIPES[recipe][0]
    layer = GATED.clone(activation=activation, recipe=recipe, dtype=dtype)
    x, expert, weights = tokens(3, 5, dtype=dtype)
    variables = used_variables(layer, x, expert, weights)

    def loss(apply, variables, x, weights):
        y = apply(variables, x, expert, weights)
        return jnp.sum(jnp.sin(y.astype(F32))), y

    def gradients(apply):
        run = functools.partial(loss, apply)
        run = jax.grad(run, argnums=(0, 1, 2), has_aux=True)
        return jax.jit(run)(variables, x, weights)

    (of_variables, *rest), y = gradients(layer.apply)
    (expected, *expected_rest), expected_y = gradients(
        functools.partial(written_out, layer)
    )
    assert_same_bits((y, of_variables), (expected_y, expected), "layer")
    # The gradient of x adds those of the token's rows, and that of a weight the
    # products of WIDTH numbers, in an order that XLA chooses: a few roundings apart.
    for got, wanted in zip(rest, expected_rest, strict=True):
        wanted = np.asarray(wanted, np.float64)
        np.testing.assert_allclose(
            np.asarray(got, np.float64),
            wanted,
            rtol=0,
            atol=4 * float(jnp.finfo(got.dtype).eps) * np.abs(wanted).max(),
        )
    assert y.dtype == dtype


def test_leading_dimensions_and_vmap():
    args = tokens(2, 5)
    apply = functools.partial(GATED.apply, used_variables(GATED, *args))
    one = (arg[0, 0] for arg in args)
    none = (arg[:, :0] for arg in args)
    flat = (arg.reshape(10, -1) for arg in args)
    y, flat, one_by_one, one, none = jax.jit(
        lambda *all_of: (
            *(apply(*some) for some in all_of[:2]),
            jax.vmap(apply)(*all_of[0]),
            *(apply(*some) for some in all_of[2:]),
        )
    )(args, tuple(flat), tuple(one), tuple(none))
    assert_same_bits(y.reshape(10, -1), flat, "flat")
    assert_same_bits(one_by_one, y, "vmap")
    assert one.shape == (WIDTH,) and none.shape == (2, 0, WIDTH)


def test_names():
    """Those of checkpoints."""
    x, expert, weights = tokens(5)
    variables = jax.eval_shape(GATED.init, KEY, x, expert, weights)
    leaves = {
        name: leaf.shape for name, leaf in flatten_dict(variables, sep="/").items()
    }
    state = {"amax_history": (HISTORY,), "scale": (1,)}
    assert leaves == {
        "params/wi/kernel": (COUNT, WIDTH, 2 * HIDDEN),
        "params/wo/kernel": (COUNT, HIDDEN, WIDTH),
    } | {
        f"{OWG}/{product}/Fp8RaggedDot_0/{operand}_{part}": shape
        for product in ("wi", "wo")
        for operand in ("input", "kernel", "output_grad")
        for part, shape in state.items()
    }
    # the variance of one expert's fan-in
    init = jax.jit(GATED.clone(count=64, hidden_features=64).init)
    kernel = init(KEY, x, expert, weights)["params"]["wo"]["kernel"]
    np.testing.assert_allclose(np.std(kernel), 64**-0.5, rtol=0.05)


def test_rules_and_report():
    x, expert, weights = args = tokens(5)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Experts(COUNT, HIDDEN, name="experts")(x, expert, weights)

    model = jaxfp8.linen.quantize(Model(), [("experts/wi", None), (".*/wo", RECIPE)])
    rows = {row["layer"]: row for row in jaxfp8.report(model, x).rows}
    assert {path: row["recipe"] for path, row in rows.items()} == {
        "experts/wi": None,
        "experts/wo": RECIPE,
    }
    assert rows["experts/wo"]["input"] == (10, HIDDEN)
    assert rows["experts/wo"]["kernel"] == (COUNT, HIDDEN, WIDTH)
    variables = model.init(KEY, x)
    assert set(variables[OWG]["experts"]) == {"wo"}
    by_rule = jaxfp8.linen.quantize(Experts(COUNT, HIDDEN), [(".*", RECIPE)])
    variables = used_variables(by_rule, *args)
    assert_same_bits(
        by_rule.apply(variables, *args), GATED.apply(variables, *args), "rule"
    )


def test_freeze_and_quantize_params():
    """Codes in place of kernels give the same bits."""
    args = tokens(5)
    variables = used_variables(GATED, *args)
    y = GATED.apply(variables, *args)
    frozen = jaxfp8.freeze(GATED, variables, *args)
    assert OWG not in frozen
    assert_same_bits(GATED.apply(frozen, *args), y, "frozen")
    codes = jaxfp8.quantize_params(variables["params"], variables[OWG], RECIPE)
    assert isinstance(codes["wi"]["kernel"], jaxfp8.QTensor)
    assert_same_bits(GATED.apply(variables | {"params": codes}, *args), y, "codes")


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_freeze_without_state(recipe):
    layer = GATED.clone(recipe=RECIPES[recipe][0])
    args = tokens(5)
    variables = jax.jit(layer.init)(KEY, *args)
    frozen = jaxfp8.freeze(layer, variables, *args)
    assert_same_bits(
        layer.apply(frozen, *args), layer.apply(variables, *args), "frozen"
    )


@pytest.mark.parametrize("changed, error, message", [
    ({"expert": np.ones((5, 2), F32)}, TypeError, "Experts: expert: expected integers"),
    ({"expert": np.ones(5, np.int32)}, ValueError, r"expert\[..., None\]"),
    ({"expert": np.ones((4, 2), np.int32)}, ValueError, r"\[5, chosen\]"),
    ({"weights": np.ones((5, 1), F32)}, ValueError, r"weights: expected \[5, 2\]"),
    ({"weights": np.ones((5, 2), np.int32)}, TypeError, "Experts: weights"),
    ({"x": np.float32(1)}, ValueError, r"Experts: x: expected \[..., k\]"),
])  # fmt: skip
def test_bad_arguments(changed, error, message):
    args = dict(zip(("x", "expert", "weights"), tokens(5), strict=True)) | changed
    with pytest.raises(error, match=message):
        GATED.init(KEY, **args)


def test_bad_activation():
    with pytest.raises(ValueError, match='Experts: activation: expected one of "gelu"'):
        GATED.clone(activation="tanh").init(KEY, *tokens(5))
