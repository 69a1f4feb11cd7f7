"""qwix: convert its rule lists to rules of jaxfp8.

    from jaxfp8.integrations import qwix

    model = qwix.quantize_model(model, qwix.QtProvider(rules))  # rules: [qwix.QtRule(...)] as for qwix itself

This module was written after qwix 0.1.8 (`qconfig.py`, `providers/qt.py`, `model.py`), and tried with its rule classes.
qwix need not be installed: rules are read by their attributes.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn, nnx

from .. import linen, nnx as jaxfp8_nnx
from ..numerics import E4M3, E5M2, HYBRID
from ..recipes import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, MXFP8BlockScaling, Rule

__all__ = ["FORMATS", "OPERATIONS", "QtProvider", "quantize_model", "rules_from_qwix"]

# The operations for which qwix and jaxfp8 both have rules.
OPERATIONS = ("dot_general", "einsum")
# Formats by the names of qwix's forward and backward types.
FORMATS = {(fmt.dtype.name, fmt.backward_dtype.name): fmt for fmt in (HYBRID, E4M3, E5M2)}


def rules_from_qwix(rules: Any, *, bwd_qtype: Any = "float8_e5m2") -> list[Rule]:
    """Convert a list of qwix rules to rules of `linen.quantize` and `nnx.quantize`.

    | qwix | jaxfp8 |
    |---|---|
    | `module_path`, first match wins | the same; both are `re.fullmatch` on the path of the layer |
    | `op_names` | the same, for `dot_general` and `einsum`; other operations run as the code has them |
    | `weight_qtype=None` | None, which is high precision |
    | `weight_qtype`, `act_qtype`, `bwd_qtype` | the format: E4M3, E5M2, or HYBRID |
    | no `tile_size` | `Float8RowwiseScaling`, or with `disable_channelwise_axes` `Float8CurrentScaling` |
    | `tile_size=128` | `Float8BlockScaling`, whose kernel has 128x128 blocks where qwix has tiles of 128 |
    | `tile_size=32`, or `"mxfp8"` | `MXFP8BlockScaling`, with E8M0 scales |

    Args:
        rules: objects with the attributes of `qwix.QuantizationRule` or `qwix.QtRule`.
        bwd_qtype: the backward type of rules that name none. qwix computes the backward of such rules in high
            precision, which no recipe of jaxfp8 does.

    Returns:
        A list of rules: a path, a recipe, and the operations that the rule is for.

    Raises:
        ValueError: a rule has an option that no recipe has: another type than FP8, weights or activations alone,
            another tile size, static scales, another calibration than absmax, stochastic rounding, or none of the
            operations of `OPERATIONS`.
    """
    return [_rule(f"rules_from_qwix: rules[{i}]", rule, bwd_qtype) for i, rule in enumerate(rules)]


class QtProvider:
    """The rules of a `qwix.QtProvider`, for `quantize_model`. Arguments and errors are those of `rules_from_qwix`.

    Attributes:
        rules: the converted rules, a list of `Rule`.
    """

    def __init__(self, rules: Any, *, bwd_qtype: Any = "float8_e5m2"):
        self.rules = rules_from_qwix(rules, bwd_qtype=bwd_qtype)


def quantize_model(model: Any, provider: QtProvider, *model_inputs: Any, **model_kwargs: Any) -> Any:
    """Give a model the provider's rules, as `qwix.quantize_model` does; the model itself is not changed.

    Args:
        model: a Linen or NNX module.
        provider: the rules for the model.
        model_inputs, model_kwargs: the arguments on which qwix runs an NNX model; this function ignores them.

    Returns:
        A quantized module, of the kind of `model`.

    Raises:
        TypeError: `model` is neither a Linen nor an NNX module, or `provider` not a QtProvider of this module; or there
            are inputs for a Linen model, which qwix refuses too.
    """
    if not isinstance(provider, QtProvider):
        raise TypeError(f"quantize_model: provider: expected a jaxfp8.integrations.qwix.QtProvider, got {provider!r}")
    if isinstance(model, nn.Module):
        if model_inputs or model_kwargs:
            raise TypeError(
                "quantize_model: model_inputs: expected none for a Linen model; all of its methods have rules"
            )
        return linen.quantize(model, provider.rules)
    if isinstance(model, nnx.Module):
        # `nnx.quantize` changes its model in place; qwix leaves it as it is.
        return jaxfp8_nnx.quantize(nnx.clone(model), provider.rules)
    raise TypeError(f"quantize_model: model: expected a Linen or an NNX module, got {model!r}")


def _rule(where: str, rule, bwd_qtype) -> Rule:
    operations = tuple(rule.op_names)
    supported = tuple(operation for operation in OPERATIONS if operation in operations)
    weight, act = _type(rule.weight_qtype), _type(rule.act_qtype)
    if weight is None:
        if act is not None:
            raise ValueError(f"{where}: weight_qtype: expected the type of act_qtype, {act}, got None")
        # A rule for other operations keeps them, so that it does not win over the next rule.
        return Rule(rule.module_path, None, supported or operations)
    if operations and not supported:
        raise ValueError(f"{where}: op_names: expected {' or '.join(OPERATIONS)} among them, got {operations}")
    backward = _type(getattr(rule, "bwd_qtype", None)) or _type(bwd_qtype)
    _refuse_options(where, rule)
    return Rule(rule.module_path, _recipe(where, rule, weight, act, backward), supported)


def _type(qtype) -> str | None:
    return qtype if qtype is None or isinstance(qtype, str) else jnp.dtype(qtype).name


def _recipe(where: str, rule, weight: str, act: str | None, backward: str):
    tile_size = rule.tile_size
    # 1. "mxfp8" is e4m3 in blocks of 32.
    if "mxfp8" in (weight, act):
        if tile_size not in (None, 32):
            raise ValueError(f"{where}: tile_size: expected None or 32 with mxfp8, got {tile_size}")
        tile_size = 32
    weight, act, backward = ("float8_e4m3fn" if name == "mxfp8" else name for name in (weight, act, backward))
    # 2. The types name the format, the tile size the recipe.
    fp8_format = FORMATS.get((weight, backward))
    if weight != act or fp8_format is None:
        raise ValueError(
            f"{where}: weight_qtype, act_qtype, bwd_qtype: expected float8_e4m3fn for all, float8_e5m2 for all, or "
            f"float8_e4m3fn, float8_e4m3fn and float8_e5m2, got {weight}, {act} and {backward}"
        )
    if tile_size is None:
        per_tensor = getattr(rule, "disable_channelwise_axes", False)
        return (Float8CurrentScaling if per_tensor else Float8RowwiseScaling)(fp8_format=fp8_format)
    by_size = {128: Float8BlockScaling, 32: MXFP8BlockScaling}
    if tile_size not in by_size:
        raise ValueError(f"{where}: tile_size: expected None, 128 or 32, got {tile_size}")
    return by_size[tile_size](fp8_format=fp8_format)


def _refuse_options(where: str, rule) -> None:
    """Raise a ValueError for an option that no recipe has, unless the option has qwix's default."""
    allowed = {
        "act_static_scale": (None, False),
        "weight_calibration_method": ("absmax",),
        "act_calibration_method": (None, "absmax"),
        "bwd_calibration_method": ("absmax",),
        "bwd_weight_grad_tile_size": (None, 1, rule.tile_size),
        "bwd_stochastic_rounding": (None,),
        "additional_qt_config": (None, {}),
    }
    for name, values in allowed.items():
        # A QuantizationRule lacks options that a QtRule has; an option that is not there is at its default.
        value = getattr(rule, name, values[0])
        if value not in values:
            raise ValueError(f"{where}: {name}: expected {' or '.join(map(repr, values))}, got {value!r}")
