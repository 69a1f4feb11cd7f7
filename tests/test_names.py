"""The names of `jaxfp8` itself: how many there are, and what short ones are short
for.
"""

import inspect
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from equality import assert_same_bits
from flax import nnx

import jaxfp8

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
RULES = [("up", RECIPE), (".*", None)]


def test_the_top_is_short():
    """`dir` and `import *` give the list; private packages are not in it."""
    names = [
        name for name in jaxfp8.__all__ if not inspect.ismodule(getattr(jaxfp8, name))
    ]
    assert 30 <= len(names) <= 40
    assert dir(jaxfp8) == sorted([*jaxfp8.__all__, "__version__"])
    assert not {"dot", "numerics"} & set(jaxfp8.__all__)
    given = {}
    exec("from jaxfp8 import *", given)
    assert set(given) - {"__builtins__"} == set(jaxfp8.__all__)


def test_formats():
    for name in ("HYBRID", "E4M3", "E5M2"):
        fmt = getattr(jaxfp8.Format, name)
        assert isinstance(fmt, jaxfp8.Format)
        assert repr(fmt) == name
        assert pickle.loads(pickle.dumps(fmt)) == fmt


def test_a_recipe_as_dot_general_cls():
    """Equal recipes give one object, so that layers are equal; the layer is the one
    with the recipe by name.
    """
    cls = jaxfp8.make_dot_general_cls(RECIPE)
    assert cls is jaxfp8.make_dot_general_cls(jaxfp8.DelayedScaling(amax_history_len=4))
    x = jnp.ones((4, 8))
    layers = (cls, lambda: jaxfp8.Fp8DotGeneral(recipe=RECIPE))
    given, by_hand = (
        nn.Dense(3, dot_general_cls=cls).init(jax.random.key(0), x) for cls in layers
    )
    assert_same_bits(given, by_hand)
    for wrong in (jaxfp8.DelayedScaling, None, "delayed"):
        with pytest.raises(
            TypeError, match="make_dot_general_cls: recipe: expected a recipe"
        ):
            jaxfp8.make_dot_general_cls(wrong)


def test_quantize_by_the_model():
    class Linear(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="up")(x)

    model = Linear()
    assert jaxfp8.quantize(model, RULES) is model
    assert isinstance(model.up.dot_general, jaxfp8.nnx.Fp8DotGeneral)
    assert jaxfp8.quantize(Dense(), RULES) == jaxfp8.linen.quantize(Dense(), RULES)
    for wrong in (Dense, Linear, None, {"params": 1}):
        with pytest.raises(
            TypeError,
            match=(
                "quantize: model: expected an instance of a Linen or an NNX module, "
                "got .*; in plain functions call jaxfp8.dot_general"
            ),
        ):
            jaxfp8.quantize(wrong, RULES)
