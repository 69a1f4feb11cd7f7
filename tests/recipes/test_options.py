"""Wrong recipes, options and operands: errors that name the argument and say what to do."""

import copy
import dataclasses
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from recipes.cases import RECIPES

X, KERNEL = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
MATMUL = (((1,), (0,)), ((), ()))
NO_RECIPES = {
    "string": ("mx", "got 'mx'"),
    "class": (jaxfp8.MXFP8BlockScaling, "call the class"),
    "format": (jaxfp8.HYBRID, "got HYBRID"),
    "quantizer": (jaxfp8.MXFP8Quantizer(), "got MXFP8Quantizer"),
}


@pytest.mark.parametrize("recipe, says", NO_RECIPES.values(), ids=NO_RECIPES)
def test_not_a_recipe(recipe, says):
    """Wherever a recipe is taken."""
    takers = {
        "dot_general: recipe": lambda: jaxfp8.dot_general(X, KERNEL, MATMUL, recipe=recipe),
        "dot_general: recipe ": lambda: jaxfp8.einsum("mk,kn->mn", X, KERNEL, recipe=recipe),
        "ragged_dot: recipe": lambda: jaxfp8.ragged_dot(X, KERNEL[None], np.int32([4]), recipe=recipe),
        "init_state: recipe": lambda: jaxfp8.init_state(recipe),
        "quantize_params: recipe": lambda: jaxfp8.quantize_params({}, {}, recipe),
        "layer: recipe": lambda: jaxfp8.linen.Dense(5, recipe=recipe).init(jax.random.key(0), X),
        "layer: recipe ": lambda: nn.Dense(5, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(recipe)).init(
            jax.random.key(0), X
        ),
        "layer: recipe  ": lambda: jaxfp8.nnx.Fp8DotGeneral(recipe),
    }
    for name, take in takers.items():
        with pytest.raises(TypeError, match=f"{name.strip()}: expected a recipe.*{says}"):
            take()


STATELESS = (
    jaxfp8.Float8CurrentScaling,
    jaxfp8.Float8RowwiseScaling,
    jaxfp8.Float8BlockScaling,
    jaxfp8.MXFP8BlockScaling,
)
FOR_ALL = {
    "format of a string": ({"fp8_format": "HYBRID"}, TypeError, "fp8_format"),
    "format of a dtype": ({"fp8_format": jnp.float8_e4m3fn}, TypeError, "fp8_format"),
    "precise of a string": ({"precise": "fprop"}, TypeError, "precise"),
    "precise of another": ({"precise": ("forward",)}, ValueError, "precise"),
    "negative min_size": ({"min_size": -1}, ValueError, "min_size"),
    "fractional min_size": ({"min_size": 0.5}, TypeError, "min_size"),
    "one axis": ({"pipeline_axes": "stage"}, TypeError, "pipeline_axes"),
}
FOR_SOME = [
    *((cls, {"power_2_scale": 1}, TypeError, "power_2_scale") for cls in STATELESS[:3]),
    (jaxfp8.MXFP8BlockScaling, {"rounding": "nearest"}, ValueError, "rounding"),
    (jaxfp8.MXFP8BlockScaling, {"rounding": None}, ValueError, "rounding"),
]


@pytest.mark.parametrize("cls", STATELESS)
@pytest.mark.parametrize("case", FOR_ALL)
def test_options(cls, case):
    options, error, name = FOR_ALL[case]
    with pytest.raises(error, match=f"{cls.__name__}: {name}: expected .*, got "):
        cls(**options)


@pytest.mark.parametrize("cls, options, error, name", FOR_SOME)
def test_options_of_one(cls, options, error, name):
    with pytest.raises(error, match=f"{cls.__name__}: {name}: expected .*, got "):
        cls(**options)


def most_recent(history):
    return history[0]


POSITIONAL = {
    jaxfp8.DelayedScaling: {
        "margin": 1,
        "amax_history_len": 16,
        "amax_compute_algo": most_recent,
        "fp8_format": jaxfp8.E4M3,
        "first_step": "current",
    },
    **{cls: {"fp8_format": jaxfp8.E5M2, "power_2_scale": True} for cls in STATELESS[:3]},
    jaxfp8.MXFP8BlockScaling: {"fp8_format": jaxfp8.E5M2, "rounding": "floor"},
    jaxfp8.CustomRecipe: {"qfactory": most_recent},
    jaxfp8.HighPrecision: {},
}


@pytest.mark.parametrize("cls", POSITIONAL)
def test_positions_of_options(cls):
    """Options of a recipe keep their positions; those that all recipes share are given by keyword."""
    options = POSITIONAL[cls]
    recipe = cls(*options.values())
    assert {name: getattr(recipe, name) for name in options} == options
    shared = {"precise": ("fprop",), "min_size": 3, "pipeline_axes": ("stage",)}
    recipe = cls(*options.values(), **shared)
    assert {name: getattr(recipe, name) for name in shared} == shared
    with pytest.raises(TypeError, match="positional argument"):
        cls(*options.values(), ("fprop",))


QUANTIZERS = (
    jaxfp8.Float8CurrentScalingQuantizer,
    jaxfp8.Float8RowwiseQuantizer,
    jaxfp8.Float8BlockQuantizer,
    jaxfp8.MXFP8Quantizer,
)


@pytest.mark.parametrize("cls", QUANTIZERS)
@pytest.mark.parametrize("dtype", [jnp.float16, "e4m3", jaxfp8.HYBRID, jnp.float8_e4m3b11fnuz, None, 3], ids=str)
def test_dtypes_of_quantizers(cls, dtype):
    """HYBRID is two: a quantizer has one."""
    with pytest.raises(TypeError, match=f"{cls.__name__}: fp8_dtype: expected float8_e4m3fn or float8_e5m2, got "):
        cls(fp8_dtype=dtype)


@pytest.mark.parametrize("cls", QUANTIZERS)
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, jnp.float8_e5m2])
def test_what_quantizers_refuse(cls, dtype):
    with pytest.raises(TypeError, match=r": x: expected .*bfloat16"):
        cls(fp8_dtype=jnp.float8_e4m3fn).quantize(jnp.zeros((4, 4), dtype), None)


def test_recipes_are_values():
    """They hash and compare, so that a recipe made twice is one program."""
    for recipe, _ in RECIPES.values():
        again = dataclasses.replace(recipe)
        assert again == recipe and hash(again) == hash(recipe) and again is not recipe
    assert len({recipe for recipe, _ in RECIPES.values()}) == len(RECIPES)


def test_no_stages_and_nothing_said_are_two_recipes():
    """A warning names `pipeline_axes=()` as its cure, so no cache may take the one recipe for the other."""
    unsaid, said = jaxfp8.DelayedScaling(), jaxfp8.DelayedScaling(pipeline_axes=())
    assert unsaid != said and unsaid == jaxfp8.DelayedScaling() and said == jaxfp8.DelayedScaling(pipeline_axes=[])
    assert jaxfp8.make_dot_general_cls(said) is not jaxfp8.make_dot_general_cls(unsaid)
    for again in (pickle.loads(pickle.dumps(unsaid)), copy.deepcopy(unsaid), dataclasses.replace(unsaid)):
        assert again == unsaid != said and not again.pipeline_axes
