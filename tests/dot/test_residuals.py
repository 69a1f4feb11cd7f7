"""What a product keeps for its backward, and what rematerialization policies make run
again.
"""

import dataclasses
import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from aot import count
from equality import assert_same_bits
from lowering import cuda_text
from programs.cases import MATMUL

import jaxfp8
from jaxfp8 import checkpoint_policies as policies, ops
from jaxfp8.dot._fused_input import Pair

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
SAVE_AS_MAXTEXT = jax.checkpoint_policies.save_only_these_names("te_quantization")
X, KERNEL = np.full((32, 64), 0.5, oracle.BF16), np.full((64, 48), 0.25, np.float32)


def residual_bytes(dot_general_cls, m, k, n, **options) -> int:
    """What a bfloat16 Dense keeps."""
    model = nn.Dense(
        n, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=dot_general_cls
    )
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return count.residual_bytes(model.apply, variables, x)


def test_residuals_are_the_codes():
    """One byte for each element of input and kernel, and the state; bfloat16 keeps two,
    Flax's FP8 product three.
    """
    m, k, n = 8192, 4096, 14336
    codes = m * k + k * n
    assert codes == 88 * 2**20
    ours = residual_bytes(jaxfp8.Fp8DotGeneral, m, k, n)
    # three histories of 1024 and a few scales
    assert 0 <= ours - codes < 3 * 4 * 1024 + 100
    assert residual_bytes(None, m, k, n) == 2 * codes
    assert residual_bytes(nn.Fp8DotGeneral, m, k, n) > 2.9 * codes


def test_a_pair_of_kernels_keeps_nothing():
    """Its values are a stack, so that the backward takes apart the gradient."""
    pair = Pair(KERNEL, KERNEL)
    assert count.residual_bytes(lambda pair: pair.values(), pair) == 0


def gradient_calls(policy, after) -> Counter:
    """The custom calls of a training step on CUDA, with `after` applied to the product,
    as lowered: no XLA yet.
    """

    def loss(x, kernel, state):
        return after(
            jaxfp8.dot_general(jnp.sin(x), kernel, MATMUL, recipe=RECIPE, state=state)
        ).sum()

    remat = jax.checkpoint(loss, policy=policy)
    step = jax.value_and_grad(lambda *a: remat(*a) ** 2, argnums=(0, 1, 2))
    text = cuda_text(step, X, KERNEL, jaxfp8.init_state(RECIPE))
    return Counter(
        re.findall(
            r"custom_call @jaxfp8_(quantize_transpose|quantize|scaled_matmul)_v", text
        )
    )


# (quantized tensors, GEMMs): x, kernel, grad and three products without remat.
NOTHING_AGAIN = (3, 3)


@pytest.mark.parametrize(
    "policy, nonlinear, linear",
    [
        (policies.save_fp8_residuals_and_gemm_outputs, NOTHING_AGAIN, NOTHING_AGAIN),
        (policies.save_fp8_residuals, (5, 4), NOTHING_AGAIN),
        (SAVE_AS_MAXTEXT, (5, 4), NOTHING_AGAIN),
        (policies.save_gemm_outputs, (5, 3), (5, 3)),
        (jax.checkpoint_policies.everything_saveable, NOTHING_AGAIN, NOTHING_AGAIN),
        (jax.checkpoint_policies.nothing_saveable, (5, 4), (5, 3)),
    ],
    ids="residuals_and_outputs residuals te outputs everything nothing".split(),
)
def test_what_runs_again(policy, nonlinear, linear, monkeypatch):
    if not jaxfp8.ops.has_cuda_kernels():
        monkeypatch.setitem(ops._ffi._modules, "cuda", None)
    for after, (quantized, products) in (
        (jnp.tanh, nonlinear),
        (lambda y: 2 * y, linear),
    ):
        calls = gradient_calls(policy, after)
        assert calls["quantize"] + calls["quantize_transpose"] == quantized
        assert calls["scaled_matmul"] == products


LAYERS = {
    "Dense": jaxfp8.linen.Dense(48, recipe=RECIPE),
    "GatedMLP": jaxfp8.linen.GatedMLP(64, recipe=RECIPE),
    "NormDense": jaxfp8.linen.NormDense(48, recipe=RECIPE),
    "codes": jaxfp8.linen.Dense(48, recipe=RECIPE),
    "FP8 residuals": jaxfp8.linen.GatedMLP(
        64, recipe=dataclasses.replace(RECIPE, fp8_residuals=True)
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "policy", [policies.save_fp8_residuals, SAVE_AS_MAXTEXT], ids=["residuals", "te"]
)
def test_saved_codes_change_no_bit(layer, policy):
    """Codes above 240, which a policy saves, and which the product runs again with."""
    model, x = LAYERS[layer], jax.random.normal(jax.random.key(1), (32, 64))

    def loss(variables, x):
        params, state = variables["params"], variables[OWG]
        if layer == "codes":
            params = jaxfp8.quantize_params(params, state, RECIPE)
        y = model.apply({"params": params, OWG: state}, jnp.sin(x))
        return jnp.sum(jnp.tanh(y))

    variables = model.init(jax.random.key(0), x)
    variables[OWG] = jaxfp8.grad(loss)(variables, x)[OWG]  # scales that fit
    expected = jax.jit(jaxfp8.grad(loss))(variables, x)
    got = jax.jit(jaxfp8.grad(jax.checkpoint(loss, policy=policy)))(variables, x)
    assert_same_bits(got, expected)
