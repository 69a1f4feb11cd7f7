"""The names of `jaxfp8` itself: how many there are, where others went, what short ones
are short for.
"""

import dataclasses
import inspect
import operator
import pathlib
import pickle
import tomllib
import warnings

import another_process
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from equality import assert_same_bits
from flax import nnx

import jaxfp8

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
RULES = [("up", RECIPE), (".*", None)]
# Names that left the top: each old one, and what it is now.
MOVED = {
    "DelayedScalingQuantizer": "recipes.DelayedScalingQuantizer",
    "E4M3": "Format.E4M3",
    "E5M2": "Format.E5M2",
    "Float8BlockQuantizer": "recipes.Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer": "recipes.Float8CurrentScalingQuantizer",
    "Float8RowwiseQuantizer": "recipes.Float8RowwiseQuantizer",
    "GEMMType": "recipes.GEMMType",
    "HYBRID": "Format.HYBRID",
    "MXFP8Quantizer": "recipes.MXFP8Quantizer",
    "QuantizerState": "recipes.QuantizerState",
    "Report": "inspect.Report",
    "StaticScalingQuantizer": "recipes.StaticScalingQuantizer",
    "fork": "train.fork",
    "has_cuda_kernels": "ops.has_cuda_kernels",
}


def test_the_top_is_short():
    """`dir` and `import *` give the list; old names and private packages are not in
    it.
    """
    names = [
        name for name in jaxfp8.__all__ if not inspect.ismodule(getattr(jaxfp8, name))
    ]
    assert 30 <= len(names) <= 40
    assert dir(jaxfp8) == sorted([*jaxfp8.__all__, "__version__"])
    assert not {*MOVED, "dot", "numerics"} & set(jaxfp8.__all__)
    given = {}
    exec("from jaxfp8 import *", given)
    assert set(given) - {"__builtins__"} == set(jaxfp8.__all__)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_warns_and_is_the_same_object(old):
    message = f"^jaxfp8.{old} is jaxfp8.{MOVED[old]} now; the old name goes with"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        value = getattr(jaxfp8, old)
    assert value is operator.attrgetter(MOVED[old])(jaxfp8)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_import_of_an_old_name_warns_at_its_line():
    """Python asks for the name twice."""
    with pytest.warns(DeprecationWarning) as caught:
        from jaxfp8 import Report
    assert Report is jaxfp8.inspect.Report
    assert {warning.filename for warning in caught} == {__file__}


def test_the_old_option_of_static_scaling_warns():
    """Where it is given, where `replace` gives it beside the new one, and where it is
    read; the new name is silent.
    """
    recipe = jaxfp8.StaticScaling(output_grad=2.0)
    with pytest.warns(DeprecationWarning, match="grad is output_grad now") as caught:
        assert jaxfp8.StaticScaling(grad=2.0) == recipe
        assert dataclasses.replace(jaxfp8.StaticScaling(), grad=2.0) == recipe
        assert recipe.grad == 2.0
    assert [warning.filename for warning in caught] == [__file__] * 3
    with warnings.catch_warnings(action="error"):
        assert dataclasses.replace(recipe, input=1.0).output_grad == 2.0
    assert list(inspect.signature(jaxfp8.StaticScaling).parameters)[:4] == [
        "input",
        "kernel",
        "output_grad",
        "fp8_format",
    ]


def test_an_unknown_name_is_an_attribute_error():
    """The error knows the name and the module, for Python's "Did you mean"."""
    message = "^module 'jaxfp8' has no attribute 'E4M4'$"
    with pytest.raises(AttributeError, match=message) as raised:
        _ = jaxfp8.E4M4
    assert raised.value.name == "E4M4" and raised.value.obj is jaxfp8
    with pytest.raises(ImportError, match="cannot import name 'E4M4' from 'jaxfp8'"):
        from jaxfp8 import E4M4  # noqa: F401


def test_the_package_uses_no_old_name():
    """`import jaxfp8` is silent. The control raises what a use would."""
    program = (
        "import warnings; warnings.filterwarnings('error', 'jaxfp8')\n"
        "import jaxfp8, jaxfp8.selftest, jaxfp8.__main__\n"
        "try: jaxfp8.E4M3\n"
        "except DeprecationWarning: print('raised')"
    )
    assert another_process.python("-c", program).stdout.strip() == "raised"


def test_version_and_formats():
    pyproject = tomllib.loads(
        (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    )
    assert jaxfp8.__version__ == pyproject["project"]["version"]
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
