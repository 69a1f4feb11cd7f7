"""The layers that the GPU benchmark times, each of jaxfp8, with Flax's FP8 class, and
in bfloat16.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxfp8

# Peers are compiled as XLA chooses, and without Triton's GEMMs, which are slower for
# some shapes; the faster counts.
COMPILERS = {"": None, ", no triton": {"xla_gpu_enable_triton_gemm": False}}
# The names of candidates; peers also get the suffixes of `COMPILERS`.
DROP_IN, FLAX, BF16 = "jaxfp8 drop-in", "flax", "bf16"
OWN, QUANTIZE = "jaxfp8 own", "jaxfp8 quantize"
RULES = [("head", None), (".*", jaxfp8.DelayedScaling())]
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


def gated_mlp(candidate: str, hidden: int, **options) -> nn.Module:
    """Return the gated MLP of a candidate; "jaxfp8 own" is the fused layer."""
    if candidate == OWN:
        return jaxfp8.linen.GatedMLP(hidden, dtype=jnp.bfloat16, **options)
    return UnfusedGatedMLP(candidate, hidden, **options)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama."""

    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    layers: int


class Block(nn.Module):
    """A layer of Llama: RMSNorm, grouped-query attention, SwiGLU; without positions,
    which need no GEMM.
    """

    name_of_dense: str
    sizes: Sizes
    attention: Callable  # (query, key, value) -> value, causal

    @nn.compact
    def __call__(self, x):
        layer = functools.partial(dense, self.name_of_dense)
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
        batch, length, width = x.shape
        size = width // self.sizes.heads
        features = self.sizes.key_heads * size
        h = norm()(x)
        query, key, value = (
            layer(n)(h).reshape(batch, length, -1, size)
            for n in (width, features, features)
        )
        attended = self.attention(query, key, value).reshape(x.shape)
        x = x + layer(width)(attended)
        mlp = gated_mlp(self.name_of_dense, self.sizes.hidden, name="mlp")
        return x + mlp(norm()(x))


class Llama(nn.Module):
    """A Llama, whose blocks are a Python loop or a scan. Embedding, norms and the head
    stay in bf16.
    """

    name_of_dense: str
    sizes: Sizes
    attention: Callable
    in_a_scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        """Return logits, f32 `[batch, length, vocabulary]`, for int32 `[batch,
        length]`.
        """
        sizes = self.sizes
        block = functools.partial(
            Block, self.name_of_dense, sizes, self.attention, name="block"
        )
        x = nn.Embed(sizes.vocabulary, sizes.width, dtype=jnp.bfloat16)(tokens)
        if self.in_a_scan:
            x, _ = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0, jaxfp8.OVERWRITE_WITH_GRADIENT: 0},
                split_rngs={"params": True},
                length=sizes.layers,
            )(block(), x, None)
        else:
            for i in range(sizes.layers):
                x = block(name=f"block{i}")(x)
        head = nn.Dense(
            sizes.vocabulary, use_bias=False, dtype=jnp.bfloat16, name="head"
        )
        return head(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def with_fused_mlps(params: dict) -> dict:
    """Return the parameters of a Llama of bf16 as that of `OWN` names them."""

    def fused(mlp):
        down, gate, up = (mlp[f"Dense_{i}"]["kernel"] for i in range(3))
        wi = jnp.stack([gate, up], axis=-2)
        return {"wi": {"kernel": wi}, "wo": {"kernel": down}}

    return {
        name: part | {"mlp": fused(part["mlp"])} if "mlp" in part else part
        for name, part in params.items()
    }


def llama(name: str, *arguments) -> nn.Module:
    """Return the Llama of a candidate; `QUANTIZE` is that of bf16 by README's
    conversion.
    """
    if name == QUANTIZE:
        return jaxfp8.quantize(Llama(BF16, *arguments), RULES)
    return Llama(name, *arguments)


def forward_and_backward(model):
    """Return a function `(variables, x, grad) -> (y, gradients of variables and x)`."""

    def step(variables, x, grad):
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, vjp(grad)

    return step
