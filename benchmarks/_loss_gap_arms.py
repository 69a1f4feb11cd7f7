"""The arms of `loss_gap.py`: recipes, Flax's FP8, and the ablation of delayed
scaling.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from _compare_arms import Arm as Precision
from _compare_model import DENSE, LanguageModel
from jax import lax

import jaxfp8

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / "examples")]
import custom_recipes  # noqa: E402

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OPERANDS = ("linear_input", "linear_weight", "linear_grad_output")


class Arm(NamedTuple):
    """One way to train the model.

    Attributes:
        title: the row of a table.
        recipe: of the projections that are `Fp8DotGeneral` or jaxfp8's own layer; None
            has no FP8 of jaxfp8.
        dense: the layer.
        dtype: of everything that is not FP8.
        rules: of `jaxfp8.linen.quantize`, for layers that differ from the others.
        reference: the arm whose loss is subtracted.
        after: `(arm, part)`: the last `part` of the steps, after those of that arm;
            None for a whole run.
        beside: the arm whose loss the second difference is to.
        layers: of the model.
    """

    title: str
    recipe: jaxfp8.recipes.Recipe | None = None
    dense: Callable[..., nn.Module] = DENSE
    dtype: Any = jnp.bfloat16
    rules: tuple = ()
    reference: str = "bf16"
    after: tuple[str, float] | None = None
    beside: str = "delayed"
    layers: int = 2

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype, "", self.recipe)

    def model(self, vocabulary: int, length: int, width: int) -> nn.Module:
        model = LanguageModel(
            vocabulary, length, self.dtype, width, self.layers, self.dense
        )
        return jaxfp8.linen.quantize(model, self.rules) if self.rules else model


@dataclasses.dataclass(frozen=True)
class StochasticQuantizer(jaxfp8.Quantizer):
    """Current scaling that rounds up or down at random, so that codes are right on
    average; e5m2.

    The state counts the steps: each has random numbers of its own. The amax tells
    layers apart.
    """

    def init(self):
        return {"steps": jnp.zeros((1,), jnp.float32)}

    def quantize(self, x, state):
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        scale_inv = jnp.where(amax > 0, amax, 1).reshape(1) / 57344  # the largest e5m2
        scaled = x.astype(jnp.float32) / scale_inv
        key = jax.random.fold_in(
            jax.random.key(0), state["steps"][0].astype(jnp.uint32)
        )
        key = jax.random.fold_in(key, lax.bitcast_convert_type(amax, jnp.uint32))
        # e5m2 has two bits of mantissa below the leading one, and -14 is the exponent
        # of its subnormals.
        exponent = jnp.maximum(jnp.frexp(scaled)[1] - 1, -14)
        ulp = jnp.ldexp(jnp.ones_like(scaled), exponent - 2)
        codes = jnp.floor(scaled / ulp + jax.random.uniform(key, x.shape)) * ulp
        codes = jnp.clip(codes, -57344, 57344).astype(jnp.float8_e5m2)
        return jaxfp8.QTensor(codes, scale_inv), {"steps": state["steps"] + 1}


@dataclasses.dataclass(frozen=True)
class InputQuantizer(jaxfp8.Quantizer):
    """Current scaling in e4m3 for the one product that is named; the other one reads
    the input as it is.
    """

    product: str

    def quantize(self, x, state):
        q, _ = jaxfp8.recipes.Float8CurrentScalingQuantizer(E4M3).quantize(x, None)
        one = jnp.ones((1,), jnp.float32)
        if self.product == "fprop":
            return jaxfp8.QTensor(q.data, q.scale_inv, x.T, one), state
        return jaxfp8.QTensor(x, one, q.data.T, q.scale_inv), state


@dataclasses.dataclass(frozen=True)
class MantissaQuantizer(jaxfp8.Quantizer):
    """Rounding to as many bits of mantissa, with the exponents of bfloat16: nothing
    saturates, nothing is flushed.

    It needs no scale, so that no recipe of scales can be better than it with as many
    bits.
    """

    bits: int

    def quantize(self, x, state):
        rounded, one = (
            lax.reduce_precision(x, exponent_bits=8, mantissa_bits=self.bits),
            jnp.ones((1,), jnp.float32),
        )
        return jaxfp8.QTensor(rounded, one, rounded.T, one), state


def mantissa(bits: int) -> jaxfp8.CustomRecipe:
    """Make the recipe that rounds input and kernel to `bits` of mantissa, and the
    gradient to one less, as e5m2 has.
    """
    counts = dict(zip(OPERANDS, (bits, bits, bits - 1), strict=True))
    return jaxfp8.CustomRecipe(
        lambda role: MantissaQuantizer(counts[role]) if role in counts else None
    )


DEVICES = 8


@jax.custom_vjp
def one_a_device(kernel):
    """A copy of the kernel for each device, whose gradients a ring of devices adds in
    bfloat16: each addition is rounded.
    """
    return jnp.broadcast_to(kernel, (DEVICES, *kernel.shape))


def add_in_a_ring(_, gradients):
    total = gradients[0]
    for gradient in gradients[1:]:
        total = lax.reduce_precision(total + gradient, exponent_bits=8, mantissa_bits=7)
    return (total,)


one_a_device.defvjp(lambda kernel: (one_a_device(kernel), None), add_in_a_ring)


class DenseOfDevices(nn.Module):
    """`jaxfp8.linen.Dense` as eight devices compute it, each a part of the batch, and
    add the gradients of the kernel.
    """

    features: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x):
        assert not self.use_bias
        init, shape = nn.linear.default_kernel_init, (x.shape[-1], self.features)
        kernels = one_a_device(self.param("kernel", init, shape))
        rows = x.reshape(DEVICES, -1, x.shape[-1])
        y = jaxfp8.linen.Fp8DotGeneral()(
            rows,
            kernels,
            (((2,), (1,)), ((0,), (0,))),
            preferred_element_type=self.dtype,
        )
        return y.reshape(*x.shape[:-1], self.features)


def only(role: str, quantizer: jaxfp8.Quantizer):
    """A recipe that quantizes one tensor of the product."""
    return jaxfp8.CustomRecipe(lambda asked: quantizer if asked == role else None)


def stochastic(role: str):
    if role == "linear_grad_output":
        return StochasticQuantizer()
    return (
        jaxfp8.recipes.Float8CurrentScalingQuantizer(jnp.float8_e4m3fn)
        if role in OPERANDS
        else None
    )


def kernel_and_grad(role: str):
    """Delayed scaling of all but the input."""
    dtypes = {"linear_weight": E4M3, "linear_grad_output": E5M2}
    return (
        jaxfp8.recipes.DelayedScalingQuantizer(dtypes[role]) if role in dtypes else None
    )


delayed = jaxfp8.DelayedScaling()
current = jaxfp8.Float8CurrentScaling()

# Recipes, and Flax's FP8.
RECIPES = {
    "bf16": Arm("bf16"),
    "delayed": Arm("delayed scaling, drop-in product", delayed),
    "own_layer": Arm("delayed scaling, `linen.Dense`", delayed, jaxfp8.linen.Dense),
    "flax": Arm(
        "Flax, `Fp8DirectDotGeneralOp`",
        dense=functools.partial(nn.Dense, dot_general_cls=nn.Fp8DirectDotGeneralOp),
    ),
    # Flax's other FP8 product: it dequantizes before the product, where "flax"
    # multiplies codes.
    "flax_dequantized": Arm(
        "Flax, `Fp8DotGeneralOp`",
        dense=functools.partial(nn.Dense, dot_general_cls=nn.Fp8DotGeneralOp),
    ),
    "current": Arm("current scaling", current),
    "rowwise": Arm("row-wise scaling", jaxfp8.Float8RowwiseScaling()),
    "block": Arm("block scaling", jaxfp8.Float8BlockScaling()),
    "mxfp8": Arm("MXFP8", jaxfp8.MXFP8BlockScaling()),
    "static": Arm("constant scales of x and kernel", jaxfp8.StaticScaling()),
    "wgrad_bf16": Arm(
        "delayed scaling, wgrad in bf16", jaxfp8.ByProduct(delayed, delayed, None)
    ),
    "fprop_bf16": Arm(
        "delayed scaling, fprop in bf16", jaxfp8.ByProduct(None, delayed, delayed)
    ),
}

# One change to "delayed" each. Precise accumulation is none of them: it changes nothing
# where products accumulate in float32 anyway, as on CPUs.
ABLATION = {
    # The path of custom recipes without a quantizer: what a change of the program alone
    # does to the loss.
    "no_quantizer": Arm(
        "no tensor in FP8 (control)", jaxfp8.CustomRecipe(lambda role: None)
    ),
    "only_input": Arm(
        "the input alone in FP8",
        only("linear_input", jaxfp8.recipes.DelayedScalingQuantizer(E4M3)),
    ),
    "input_in_fprop": Arm(
        "the input alone, of fprop", only("linear_input", InputQuantizer("fprop"))
    ),
    "input_in_wgrad": Arm(
        "the input alone, of wgrad", only("linear_input", InputQuantizer("wgrad"))
    ),
    "only_kernel": Arm(
        "the kernel alone",
        only("linear_weight", jaxfp8.recipes.DelayedScalingQuantizer(E4M3)),
    ),
    "only_grad": Arm(
        "the output's gradient alone",
        only("linear_grad_output", jaxfp8.recipes.DelayedScalingQuantizer(E5M2)),
    ),
    "all_but_input": Arm("kernel and gradient", jaxfp8.CustomRecipe(kernel_and_grad)),
    "e4m3_grad": Arm(
        "gradients in e4m3", jaxfp8.DelayedScaling(fp8_format=jaxfp8.Format.E4M3)
    ),
    "history_1": Arm("a history of 1 step", jaxfp8.DelayedScaling(amax_history_len=1)),
    "history_16": Arm(
        "a history of 16 steps", jaxfp8.DelayedScaling(amax_history_len=16)
    ),
    "ends_in_bf16": Arm(
        "first and last layer in bf16",
        delayed,
        rules=((r"block0/qkv", None), (r"block1/down", None)),
    ),
    # The head's three products too, whose other arms compute logits in bf16.
    "delayed_logits": Arm(
        "FP8 logits, above delayed scaling",
        delayed,
        rules=((r"logits", delayed),),
        reference="delayed",
    ),
    "current_logits": Arm(
        "FP8 logits, above current scaling",
        current,
        rules=((r"logits", current),),
        reference="current",
    ),
    # Beside "current", which rounds to nearest.
    "stochastic_grad": Arm(
        "current scaling, gradients rounded at random", jaxfp8.CustomRecipe(stochastic)
    ),
    # What the devices of a mesh add.
    "narrow_sums": Arm(
        "wgrad and its sum over 8 devices in bf16, above `linen.Dense`",
        jaxfp8.DelayedScaling(wgrad_dtype=jnp.bfloat16),
        DenseOfDevices,
        reference="own_layer",
    ),
    # Without bfloat16, neither before the quantizers nor after the products.
    "f32": Arm("float32", dtype=jnp.float32, reference="f32"),
    "delayed_f32": Arm(
        "float32 around FP8, above float32", delayed, dtype=jnp.float32, reference="f32"
    ),
    # Rounding alone, without the limits of FP8's exponents; e4m3 has 3 bits, and no FP8
    # of GPUs has 4.
    "mantissa_3": Arm("3 bits of mantissa, any exponent", mantissa(3)),
    "mantissa_4": Arm("4 bits of mantissa, any exponent", mantissa(4)),
}

# fprop in bf16, whose new quantizers start with the scales of the tensors at hand.
_started = jaxfp8.DelayedScaling(first_step="current")
_fprop_bf16 = jaxfp8.ByProduct(None, _started, _started)


def last(part: float) -> Arm:
    """Delayed scaling, with fprop in bf16 for the last `part` of the steps."""
    title = f"fprop in bf16 for the last {part:.0%} of the steps"
    return Arm(title, _fprop_bf16, after=("delayed", part))


_FOUR = {"reference": "bf16_4", "beside": "delayed_4", "layers": 4}

# Two codes for the worst columns of each input: of 7 % and of 33 % more products.
RESIDUAL = {
    "residual_21": Arm(
        "two codes for the worst 21 % of the input's columns",
        custom_recipes.residual(0.21),
    ),
    "residual_all": Arm("two codes for all of the input", custom_recipes.residual(1.0)),
}
ABLATION |= RESIDUAL

# Each is evaluated twice: as served in bf16 and as served in FP8.
SERVED = {
    "bf16": RECIPES["bf16"],
    "delayed": RECIPES["delayed"],
    "fprop_bf16": RECIPES["fprop_bf16"],
    "last_5": last(0.05),
    "last_10": last(0.1),
    "last_20": last(0.2),
    "bf16_4": Arm("4 blocks: bf16", **_FOUR),
    "delayed_4": Arm("4 blocks: delayed scaling", delayed, **_FOUR),
    "last_block_4": Arm(
        "4 blocks: the last one in bf16",
        delayed,
        rules=((r"block3/.*", None),),
        **_FOUR,
    ),
} | RESIDUAL
ARMS = RECIPES | ABLATION | SERVED
