"""Trains the language model with custom recipes: stock quantizers mixed, 6-bit
integers, rotated 8-bit integers, residual codes.

A recipe says for each tensor of a product how it becomes codes; a quantizer may bring
its own product. Model, weights and batches are those of language_model.py: the arms
differ only in their recipe.
"""

import dataclasses
import functools
import sys

import _report
import jax
import jax.numpy as jnp
import language_model
from _data import Corpus
from _options import parse
from jax import lax
from tqdm import tqdm

import jaxfp8

# 1. Mix stock quantizers: FP8 with one scale forward, MXFP8 for gradients. ------------


def current_forward_mx_backward(role):
    if role in ("linear_input", "linear_weight"):
        return jaxfp8.recipes.Float8CurrentScalingQuantizer(fp8_dtype=jnp.float8_e4m3fn)
    if role == "linear_grad_output":
        return jaxfp8.recipes.MXFP8Quantizer(fp8_dtype=jnp.float8_e5m2)
    # linear_output and linear_grad_input stay in the dtype that the products return
    return None


# 2. Define a format and a product: integers of 6 bits, each row with its own
#    scale. ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Integers(jaxfp8.Quantizer):
    """Integers of `bits` bits, stored in int8. The rows of x.T are not those of x, so x
    is quantized twice.
    """

    bits: int = 6

    def codes(self, x, up=0.5):
        """Return int8 codes, and scale_inv f32 `[rows, 1]`; 0.5 rounds to nearest, a
        random `up` without bias.
        """
        largest = 2 ** (self.bits - 1) - 1
        scale_inv = (
            jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), 1e-30) / largest
        )
        return jnp.clip(jnp.floor(x / scale_inv + up), -largest, largest).astype(
            jnp.int8
        ), scale_inv

    def quantize(self, x, state):
        x = x.astype(jnp.float32)
        return jaxfp8.QTensor(*self.codes(x), *self.codes(x.T), block=(1, None)), state

    def qgemm(self, qx, qw, *, sx, sw, out_dtype, **others):
        # exact
        sums = lax.dot_general(
            qx, qw, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
        return (sums.astype(jnp.float32) * sx * sw.T).astype(out_dtype)


OPERANDS = ("linear_input", "linear_weight", "linear_grad_output")


def int6(role):
    return Integers(6) if role in OPERANDS else None


# 3. Go further: integers of 8 bits in a rotated basis, rounded without bias; the
#    state counts steps. ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RotatedIntegers(Integers):
    """Integers of both operands after one rotation R, with the same product:
    `(x R) @ (w R).T = x @ w.T`.

    A rotation spreads outliers over many elements. The rotated numbers are close to
    normal, and evenly spaced codes with a scale for each row fit such numbers better
    than FP8, whose codes lie dense around zero.

    Numbers are rounded up or down at random, so that the mean of the codes is the
    number: errors average out over steps. The counter gives each step its own random
    bits, and the amax gives each tensor of a step its own.
    """

    bits: int = 8

    def init(self):
        return {"steps": jnp.zeros((1,), jnp.float32)}

    def quantize(self, x, state):
        rows, columns = rotated(x.astype(jnp.float32)), rotated(x.T.astype(jnp.float32))
        key = jax.random.fold_in(
            jax.random.key(0), state["steps"][0].astype(jnp.uint32)
        )
        key = jax.random.fold_in(
            key, lax.bitcast_convert_type(jnp.max(jnp.abs(rows)), jnp.uint32)
        )
        ups = (
            jax.random.uniform(key, a.shape)
            for key, a in zip(jax.random.split(key), (rows, columns), strict=True)
        )
        codes = (
            part
            for a, up in zip((rows, columns), ups, strict=True)
            for part in self.codes(a, up)
        )
        return jaxfp8.QTensor(*codes, block=(1, None)), {"steps": state["steps"] + 1}


def rotated(x):
    """Multiply the rows of x `[rows, n]` by an orthogonal matrix: random signs, then
    Hadamard matrices of up to 128.
    """
    # the largest power of two that divides the columns
    size = min(x.shape[1] & -x.shape[1], 128)
    index = jnp.arange(size)
    hadamard = 1 - 2 * (lax.population_count(index[:, None] & index[None]) & 1).astype(
        x.dtype
    )
    signs = jax.random.rademacher(jax.random.key(x.shape[1]), (1, x.shape[1]), x.dtype)
    return ((x * signs).reshape(-1, size) @ (hadamard * size**-0.5)).reshape(x.shape)


def rotated_int8(role):
    return RotatedIntegers(8) if role in OPERANDS else None


# 4. Spend products where the error is: residual codes of the input's worst columns. ---


@dataclasses.dataclass(frozen=True)
class ResidualCodes(jaxfp8.Quantizer):
    """Two codes of each element of x in fprop, `x = q1 + q2` with one scale.

    fprop contracts all columns of q1, and of q2 those `part` whose error is largest in
    this batch; wgrad contracts q1. fprop has `1 + part` times its multiplications, a
    step `1 + part / 3`.
    """

    codes: jaxfp8.Quantizer
    part: float

    def init(self):
        return self.codes.init()

    def quantize(self, x, state):
        q, state = self.codes.quantize(x, state)
        rest = x.astype(jnp.float32) / q.scale_inv - q.data.astype(jnp.float32)
        largest = float(jnp.finfo(q.data.dtype).max)  # where q1 saturates
        rest = jnp.clip(rest, -largest, largest)
        both = jnp.stack([q.data, rest.astype(q.data.dtype)], axis=-1)
        both = lax.bitcast_convert_type(both, jnp.uint16)
        return jaxfp8.QTensor(both, q.scale_inv, q.data.T, q.scale_inv), state

    def qgemm(self, qx, qw, *, sx, sw, out_dtype, gemm_type, **others):
        if gemm_type == "fprop":
            qx, qw = self.operands(qx, qw)
        sums = lax.dot_general(
            qx, qw, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (sums * (sx * sw)).astype(out_dtype)

    def operands(self, qx, qw):
        """Return the codes that fprop multiplies, with `k + worst` columns."""
        both = lax.bitcast_convert_type(qx, qw.dtype)
        q1, q2 = both[..., 0], both[..., 1]
        errors = jnp.sum(jnp.square(q2.astype(jnp.float32)), axis=0)
        errors *= jnp.sum(jnp.square(qw.astype(jnp.float32)), axis=0)
        worst = lax.top_k(errors, round(self.part * len(errors)))[1]
        qx = jnp.concatenate([q1, q2[:, worst]], axis=1)
        return qx, jnp.concatenate([qw, qw[:, worst]], axis=1)


def residual(part):
    """Delayed scaling, with residual codes for that part of the input's columns."""
    stock = {
        "linear_weight": jaxfp8.recipes.DelayedScalingQuantizer(jnp.float8_e4m3fn),
        "linear_grad_output": jaxfp8.recipes.DelayedScalingQuantizer(jnp.float8_e5m2),
    }
    stock["linear_input"] = ResidualCodes(stock["linear_weight"], part)
    return jaxfp8.CustomRecipe(stock.get)


RECIPES = {
    "mixed": jaxfp8.CustomRecipe(current_forward_mx_backward),
    "int6": jaxfp8.CustomRecipe(int6),
    "rotated": jaxfp8.CustomRecipe(rotated_int8),
    "residual": residual(0.21),
}
ARMS = {"bf16": None} | {
    name: functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)
    for name, recipe in RECIPES.items()
}
PICTURE = "custom_recipes.png"


def main():
    args = parse(
        __doc__, ARMS, steps=100, batch=8, tiny_batch=2, length=language_model.LENGTH
    )
    corpus = Corpus()
    models = {
        name: language_model.LanguageModel(len(corpus.vocabulary), ARMS[name])
        for name in args.arms
    }
    batches = corpus.random_batches(
        args.seed, args.steps, args.batch, language_model.LENGTH
    )
    validation = corpus.validation_batches(
        16, language_model.LENGTH, limit=2 if args.tiny else 8
    )
    with tqdm(
        total=args.steps, desc="compiling", unit="step", dynamic_ncols=True
    ) as bar:
        optimizer = language_model.make_optimizer(args.steps)
        runs = language_model.train(
            models, optimizer, args.seed, batches, validation, args.steps, bar
        )
    print(_report.table(_report.summarize([runs])))
    _report.plot([runs], PICTURE)
    print(f"picture: {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
