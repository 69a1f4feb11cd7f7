"""How much program a Dense layer's training step is, beside Flax's own FP8 class."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from aot import count

import jaxfp8
from jaxfp8 import ops

X, GRAD = np.ones((64, 128), oracle.BF16), np.ones((64, 256), oracle.BF16)


def operations(dot_general_cls, platform) -> int:
    """Of forward and backward of a Dense layer in bfloat16."""
    options = {"use_bias": False, "dtype": jnp.bfloat16}
    model = nn.Dense(256, dot_general_cls=dot_general_cls, **options)
    variables = model.init(jax.random.key(0), X)

    def step(variables, x, grad):
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, vjp(grad)

    traced = jax.jit(step).trace(variables, X, GRAD)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return count.stablehlo_operations(text)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.usefixtures("cuda_custom_calls")
def test_operations_of_a_dense_step(platform):
    if platform == "cpu" and not ops._ffi.is_loaded("cpu"):
        pytest.skip("needs the CPU library: the reference writes the codec out")
    ours, flax = (
        operations(cls, platform) for cls in (jaxfp8.Fp8DotGeneral, nn.Fp8DotGeneral)
    )
    # Four are bytes of codes kept for the backward. On a CPU the products are written
    # out, and the factors of scales.
    assert ours <= (55 if platform == "cpu" else 14)
    assert ours < 0.45 * flax  # 132 with JAX 0.12
