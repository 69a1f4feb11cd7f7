"""The layers that the GPU benchmark times, each of jaxfp8, with Flax's FP8 class, and
in bfloat16.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxfp8

# Peers are compiled as XLA chooses, and without Triton's GEMMs, which are slower for
# some shapes; the faster counts.
COMPILERS = {"": None, ", no triton": {"xla_gpu_enable_triton_gemm": False}}
# The names of candidates; peers also get the suffixes of `COMPILERS`.
DROP_IN, FLAX, BF16 = "jaxfp8 drop-in", "flax", "bf16"
OWN = "jaxfp8 own"
CLASSES = {DROP_IN: jaxfp8.Fp8DotGeneral, FLAX: nn.Fp8DotGeneral, BF16: None}


def is_peer(name: str) -> bool:
    return not name.startswith("jaxfp8")


def dense(name: str, features: int) -> nn.Module:
    if name == OWN:
        return jaxfp8.linen.Dense(features, use_bias=False, dtype=jnp.bfloat16)
    return nn.Dense(
        features, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=CLASSES[name]
    )


class UnfusedGatedMLP(nn.Module):
    """SwiGLU of three Dense layers."""

    name_of_dense: str
    hidden: int

    @nn.compact
    def __call__(self, x):
        layer = functools.partial(dense, self.name_of_dense)
        return layer(x.shape[-1])(
            nn.silu(layer(self.hidden)(x)) * layer(self.hidden)(x)
        )


def gated_mlp(name: str, hidden: int) -> nn.Module:
    """Return the gated MLP of a candidate; "jaxfp8 own" is the fused layer."""
    if name == OWN:
        return jaxfp8.linen.GatedMLP(hidden, dtype=jnp.bfloat16)
    return UnfusedGatedMLP(name, hidden)


class TransformerLayer(nn.Module):
    """A layer of Llama: RMSNorm, grouped-query attention, SwiGLU; without positions,
    which need no GEMM.
    """

    name_of_dense: str
    heads: int
    key_heads: int
    hidden: int
    attention: Any  # implementation of jax.nn.dot_product_attention

    @nn.compact
    def __call__(self, x):
        layer, norm = (
            functools.partial(dense, self.name_of_dense),
            functools.partial(nn.RMSNorm, dtype=jnp.bfloat16),
        )
        batch, length, width = x.shape
        size = width // self.heads
        h = norm()(x)
        query = layer(width)(h).reshape(batch, length, self.heads, size)
        key, value = (
            layer(self.key_heads * size)(h).reshape(batch, length, self.key_heads, size)
            for _ in range(2)
        )
        attended = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.attention
        )
        x = x + layer(width)(attended.reshape(x.shape))
        return x + gated_mlp(self.name_of_dense, self.hidden)(norm()(x))


def forward_and_backward(model):
    """Return a function `(variables, x, grad) -> (y, gradients of variables and x)`."""

    def step(variables, x, grad):
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, vjp(grad)

    return step
