"""How much Python and how much program a Dense layer's training step is, beside Flax's
own FP8 class.
"""

import pathlib
import re
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8 import ops

X, GRAD = np.ones((64, 128), oracle.BF16), np.ones((64, 256), oracle.BF16)


def step_of(layers: int, dot_general_cls):
    """Forward and backward of Dense layers in bfloat16."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(layers):
                x = nn.Dense(
                    256,
                    use_bias=False,
                    dtype=jnp.bfloat16,
                    dot_general_cls=dot_general_cls,
                )(x)
            return x

    model = Model()
    variables = model.init(jax.random.key(0), X)

    def step(variables, x, grad):
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, vjp(grad)

    return jax.jit(step).trace(variables, X, GRAD)


def operations(traced, platform) -> int:
    """StableHLO operations and calls in the lowered program, constants and shape
    changes included.
    """
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return len(re.findall(r"^\s+%\S+ = ", text, re.MULTILINE))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_operations_of_a_dense_step(platform, monkeypatch):
    if platform == "cuda" and not jaxfp8.has_cuda_kernels():
        monkeypatch.setattr(ops._ffi, "_has_cuda_kernels", True)
    if platform == "cpu" and not ops._ffi.has_cpu_kernels:
        pytest.skip("needs the CPU library: the reference writes the codec out")
    ours, flax = (
        operations(step_of(1, cls), platform)
        for cls in (jaxfp8.Fp8DotGeneral, nn.Fp8DotGeneral)
    )
    # Four are bytes of codes kept for the backward. On a CPU the products are written
    # out, and the factors of scales.
    assert ours <= (55 if platform == "cpu" else 14)
    assert ours < 0.45 * flax  # 132 with JAX 0.12


@pytest.mark.parametrize(
    "recipe, most",
    [
        (jaxfp8.DelayedScaling(), 7),
        (jaxfp8.MXFP8BlockScaling(), 7),
        (jaxfp8.Float8CurrentScaling(), 8),
    ],
)
def test_frames_from_a_layer_to_an_op(recipe, most):
    """What a reader of a traceback goes through, the layer's and the op's frames
    included. One is `multiply`, which tools replace.

    Current scaling has one frame more: its quantizer chooses the scale by two ops.
    """
    tool = pathlib.Path(__file__).parents[1] / "tools" / "frames.py"
    depths = {
        op: len(names)
        for op, names in runpy.run_path(str(tool))["frames"](recipe).items()
    }
    assert any("matmul" in op for op in depths) and any(
        "quantize" in op for op in depths
    ), depths
    assert 4 < max(depths.values()) <= most, depths
