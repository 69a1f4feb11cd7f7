"""FP8 that is asked for and reaches no product: one FP8StateWarning, and none where there is nothing to say."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8.recipes import _warning

CURRENT, DELAYED = jaxfp8.Float8CurrentScaling(), jaxfp8.DelayedScaling(amax_history_len=3)
X = jnp.ones((4, 8))


def said(function) -> list[str]:
    """Return the texts of the FP8StateWarnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    assert all(w.filename == __file__ for w in found), "a warning points at the line of the user"
    return [str(w.message) for w in found if w.category is jaxfp8.FP8StateWarning]


class OwnProduct(nn.Module):
    """A layer that calls lax.dot_general itself, as those of FlaxGPT2 do."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        return jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


class Model(nn.Module):
    block: type[nn.Module] = Block

    def setup(self):
        self.body, self.head = self.block(), nn.Dense(8)

    def __call__(self, x):
        return self.head(self.body(x))

    def decode(self, x):
        return self.head(x)


@pytest.fixture(autouse=True)
def _recipes_that_reached_no_layer(monkeypatch):
    monkeypatch.setattr(_warning, "_reached", set())


def in_region(function, *args, **kwargs):
    def run():
        with jaxfp8.autocast(*args, **kwargs):
            return function()

    return run


PARAMS = OwnProduct().init(jax.random.key(0), X)
FP8 = nn.Dense(8, use_bias=False, dot_general_cls=jaxfp8.Fp8DotGeneral)


def plain():
    return OwnProduct().apply(PARAMS, X)


def test_a_region_without_fp8():
    step = jax.jit(lambda params: OwnProduct().apply(params, X + 1))
    (text,) = said(in_region(lambda: step(PARAMS)))
    assert text.startswith("autocast: no product in this region is in FP8")
    assert said(in_region(lambda: step(PARAMS))) == []  # compiled: nothing is traced
    assert len(said(in_region(plain, CURRENT))) == 1
    assert len(said(in_region(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))(X), CURRENT))) == 1


def raises():
    plain()
    raise KeyError


def test_regions_that_say_nothing():
    def trains():
        FP8.init(jax.random.key(0), X)

    def own_recipe():
        dimension_numbers = (((1,), (0,)), ((), ()))
        return plain(), jaxfp8.dot_general(X, jnp.ones((8, 8)), dimension_numbers, recipe=CURRENT)

    def builds():
        return plain(), jaxfp8.nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def nested():
        return plain(), in_region(own_recipe, DELAYED)()

    assert said(plain) == said(in_region(plain, enabled=False)) == []
    assert said(in_region(plain, jaxfp8.HighPrecision())) == []
    assert said(in_region(in_region(plain, enabled=False), CURRENT)) == []
    assert said(in_region(lambda: jnp.sum(X), CURRENT)) == []
    for function in (own_recipe, builds, nested, trains):
        _warning._reached.clear()
        assert said(in_region(function, CURRENT)) == [], function
    assert said(in_region(plain, CURRENT)) == []  # as beside a call of a compiled function with layers
    with pytest.raises(KeyError):
        assert said(in_region(raises, jaxfp8.MXFP8BlockScaling())) == []


def test_rules_that_match_nothing():
    """Linen says so where the model runs."""
    variables = Model().init(jax.random.key(0), X)
    for path in ("Dense", "body"):
        model = jaxfp8.quantize(Model(), [(path, DELAYED), ("other", None)])
        (text,) = said(lambda model=model: jax.eval_shape(model.apply, variables, X))
        assert f"none of ['{path}'] gives a layer of Model FP8" in text and "'body/Dense_0', 'head'" in text
    cell = nn.OptimizedLSTMCell(8)  # it multiplies arrays itself
    rnn = jaxfp8.quantize(nn.RNN(cell), [(".*", DELAYED)])
    (text,) = said(lambda: jax.eval_shape(rnn.init, jax.random.key(0), X[None]))
    assert "The layers that ran are none" in text
    linear = lambda: nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))  # noqa: E731
    (text,) = said(lambda: jaxfp8.quantize(linear(), [("Linear", DELAYED)]))
    assert "none of ['Linear'] gives a layer of Sequential FP8" in text and "'layers/0'" in text
    assert said(lambda: jaxfp8.quantize(linear(), [("layers/0", DELAYED)])) == []
    assert said(lambda: jaxfp8.quantize(linear(), [(".*", None)])) == []


@pytest.mark.parametrize("block", [Block, nn.jit(Block)], ids=["plain", "nn.jit"])
def test_rules_that_say_nothing(block):
    """A method that runs a part of the model; a block that nn.jit has kept, which runs unseen; a submodule."""
    variables = Model(block).init(jax.random.key(0), X)
    model = jaxfp8.quantize(Model(block), [("body/.*", DELAYED), ("head", None)])
    assert said(lambda: model.apply(variables, X, method="decode")) == []
    for _ in range(2):
        assert said(lambda: model.init(jax.random.key(0), X)) == []
    assert said(lambda: model.bind(variables).head(X)) == []
    off = jaxfp8.quantize(Model(block), [(".*", None)])
    assert said(lambda: off.apply(variables, X)) == []


@pytest.mark.parametrize("quantize", [jaxfp8.quantize, jaxfp8.linen.quantize], ids=["quantize", "linen.quantize"])
def test_a_quantized_model_that_is_thrown_away(quantize):
    rules = [("head", DELAYED)]

    def dropped():
        quantize(Model(), rules)

    def kept():
        model = quantize(Model(), rules)
        return model, quantize(model, rules), [quantize(Model(), rules)]

    (text,) = said(dropped)
    assert "the quantized model was thrown away" in text
    assert said(kept) == said(lambda: quantize(Model(), rules)) == []
