"""Every recipe in every layer people use: each layer is the plain functions, whose numbers are tested beside this."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_same_bits
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from recipes.cases import KINDS, RECIPES

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
M, K, N = 6, 40, 12
DELAYED = jaxfp8.DelayedScaling(amax_history_len=2)


def inputs(*shape):
    rng = np.random.default_rng(len(shape))
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


X = inputs(2, M, K)


def plain(recipe):
    """A `dot_general` of a recipe that keeps no state, or of none; without a module around it."""

    def dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
        del precision, out_sharding
        options = {"recipe": recipe, "preferred_element_type": preferred_element_type}
        return jaxfp8.dot_general(x, kernel, dimension_numbers, **options)

    return dot_general


def linen_layers(recipe, is_module):
    """Each layer with our class, or with the plain function in its place."""
    cls = functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)
    dot_general = {"dot_general_cls": cls} if is_module else {"dot_general": plain(recipe)}
    of_attention = (
        {"qkv_dot_general_cls": cls, "out_dot_general_cls": cls}
        if is_module
        else {"qkv_dot_general": plain(recipe), "out_dot_general": plain(recipe)}
    )
    return {
        "Dense": nn.Dense(N, **dot_general),
        "Dense bfloat16": nn.Dense(N, dtype=jnp.bfloat16, **dot_general),
        "DenseGeneral": nn.DenseGeneral((3, 4), axis=(-2, -1), **dot_general),
        "DenseGeneral with a batch": nn.DenseGeneral(N, batch_dims=(0,), **dot_general),
        "attention": nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, **of_attention),
    }


def value_and_gradients(model, variables, x):
    """`(y, gradient)` of a sum that has another weight for each element; jitted."""

    @jax.jit
    def both(variables, x):
        def loss(variables, x):
            y = model.apply(variables, x)
            return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        (_, y), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, x)
        return y, gradient

    return both(variables, x)


LAYERS = tuple(linen_layers(DELAYED, True))


def table(layers):
    """Every kind of recipe with every layer; fast are the layers, each with a kind of its own."""
    fast = {(KINDS[i % len(KINDS)], layer) for i, layer in enumerate(layers)}
    return [
        pytest.param(name, layer, marks=[] if (name, layer) in fast else pytest.mark.slow)
        for name in KINDS
        for layer in layers
    ]


OTHERS = [pytest.param(name, "Dense", marks=pytest.mark.slow) for name in RECIPES if name not in KINDS]


@pytest.mark.parametrize("name, layer", table(LAYERS) + OTHERS)
def test_linen(name, layer):
    """A layer without state: its variables are its parameters, and its bits those of the plain function."""
    recipe = RECIPES[name][0]
    model, wanted = (linen_layers(recipe, is_module)[layer] for is_module in (True, False))
    variables = jax.jit(model.init)(jax.random.key(0), X)
    assert list(variables) == ["params"]
    got = value_and_gradients(model, variables, X)
    assert_same_bits(got, value_and_gradients(wanted, variables, X), layer)
    high = value_and_gradients(linen_layers(None, False)[layer], variables, X)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(high), strict=True)), "is FP8"


# One kind of recipe is fast where the layer is what is tested.
ONE_KIND = [pytest.param(name, marks=[] if name == "block" else pytest.mark.slow) for name in KINDS]


@pytest.mark.parametrize("name", ONE_KIND)
def test_linen_einsum(name):
    recipe = RECIPES[name][0]

    class Layer(nn.Module):
        einsum: type = None

        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.normal(), (K, 3, 4))
            return (self.einsum or functools.partial(jaxfp8.einsum, recipe=recipe))("bmk,khd->bhmd", x, kernel)

    class Ours(Layer):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.normal(), (K, 3, 4))
            return jaxfp8.linen.Fp8Einsum(recipe=recipe)("bmk,khd->bhmd", x, kernel)

    variables = Ours().init(jax.random.key(0), X)
    assert list(variables) == ["params"]
    assert_same_bits(value_and_gradients(Ours(), variables, X), value_and_gradients(Layer(), variables, X), "einsum")


def ours(recipe):
    """Layers of our own, in Linen and NNX, with the same parameters."""
    return {
        "Dense": (
            jaxfp8.linen.Dense(N, recipe=recipe),
            lambda: jaxfp8.nnx.Linear(K, N, recipe=recipe, rngs=nnx.Rngs(0)),
        ),
        "GatedMLP": (
            jaxfp8.linen.GatedMLP(20, recipe=recipe),
            lambda: jaxfp8.nnx.GatedMLP(K, 20, recipe=recipe, rngs=nnx.Rngs(0)),
        ),
        "NormDense": (
            jaxfp8.linen.NormDense((3, 4), kind="layer", recipe=recipe),
            lambda: jaxfp8.nnx.NormDense(K, (3, 4), kind="layer", recipe=recipe, rngs=nnx.Rngs(0)),
        ),
    }


def by_hand(layer, recipe, params, x):
    """What they compute, of plain functions."""

    def dot(x, kernel, bias=None):
        return jaxfp8.dot_general(x, kernel, (((len(x.shape) - 1,), (0,)), ((), ())), recipe=recipe, bias=bias)

    if layer == "Dense":
        return dot(x, params["kernel"], params["bias"])
    if layer == "GatedMLP":
        return dot(jaxfp8.activated(dot(x, params["wi"]["kernel"]), "silu_gated"), params["wo"]["kernel"])
    x = jaxfp8.normalized(x, params["scale"], params["norm_bias"], kind="layer", epsilon=1e-6)
    return dot(x, params["dense"]["kernel"])


class ByHand(nn.Module):
    """`by_hand` with the face of a module."""

    layer: str
    recipe: jaxfp8.recipes.Recipe

    @nn.compact
    def __call__(self, x):
        return by_hand(self.layer, self.recipe, self.variables["params"], x)


@pytest.mark.parametrize("name, layer", table(("GatedMLP", "Dense", "NormDense")))
def test_our_layers(name, layer):
    """Linen, NNX and the functions they are made of: the same bits, and no state in any."""
    recipe = RECIPES[name][0]
    linen, make = ours(recipe)[layer]
    variables = linen.init(jax.random.key(0), X)
    assert list(variables) == ["params"]
    got = value_and_gradients(linen, variables, X)
    assert_same_bits(got, value_and_gradients(ByHand(layer, recipe), variables, X), layer)

    module = make()
    assert not jax.tree.leaves(nnx.state(module, jaxfp8.nnx.OverwriteWithGradient))
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    of = _flat(variables["params"])
    for path, variable in flat:
        variable.set_value(of[path])
    nnx.update(module, nnx.from_flat_state(flat))
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(module, X), got[0])


def _flat(tree):
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


NNX = {
    "Linear": lambda op: nnx.Linear(K, N, dot_general=op, rngs=nnx.Rngs(0)),
    "LinearGeneral": lambda op: nnx.LinearGeneral((M, K), (3, 4), axis=(-2, -1), dot_general=op, rngs=nnx.Rngs(0)),
    "Einsum": lambda op: nnx.Einsum("bmk,khd->bmhd", (K, 3, 4), einsum_op=op, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name, layer", table(NNX))
def test_nnx(name, layer):
    recipe = RECIPES[name][0]
    is_einsum = layer == "Einsum"
    op = (jaxfp8.nnx.Fp8Einsum if is_einsum else jaxfp8.nnx.Fp8DotGeneral)(recipe)
    assert not jax.tree.leaves(nnx.state(op))

    def einsum(eqn, x, kernel, **_):
        return jaxfp8.einsum(eqn, x, kernel, recipe=recipe)

    @nnx.jit
    def both(module, x):
        return nnx.value_and_grad(lambda module: jnp.sum(jnp.sin(module(x))))(module)

    got, wanted = (both(NNX[layer](of), X) for of in (op, einsum if is_einsum else plain(recipe)))
    assert_same_bits([got[0], *jax.tree.leaves(got[1])], [wanted[0], *jax.tree.leaves(wanted[1])], layer)


# ---------------------------------------------------------------------------------------------- training without state


@pytest.mark.parametrize("name", ONE_KIND)
def test_train_state(name):
    """`TrainState` and `update_state` of a model whose variables are parameters alone."""
    model = nn.Dense(N, dot_general_cls=functools.partial(jaxfp8.Fp8DotGeneral, recipe=RECIPES[name][0]))
    variables = model.init(jax.random.key(0), X)
    target = inputs(2, M, N)
    train = jaxfp8.linen.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.01))

    @jax.jit
    def step(train):
        def loss(variables):
            return jnp.mean((train.apply_fn(variables, X) - target) ** 2)

        value, gradient = jaxfp8.value_and_grad(loss)(train.params)
        return train.apply_gradients(grads=gradient), value

    losses = []
    for _ in range(8):
        train, value = step(train)
        losses.append(float(value))
    assert list(train.params) == ["params"] and all(a > b for a, b in zip(losses, losses[1:], strict=False))
    zeros = jax.tree.map(jnp.zeros_like, train.params)
    assert_same_bits(jaxfp8.update_state(train.params, zeros), train.params, "nothing to update")
    twice = jaxfp8.accumulate_gradients(train.params, train.params)
    assert_same_bits(twice, jax.tree.map(lambda a: a + a, train.params), "sums")


@pytest.mark.parametrize("name", ONE_KIND)
def test_to_another_recipe_and_back(name):
    """State of delayed scaling is left alone by a recipe that has none, and counts again afterwards."""
    model = jaxfp8.linen.Dense(N, recipe=DELAYED)
    variables = model.init(jax.random.key(0), X)

    def gradient(model, variables, x=X):
        return jax.grad(lambda variables: jnp.sum(jnp.sin(model.apply(variables, x))))(variables)

    # The amax it saw is three times that of X, so that what it makes of X is not what current scaling does.
    variables = jaxfp8.update_state(variables, gradient(model, variables, 3 * X))
    before = variables[OWG]
    amax = np.abs(X).max()
    assert before["Fp8DotGeneral_0"]["input_amax_history"].tolist() == [3 * amax, 0]

    other = model.clone(recipe=RECIPES[name][0])
    y = other.apply(variables, X)
    np.testing.assert_array_equal(y, other.apply({"params": variables["params"]}, X))
    of_other = gradient(other, variables)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_other[OWG]))
    kept = jaxfp8.update_state(variables, of_other)
    assert_same_bits(kept[OWG], before, "kept")

    y = model.apply(kept, X)
    assert np.any(y != other.apply(kept, X))
    after = gradient(model, kept)[OWG]["Fp8DotGeneral_0"]
    assert after["input_amax_history"].tolist() == [amax, 3 * amax]
    assert after["input_scale"] == np.float32(1) / (np.float32(448) / (3 * amax))


def test_delayed_where_no_state_was_made():
    """A model made without state and applied with delayed scaling takes its scales from the tensors at hand."""
    stateless = jaxfp8.linen.Dense(N, recipe=RECIPES["current"][0])
    variables = stateless.init(jax.random.key(0), X)
    y = stateless.clone(recipe=DELAYED).apply(variables, X)
    np.testing.assert_array_equal(y, stateless.apply(variables, X))


def test_recipes_are_values():
    """They hash and compare, so that a recipe made twice is one program."""
    for recipe, _ in RECIPES.values():
        again = dataclasses.replace(recipe)
        assert again == recipe and hash(again) == hash(recipe) and again is not recipe
    assert len({recipe for recipe, _ in RECIPES.values()}) == len(RECIPES)
