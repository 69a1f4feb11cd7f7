"""The arms of `loss_gap.py`: recipes, Flax's FP8, and the ablation of delayed scaling."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

import jaxfp8
from jaxfp8.compare._arms import Arm as Precision
from jaxfp8.compare._model import DENSE, LanguageModel

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OPERANDS = ("linear_input", "linear_weight", "linear_grad_output")


class Arm(NamedTuple):
    """One way to train the model.

    Attributes:
        recipe: of the projections that are `Fp8DotGeneral` or jaxfp8's own layer; None has no FP8 of jaxfp8.
        dense: the layer.
        dtype: of everything that is not FP8.
        rules: of `jaxfp8.linen.quantize`, for layers that differ from the others.
        reference: the arm whose loss is subtracted.
    """

    recipe: jaxfp8.recipes.Recipe | None = None
    dense: Callable[..., nn.Module] = DENSE
    dtype: Any = jnp.bfloat16
    rules: tuple = ()
    reference: str = "bf16"

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype, "", self.recipe)

    def model(self, vocabulary: int, length: int, width: int, layers: int) -> nn.Module:
        model = LanguageModel(vocabulary, length, self.dtype, width, layers, self.dense)
        return jaxfp8.linen.quantize(model, self.rules) if self.rules else model


@dataclasses.dataclass(frozen=True)
class StochasticQuantizer(jaxfp8.Quantizer):
    """Current scaling that rounds up or down at random, so that codes are right on average; e5m2.

    The state counts the steps: each has random numbers of its own. The amax tells layers apart.
    """

    def init(self):
        return {"steps": jnp.zeros((1,), jnp.float32)}

    def quantize(self, x, state):
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        scale_inv = jnp.where(amax > 0, amax, 1).reshape(1) / 57344  # the largest e5m2
        scaled = x.astype(jnp.float32) / scale_inv
        key = jax.random.fold_in(jax.random.key(0), state["steps"][0].astype(jnp.uint32))
        key = jax.random.fold_in(key, lax.bitcast_convert_type(amax, jnp.uint32))
        # e5m2 has two bits of mantissa below the leading one, and -14 is the exponent of its subnormals.
        exponent = jnp.maximum(jnp.frexp(scaled)[1] - 1, -14)
        ulp = jnp.ldexp(jnp.ones_like(scaled), exponent - 2)
        codes = jnp.floor(scaled / ulp + jax.random.uniform(key, x.shape)) * ulp
        codes = jnp.clip(codes, -57344, 57344).astype(jnp.float8_e5m2)
        return jaxfp8.QTensor(codes, scale_inv), {"steps": state["steps"] + 1}


@dataclasses.dataclass(frozen=True)
class InputQuantizer(jaxfp8.Quantizer):
    """Current scaling in e4m3 for the one product that is named; the other one reads the input as it is."""

    product: str

    def quantize(self, x, state):
        q, _ = jaxfp8.Float8CurrentScalingQuantizer(E4M3).quantize(x, None)
        one = jnp.ones((1,), jnp.float32)
        if self.product == "fprop":
            return jaxfp8.QTensor(q.data, q.scale_inv, x.T, one), state
        return jaxfp8.QTensor(x, one, q.data.T, q.scale_inv), state


def only(role: str, quantizer: jaxfp8.Quantizer):
    """A recipe that quantizes one tensor of the product."""
    return jaxfp8.CustomRecipe(lambda asked: quantizer if asked == role else None)


def stochastic(role: str):
    if role == "linear_grad_output":
        return StochasticQuantizer()
    return jaxfp8.Float8CurrentScalingQuantizer(jnp.float8_e4m3fn) if role in OPERANDS else None


def kernel_and_grad(role: str):
    """Delayed scaling of all but the input."""
    dtypes = {"linear_weight": E4M3, "linear_grad_output": E5M2}
    return jaxfp8.DelayedScalingQuantizer(dtypes[role]) if role in dtypes else None


delayed = jaxfp8.DelayedScaling()

# Recipes, and Flax's FP8.
RECIPES = {
    "bf16": Arm(),
    "delayed": Arm(delayed),
    "own_layer": Arm(delayed, jaxfp8.linen.Dense),
    "flax": Arm(dense=functools.partial(nn.Dense, dot_general_cls=nn.Fp8DirectDotGeneralOp)),
    "current": Arm(jaxfp8.Float8CurrentScaling()),
    "rowwise": Arm(jaxfp8.Float8RowwiseScaling()),
    "block": Arm(jaxfp8.Float8BlockScaling()),
    "mxfp8": Arm(jaxfp8.MXFP8BlockScaling()),
}

# One change to "delayed" each. Precise accumulation is none of them: it changes nothing where products accumulate in
# float32 anyway, as on CPUs.
ABLATION = {
    # The path of custom recipes without a quantizer: what a change of the program alone does to the loss.
    "no_quantizer": Arm(jaxfp8.CustomRecipe(lambda role: None)),
    "only_input": Arm(only("linear_input", jaxfp8.DelayedScalingQuantizer(E4M3))),
    "only_kernel": Arm(only("linear_weight", jaxfp8.DelayedScalingQuantizer(E4M3))),
    "only_grad": Arm(only("linear_grad_output", jaxfp8.DelayedScalingQuantizer(E5M2))),
    "all_but_input": Arm(jaxfp8.CustomRecipe(kernel_and_grad)),
    "input_in_fprop": Arm(only("linear_input", InputQuantizer("fprop"))),
    "input_in_wgrad": Arm(only("linear_input", InputQuantizer("wgrad"))),
    "e4m3_grad": Arm(jaxfp8.DelayedScaling(fp8_format=jaxfp8.E4M3)),
    "history_1": Arm(jaxfp8.DelayedScaling(amax_history_len=1)),
    "history_16": Arm(jaxfp8.DelayedScaling(amax_history_len=16)),
    "ends_in_bf16": Arm(delayed, rules=((r"block0/qkv", None), (r"block1/down", None))),
    # Beside "current", which rounds to nearest.
    "stochastic_grad": Arm(jaxfp8.CustomRecipe(stochastic)),
    # Without bfloat16, neither before the quantizers nor after the products.
    "f32": Arm(dtype=jnp.float32, reference="f32"),
    "delayed_f32": Arm(delayed, dtype=jnp.float32, reference="f32"),
    # Flax's other FP8 product: it dequantizes before the product, where "flax" multiplies codes.
    "flax_dequantized": Arm(dense=functools.partial(nn.Dense, dot_general_cls=nn.Fp8DotGeneralOp)),
}
ARMS = RECIPES | ABLATION
