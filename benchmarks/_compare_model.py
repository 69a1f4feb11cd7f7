"""The model of the comparison: a character-level transformer, one for all arms."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxfp8.linen import Fp8DotGeneral

HEAD = 32  # width of an attention head
DENSE = functools.partial(nn.Dense, dot_general_cls=Fp8DotGeneral)


def attend(query, key, value):
    """Compute causal attention, `[batch, length, heads, HEAD]`; scores and softmax in
    float32.

    `jax.nn.dot_product_attention` cannot be used here, because it has no float16 on
    CPUs.
    """
    scores = (
        jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        * HEAD**-0.5
    )
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


class Block(nn.Module):
    """Pre-norm attention and MLP, whose four projections `dense` makes."""

    dtype: Any
    dense: Callable[..., nn.Module] = DENSE

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(self.dense, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        batch, length, width = x.shape

        qkv = dense(3 * width, name="qkv")(norm()(x)).reshape(
            batch, length, 3, width // HEAD, HEAD
        )
        query, key, value = jnp.unstack(qkv, axis=2)
        x = x + dense(width, name="out")(attend(query, key, value).reshape(x.shape))
        hidden = nn.gelu(dense(4 * width, name="up")(norm()(x)))
        return x + dense(width, name="down")(hidden)


class LanguageModel(nn.Module):
    """A small transformer. Parameters, softmax and loss are in float32 in every arm.

    Attributes:
        vocabulary: the number of different characters.
        length: the number of characters of the context.
        dtype: the compute dtype of all layers.
        width: the width of the model, a multiple of `HEAD`.
        layers: the number of blocks.
        dense: a function that makes a projection of a block; the default takes the
            recipe of `autocast`.
    """

    vocabulary: int
    length: int
    dtype: Any
    width: int
    layers: int
    dense: Callable[..., nn.Module] = DENSE

    @nn.compact
    def __call__(self, tokens):
        """Return logits, f32 `[batch, length, vocabulary]`, of the characters after
        int32 `[batch, length]`.
        """
        embed = functools.partial(nn.Embed, features=self.width, dtype=self.dtype)
        x = embed(self.vocabulary, name="embed")(tokens)
        x = x + embed(self.length, name="position")(jnp.arange(tokens.shape[1]))
        for i in range(self.layers):
            x = Block(self.dtype, self.dense, name=f"block{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype, name="logits")(x).astype(
            jnp.float32
        )
