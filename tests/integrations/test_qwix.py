"""Rule lists of qwix. The stand-in has the fields and defaults of qwix 0.1.8; where qwix is installed, its own too."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import pytest

import jaxfp8
from jaxfp8.integrations import qwix

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FP8 = {"weight_qtype": E4M3, "act_qtype": E4M3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    module_path: str = ".*"
    op_names: tuple = ()
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: Any = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QtRule(QuantizationRule):
    bwd_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: Any = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    additional_qt_config: Any = None


@pytest.fixture(params=["stand-in", "qwix"])
def rule(request):
    return QtRule if request.param == "stand-in" else pytest.importorskip("qwix").QtRule


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, None),
        (FP8, jaxfp8.Float8RowwiseScaling()),
        (FP8 | {"bwd_qtype": E4M3}, jaxfp8.Float8RowwiseScaling(fp8_format=jaxfp8.E4M3)),
        (FP8 | {"disable_channelwise_axes": True, "bwd_qtype": "float8_e5m2"}, jaxfp8.Float8CurrentScaling()),
        ({"weight_qtype": E5M2, "act_qtype": "float8_e5m2"}, jaxfp8.Float8RowwiseScaling(fp8_format=jaxfp8.E5M2)),
        (FP8 | {"tile_size": 128, "bwd_qtype": E4M3}, jaxfp8.Float8BlockScaling()),
        (FP8 | {"tile_size": 32}, jaxfp8.MXFP8BlockScaling(fp8_format=jaxfp8.HYBRID)),
        ({"weight_qtype": "mxfp8", "act_qtype": "mxfp8", "bwd_qtype": "mxfp8"}, jaxfp8.MXFP8BlockScaling()),
        (FP8 | {"bwd_weight_grad_tile_size": 1.0, "act_calibration_method": "absmax"}, jaxfp8.Float8RowwiseScaling()),
    ],
)
def test_recipes(rule, options, recipe):
    (got,) = qwix.rules_from_qwix([rule(module_path="a/.*", **options)])
    assert got == ("a/.*", recipe, ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_qtype": jnp.int8, "act_qtype": jnp.int8}, "weight_qtype, act_qtype, bwd_qtype.*got int8, int8"),
        ({"weight_qtype": "int4", "act_qtype": "int4"}, "got int4, int4"),
        ({"weight_qtype": E4M3}, "got float8_e4m3fn, None"),
        ({"act_qtype": E4M3}, "weight_qtype: expected the type of act_qtype, float8_e4m3fn, got None"),
        (FP8 | {"bwd_qtype": jnp.int8}, "got float8_e4m3fn, float8_e4m3fn and int8"),
        (FP8 | {"tile_size": 64}, "tile_size: expected None, 128 or 32, got 64"),
        ({"weight_qtype": "mxfp8", "act_qtype": "mxfp8", "tile_size": 128}, "expected None or 32 with mxfp8"),
        (FP8 | {"act_static_scale": True}, "act_static_scale: expected None or False, got True"),
        (FP8 | {"weight_calibration_method": "rms,3"}, "weight_calibration_method: expected 'absmax', got 'rms,3'"),
        (FP8 | {"bwd_weight_grad_tile_size": 0.25}, "bwd_weight_grad_tile_size: .*got 0.25"),
        (FP8 | {"bwd_stochastic_rounding": "uniform"}, "bwd_stochastic_rounding: expected None, got 'uniform'"),
        (FP8 | {"additional_qt_config": {"a": 1}}, "additional_qt_config: "),
        (FP8 | {"op_names": ("conv_general_dilated",)}, "op_names: expected dot_general or einsum among them"),
    ],
)  # fmt: skip
def test_what_no_recipe_does_is_an_error(rule, options, message):
    with pytest.raises(ValueError, match=rf"rules_from_qwix: rules\[1\]: .*{message}"):
        qwix.rules_from_qwix([rule(), rule(**options)])


def test_rules_without_a_backward():
    """`QuantizationRule` has no bwd_qtype."""
    rules = [QuantizationRule(**FP8)]
    assert qwix.rules_from_qwix(rules)[0].recipe == jaxfp8.Float8RowwiseScaling()
    assert qwix.rules_from_qwix(rules, bwd_qtype=E4M3)[0].recipe.fp8_format == jaxfp8.E4M3


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Einsum((8, 8), "bd,df->bf", name="mix")(nn.Dense(8, name="dense")(x))
        return nn.Dense(4, name="head")(x)


def test_a_linen_model(rule):
    """First match wins, and `op_names` tells Dense and Einsum apart, as qwix's own `get_unused_rules` would say."""
    current = {"disable_channelwise_axes": True}
    rules = [
        rule(module_path="head"),
        rule(module_path="conv", op_names=("conv_general_dilated",)),  # others' operations in high precision
        rule(op_names=("einsum", "ragged_dot"), tile_size=32, **FP8),
        rule(module_path="dense|mix", op_names=("dot_general", "gmm"), **FP8, **current),
    ]
    quantized = qwix.quantize_model(Model(), qwix.QtProvider(rules))
    with pytest.warns(UserWarning, match="rule 1 'conv' conv_general_dilated"):
        rows = {row["layer"]: row["recipe"] for row in jaxfp8.report(quantized, jnp.ones((2, 8))).rows}
    assert rows == {
        "head": None,
        "mix": jaxfp8.MXFP8BlockScaling(fp8_format=jaxfp8.HYBRID),
        "dense": jaxfp8.Float8CurrentScaling(),
    }


def test_errors():
    provider = qwix.QtProvider([])
    with pytest.raises(TypeError, match="provider: expected a jaxfp8.integrations.qwix.QtProvider"):
        qwix.quantize_model(Model(), [])
    with pytest.raises(TypeError, match="model: expected a Linen or an NNX module"):
        qwix.quantize_model(3, provider)
    with pytest.raises(TypeError, match="model_inputs: expected none"):
        qwix.quantize_model(Model(), provider, jnp.ones((2, 8)))
