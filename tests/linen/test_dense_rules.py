"""Rules that make named layers of one x one product: the numbers of one Dense over all
kernels, under the user's names; errors where a module is another function.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from equality import assert_same_bits as assert_same
from parametrize import each_row
from programs.known_amax import leaves

import jaxfp8
from jaxfp8.dot import _layers_by_rule
from jaxfp8.linen import Dense, quantize

KEY = jax.random.key(0)
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
RECIPE = jaxfp8.DelayedScaling(amax_history_len=3)
NAMES = "query", "key", "value"
ROWS, D, WIDTHS = 10, 6, (8, 4, 4)
X = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
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


class Own(nn.Module):
    """What Projections of Dense layers with the rule have to be."""

    @nn.compact
    def __call__(self, x):
        return Dense(16, RECIPE, dtype=jnp.bfloat16, name="qkv")(x)


class Model(nn.Module):
    """A scan over layers in remat; the sum is the next x."""

    make: object
    options: tuple = ()

    @nn.compact
    def __call__(self, x):
        def body(layer, x, _):
            return x + jnp.sin(layer(x)[..., :D]), None

        scanned = nn.scan(
            body,
            variable_axes={"params": 0, OWG: 0},
            split_rngs={"params": True},
            length=2,
        )
        layer = nn.remat(self.make)(*self.options, name="attention")
        return scanned(layer, x.astype(jnp.bfloat16), None)[0]


def joined(layers, axis=-1):
    """The arrays of q, k and v, by their names, as those of one layer."""
    result = {}
    for name, leaf in layers["query"].items():
        lead = layers["key"][name].shape[:-1]
        leaves = [leaf.reshape(*lead, 8), layers["key"][name], layers["value"][name]]
        result[name] = jnp.concatenate(leaves, axis)
    return result


@pytest.mark.parametrize("columns", [64, 2])
def test_steps(columns, monkeypatch):
    """Three steps of the oracle over the kernels side by side, rounded as nn.Dense
    rounds them. With two columns a group they are interleaved, which changes the order
    of sums in dx alone.
    """
    monkeypatch.setattr(_layers_by_rule, "_COLUMNS", columns)
    model, x = quantize(Projections(), [("", QKV)]), X.astype(oracle.BF16)
    variables = model.init(KEY, x)
    assert_same(variables, quantize(Projections(), [(".*", RECIPE)]).init(KEY, x))
    state = oracle.LayerState.init(RECIPE.amax_history_len)
    # the state of the first name counts
    variables[OWG]["key"] = jax.tree.map(lambda leaf: leaf + 7, variables[OWG]["key"])

    @jax.jit
    def step(variables, x, grad):
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, *vjp(grad)

    for i in range(3):
        x = np.roll(x, i, -1) * oracle.BF16.type(2.0**i)
        grad = np.random.default_rng(i).standard_normal((2, 5, 16)).astype(oracle.BF16)
        y, gradient, dx = step(variables, x, grad)
        params = jax.tree.map(np.asarray, joined(variables["params"]))
        expected = oracle.dense_step(
            x.reshape(-1, D),
            params["kernel"].astype(oracle.BF16),
            grad.reshape(-1, 16),
            state,
            bias=params["bias"],
            out_dtype=oracle.BF16,
            dgrad_dtype=oracle.BF16,
            wgrad_dtype=oracle.BF16,
        )
        gradients = joined(gradient["params"])
        expected.check(
            f"step {i}",
            y=np.asarray(y).reshape(-1, 16),
            dgrad=np.asarray(dx).reshape(-1, D),
            wgrad=gradients["kernel"].astype(oracle.BF16),
        )
        oracle.assert_column_sums(gradients["bias"], grad.reshape(-1, 16))
        states = [gradient[OWG][name]["Fp8DotGeneral_0"] for name in NAMES]
        assert_same(dict(states[0]), leaves(expected.state), f"step {i}")
        assert_same(states[1:], states[:1] * 2)
        params = jax.tree.map(
            lambda p, g: p - 0.1 * g, variables["params"], gradient["params"]
        )
        variables, state = {"params": params, OWG: gradient[OWG]}, expected.state


def test_loops_and_remat():
    """A scan of layers in remat, to the bit; Dense layers keep their kernels in
    float32.
    """
    plain = Model(Projections, ((Dense, Dense),))
    model, own = quantize(plain, [("attention", QKV)]), Model(Own)
    variables = model.init(KEY, X)

    def gradient(model, variables):
        def loss(variables, x):
            return jnp.sum(jnp.sin(model.apply(variables, x).astype(jnp.float32)))

        return jax.jit(jaxfp8.value_and_grad(loss, argnums=(0, 1)))(variables, X)

    def as_own(tree):
        layers = tree["params"]["attention"]
        return {
            "params": {"attention": {"qkv": joined(layers)}},
            OWG: {"attention": {"qkv": tree[OWG]["attention"]["value"]}},
        }

    loss, (grads, dx) = gradient(model, variables)
    right, (right_grads, right_dx) = gradient(own, as_own(variables))
    assert_same((loss, as_own(grads), dx), (right, right_grads, right_dx))
    for row in jaxfp8.report(model, X, variables=variables).rows:
        assert row["recipe"] == RECIPE
        assert row["why"] == "rule 0 'attention' as one product"


class Attention(nn.Module):
    """Flax's attention, of x or across to y."""

    @nn.compact
    def __call__(self, x, y=None):
        attention = nn.MultiHeadDotProductAttention(2, name="attention")
        return nn.Dense(D, name="out")(attention(x, y))


def test_attention_of_flax():
    """In a TrainState: products and rows are fewer, names are not. Key and value alone
    make cross-attention.
    """
    apart = quantize(Attention(), [(".*", RECIPE)])
    model = quantize(Attention(), [("attention", QKV), (".*", RECIPE)])
    variables = model.init(KEY, X)
    assert_same(variables, apart.init(KEY, X))
    state = jaxfp8.linen.TrainState.create(
        apply_fn=model.apply, params=variables, tx=optax.sgd(0.1)
    )

    def loss(variables, model=model, y=None):
        return jnp.sum(jnp.sin(model.apply(variables, X, y)))

    state = state.apply_gradients(grads=jax.jit(jax.grad(loss))(state.params))
    states = state.params[OWG]["attention"]
    assert_same([states["key"], states["value"]], [states["query"]] * 2)
    assert np.all(states["query"]["Fp8DotGeneral_0"]["output_grad_amax_history"][:1])
    products = [
        str(jax.make_jaxpr(lambda v, model=model: loss(v, model))(variables)).count(
            "fp8_product["
        )
        for model in (model, apart)
    ]
    assert products == [3, 5]
    rows = jaxfp8.report(model, X, strict=True).rows
    told = {row["layer"]: row["why"] for row in rows}
    for name in NAMES:
        assert told[f"attention/{name}"] == "rule 0 'attention' as one product"

    y = 2 * X
    with pytest.raises(ValueError, match="same x, got another array in the call of ke"):
        loss(variables, y=y)
    cross = quantize(
        Attention(),
        [("attention", Dense.of("value", "key", recipe=RECIPE)), (".*", RECIPE)],
    )
    grads = jax.grad(loss)(variables, cross, y)[OWG]["attention"]
    assert_same(grads["key"], grads["value"])
    assert np.any(
        grads["key"]["Fp8DotGeneral_0"]["input_amax_history"]
        != grads["query"]["Fp8DotGeneral_0"]["input_amax_history"]
    )


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
    "x": (lambda x: (dense("query")(x), dense("key")(x + 1)), "same x, got another"),
    "call": (lambda x: dense("query")(x), "no kernel of 'key'"),
    "twice": (
        lambda x: [layer(x) for layer in [dense("query")] * 2 + [dense("key")]],
        "one call of each of query, key, got two of query",
    ),
    "bias": (
        lambda x: (dense("query")(x), dense("key", use_bias=False)(x)),
        "query, key to have all a bias, or none",
    ),
    "dtype": (
        lambda x: (dense("query")(x), dense("key", dtype=jnp.bfloat16)(x)),
        "equal dtype and precision of query, key",
    ),
    "kinds": (
        lambda x: (dense("query", Dense)(x), dense("key")(x)),
        "query, key, all layers of Flax or none, got others of key",
    ),
    "axis": (
        lambda x: (dense("query", nn.DenseGeneral, axis=(1, 2))(x), dense("key")(x)),
        r"query to multiply the last dimension of x, got the axes \[1, 2\]",
    ),
    "class": (
        lambda x: (dense("query", jaxfp8.linen.NormDense)(x), dense("key")(x)),
        "query to be a .*DenseGeneral or .*, got NormDense",
    ),
    "arguments": (
        lambda x: (dense("query", Dense)(x, activation="relu").value, dense("key")(x)),
        "calls of query with x alone",
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
