"""Rules that make named layers of one x one product: the numbers of one Dense over all
kernels, under the user's names; errors where a module is another function.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY, normal
from equality import assert_same_bits as assert_same
from parametrize import each_row
from programs.cases import sgd

import jaxfp8
from jaxfp8.dot import _layers_by_rule
from jaxfp8.linen import Dense, quantize

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
RECIPE = jaxfp8.DelayedScaling(amax_history_len=3)
NAMES = "query", "key", "value"
D = 6
X = normal(2, 5, D)
QKV = Dense.of(*NAMES, recipe=RECIPE)
BIAS = nn.initializers.normal(0.5)


class Projections(nn.Module):
    """q, k and v of grouped queries, called in another order than a rule names them;
    their parts of y side by side.
    """

    kinds: tuple = (nn.Dense, nn.DenseGeneral)

    @nn.compact
    def __call__(self, x):
        dense, general = self.kinds
        options = {"dtype": jnp.bfloat16, "bias_init": BIAS}
        value = dense(4, name="value", **options)(x)
        query = general((4, 2), name="query", **options)(x)
        key = dense(4, name="key", **options)(x)
        query = query.reshape(*query.shape[:-2], -1)
        return jnp.concatenate([query, key, value], -1)


def joined(layers):
    """The arrays of q, k and v, by their names, as those of one layer."""
    result = {}
    for name, leaf in layers["query"].items():
        lead = layers["key"][name].shape[:-1]
        leaves = [leaf.reshape(*lead, 8), layers["key"][name], layers["value"][name]]
        result[name] = jnp.concatenate(leaves, -1)
    return result


FLAX = nn.Dense(
    16, dtype=jnp.bfloat16, dot_general_cls=jaxfp8.make_dot_general_cls(RECIPE)
)
# The columns of a group, the classes of the layers, and the layer of all kernels.
STEPS = {
    "Flax": (64, (nn.Dense, nn.DenseGeneral), FLAX),
    "Flax, interleaved": (2, (nn.Dense, nn.DenseGeneral), FLAX),
    "ours": (64, (Dense, Dense), Dense(16, recipe=RECIPE, dtype=jnp.bfloat16)),
}


@each_row(("columns", "kinds", "one"), STEPS)
def test_steps(columns, kinds, one, monkeypatch):
    """Three steps of one layer over the kernels side by side. Where they are
    interleaved, the order of sums in dx is another.
    """
    monkeypatch.setattr(_layers_by_rule, "_COLUMNS", columns)
    plain, x = Projections(kinds), X.astype(oracle.BF16)
    model = quantize(plain, [("", QKV)])
    variables = model.init(KEY, x)
    assert_same(variables, quantize(plain, [(".*", RECIPE)]).init(KEY, x))
    # the state of the first name counts
    variables[OWG]["key"] = jax.tree.map(lambda leaf: leaf + 7, variables[OWG]["key"])

    @functools.partial(jax.jit, static_argnums=0)
    def step(layer, variables, x, grad):
        y, vjp = jax.vjp(layer.apply, variables, x)
        return y, *vjp(grad)

    def as_one(variables):
        return {"params": joined(variables["params"]), OWG: variables[OWG]["query"]}

    for i in range(3):
        x = np.roll(x, i, -1) * oracle.BF16.type(2.0**i)
        grad = normal(2, 5, 16, seed=i).astype(oracle.BF16)
        y, gradient, dx = step(model, variables, x, grad)
        right_y, right, right_dx = step(one, as_one(variables), x, grad)
        got = as_one(gradient)
        # Flax rounds to bfloat16 before it adds the bias, and sums the bias's gradient
        # in bfloat16.
        oracle.assert_column_sums(got["params"].pop("bias"), grad.reshape(-1, 16))
        right["params"].pop("bias")
        assert_same(got, right, f"step {i}")
        for got, wanted in ((y, right_y), (dx, right_dx)):
            got, wanted = (of.astype(np.float32) for of in (got, wanted))
            most = 2.0**-7 * np.abs(wanted).max()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=most)
        state = gradient[OWG]
        assert_same([state["key"], state["value"]], [state["query"]] * 2)
        params = sgd(variables["params"], gradient["params"], 0.1)
        variables = {"params": params, OWG: state}


class Attention(nn.Module):
    """Flax's attention, of x or across to y."""

    @nn.compact
    def __call__(self, x, y=None):
        attention = nn.MultiHeadDotProductAttention(2, name="attention")
        return nn.Dense(D, name="out")(attention(x, y))


def test_attention_of_flax():
    """Products and rows are fewer, names are not. Key and value alone make
    cross-attention.
    """
    apart = quantize(Attention(), [(".*", RECIPE)])
    model = quantize(Attention(), [("attention", QKV), (".*", RECIPE)])
    variables = model.init(KEY, X)
    assert_same(variables, apart.init(KEY, X))

    def loss(variables, model=model, y=None):
        return jnp.sum(jnp.sin(model.apply(variables, X, y)))

    states = jax.jit(jax.grad(loss))(variables)[OWG]["attention"]
    assert_same([states["key"], states["value"]], [states["query"]] * 2)
    assert np.all(states["query"]["Fp8DotGeneral_0"]["output_grad_amax_history"][:1])
    products = [
        str(jax.make_jaxpr(lambda v, model=model: loss(v, model))(variables)).count(
            "fp8_product["
        )
        for model in (model, apart)
    ]
    assert products == [3, 5]
    report = jaxfp8.report(model, X)
    assert not report.unused
    rows = report.rows
    told = {row["layer"]: row["why"] for row in rows}
    for name in NAMES:
        assert told[f"attention/{name}"] == "rule 0 'attention' as one product"
    rows = jaxfp8.report(model, X, variables={"params": variables["params"]}).rows
    told = {row["layer"]: row["why"] for row in rows}
    assert "the variables have no state" in told["attention/key"]

    y = 2 * X
    with pytest.raises(ValueError, match="same x, .* another call of key"):
        loss(variables, y=y)
    pair = Dense.of("value", "key", recipe=RECIPE)
    cross = quantize(Attention(), [("attention", pair), (".*", RECIPE)])
    states = jax.grad(loss)(variables, cross, y)[OWG]["attention"]
    assert_same(states["key"], states["value"])
    amaxes = {
        name: state["Fp8DotGeneral_0"]["input_amax_history"][0]
        for name, state in states.items()
    }
    assert amaxes["key"] == 2 * amaxes["query"]


def calling(forward):
    """A module of layers that a function calls."""

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            return forward(x)

    return Other()


def dense(name, kind=nn.Dense, features=4, **options):
    return kind(features, name=name, **options)


MISTAKES = {
    "x": (
        lambda x: (dense("query")(x), dense("key")(x + 1)),
        "the same x, .* another call of key",
    ),
    "call": (lambda x: dense("query")(x), "no kernel of 'key'"),
    "twice": (
        lambda x: [layer(x) for layer in [dense("query")] * 2 + [dense("key")]],
        "one call of each of query, key, .* another call of query",
    ),
    "bias": (
        lambda x: (dense("query")(x), dense("key", use_bias=False)(x)),
        "query, key to have all a bias, or none",
    ),
    "dtype": (
        lambda x: (dense("query")(x), dense("key", dtype=jnp.bfloat16)(x)),
        "equal dtype and precision, .* another call of key",
    ),
    "kinds": (
        lambda x: (dense("query", Dense)(x), dense("key")(x)),
        "all layers of Flax or none, got another call of key",
    ),
    "axis": (
        lambda x: (dense("query", nn.DenseGeneral, axis=(1, 2))(x), dense("key")(x)),
        r"the last dimension of x, .*DenseGeneral with the axes \[1, 2\] of 3",
    ),
    "class": (
        lambda x: (dense("query", jaxfp8.linen.NormDense)(x), dense("key")(x)),
        "query to be a .*DenseGeneral or .*, got NormDense",
    ),
    "arguments": (
        lambda x: (dense("query", Dense)(x, activation="relu").value, dense("key")(x)),
        "call with x alone, got Dense with .* and 1 more arguments",
    ),
}


@each_row(("forward", "message"), MISTAKES)
def test_another_function_is_refused(forward, message):
    """Where a step is traced."""
    rules = [("", Dense.of("query", "key", recipe=RECIPE))]
    model = quantize(calling(forward), rules)
    apart = quantize(calling(forward), [(".*", RECIPE)])
    variables = jax.eval_shape(apart.init, KEY, X)
    with pytest.raises(
        ValueError, match=f"model: as one product: expected .*(?:{message})"
    ):
        jax.eval_shape(model.apply, variables, X)


def test_names_that_do_not_fit():
    for names in (("query",), ("key", "key")):
        with pytest.raises(ValueError, match="Dense.of: names: expected names of diff"):
            Dense.of(*names)
    with pytest.raises(TypeError, match="Dense.of: recipe: "):
        Dense.of(*NAMES, recipe="delayed")
