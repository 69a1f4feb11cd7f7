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
from draws import KEY
from equality import assert_same_bits
from flax.traverse_util import flatten_dict
from recipes.cases import RECIPES

import jaxfp8
from jaxfp8.linen import Experts
from jaxfp8.ops import ClampedSwiGLU
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


@pytest.mark.parametrize("recipe, activation, formula", [
    (RECIPE, "silu_gated", lambda gate, up: nn.silu(gate) * up),
    (RECIPES["block"][0], ClampedSwiGLU(7.0, alpha=1.0, offset=1.0),
     lambda gate, up: nn.silu(gate) * (up + 1)),
])  # fmt: skip
def test_gated_activations(recipe, activation, formula):
    """Gate and up lie side by side in the kernels.

    In the root mean square rounding costs 2**-4 / sqrt(3) in e4m3 and 2**-3 / sqrt(3)
    in e5m2 at most, and a gradient of x has both twice: 0.114 < 2**-3.
    """
    layer = Experts(1, HIDDEN, activation=activation, recipe=recipe)
    x, *_ = tokens(9)
    routes = np.zeros((9, 1), np.int32), np.ones((9, 1), F32)
    params = layer.init(KEY, x, *routes)["params"]

    def in_fp8(params, x):
        return layer.apply({"params": params}, x, *routes)

    def by_formula(params, x):
        gate, up = jnp.split(x @ params["wi"]["kernel"][0], 2, axis=-1)
        return formula(gate, up) @ params["wo"]["kernel"][0]

    def results(apply):
        y, vjp = jax.vjp(apply, params, x)
        return y, vjp(x)

    leaves = map(jax.tree.leaves, map(results, (in_fp8, by_formula)))
    for got, wanted in zip(*leaves, strict=True):
        assert np.linalg.norm(got - wanted) <= 2.0**-3 * np.linalg.norm(wanted)


def test_leading_dimensions_and_vmap():
    args = tokens(2, 5)
    apply = functools.partial(GATED.apply, used_variables(GATED, *args))
    flat = [arg.reshape(10, -1) for arg in args]
    y = jax.jit(apply)(*args)
    assert_same_bits(y.reshape(10, -1), jax.jit(apply)(*flat), "flat")
    assert_same_bits(jax.jit(jax.vmap(apply))(*args), y, "vmap")
    one = [arg[0, 0] for arg in args]
    none = [arg[:, :0] for arg in args]
    assert jax.eval_shape(apply, *one).shape == (WIDTH,)
    assert jax.eval_shape(apply, *none).shape == (2, 0, WIDTH)


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
    args = tokens(5)
    rules = [("layers_0/wi", None), (".*/wo", RECIPE)]
    model = jaxfp8.quantize(nn.Sequential([Experts(COUNT, HIDDEN)]), rules)
    rows = {row["layer"]: row for row in jaxfp8.report(model, *args).rows}
    wi, wo = (rows[f"layers_0/{name}"] for name in ("wi", "wo"))
    assert (wi["recipe"], wo["recipe"]) == (None, RECIPE) and len(rows) == 2
    assert (wo["input"], wo["kernel"]) == ((10, HIDDEN), (COUNT, HIDDEN, WIDTH))
    shapes = jax.eval_shape(model.init, KEY, *args)
    assert set(shapes[OWG]["layers_0"]) == {"wo"}
    by_rule = jaxfp8.quantize(Experts(COUNT, HIDDEN), [(".*", RECIPE)])
    variables = used_variables(by_rule, *args)
    assert_same_bits(
        by_rule.apply(variables, *args), GATED.apply(variables, *args), "rule"
    )


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_freeze_and_quantize_params(recipe):
    """Codes in place of kernels give the same bits."""
    recipe = RECIPE if recipe == "delayed" else RECIPES[recipe][0]
    layer, args = GATED.clone(recipe=recipe), tokens(5)
    variables = used_variables(layer, *args)
    y = layer.apply(variables, *args)
    frozen = jaxfp8.freeze(layer, variables, *args)
    assert OWG not in frozen
    assert_same_bits(layer.apply(frozen, *args), y, "frozen")
    params, state = variables["params"], variables.get(OWG)
    where = None if state else ".*"
    codes = jaxfp8.quantize_params(params, state, recipe, where=where)
    assert isinstance(codes["wi"]["kernel"], jaxfp8.QTensor)
    assert_same_bits(layer.apply(variables | {"params": codes}, *args), y, "codes")


@pytest.mark.parametrize("changed, error, message", [
    ({"expert": np.ones((5, 2), F32)}, TypeError, "Experts: expert: expected integers"),
    ({"expert": np.ones(5, np.int32)}, ValueError, r"expert\[..., None\]"),
    ({"expert": np.ones((4, 2), np.int32)}, ValueError, r"\[5, chosen\]"),
    ({"weights": np.ones((5, 1), F32)}, ValueError, r"weights: expected \[5, 2\]"),
    ({"weights": np.ones((5, 2), np.int32)}, TypeError, "Experts: weights"),
])  # fmt: skip
def test_bad_arguments(changed, error, message):
    args = dict(zip(("x", "expert", "weights"), tokens(5), strict=True)) | changed
    with pytest.raises(error, match=message):
        GATED.init(KEY, **args)


def test_bad_activation():
    with pytest.raises(ValueError, match='Experts: activation: expected one of "gelu"'):
        GATED.clone(activation="tanh").init(KEY, *tokens(5))
