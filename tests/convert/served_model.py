"""A transformer of two layers, trained a few steps by a recipe, and the file of its
weights.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from promotion import as_users_have_jax

import jaxfp8

WIDTH, HIDDEN, HEADS, LAYERS = 160, 320, 4, 2  # blocks of 128 have a rest
VOCABULARY, BATCH, LENGTH = 64, 8, 32
STEPS, BATCHES = 24, 4  # trained on, and compared
RECIPES = {
    "tensor, static": jaxfp8.DelayedScaling(amax_history_len=8),
    "tensor, current": jaxfp8.Float8CurrentScaling(),
    "rows": jaxfp8.Float8RowwiseScaling(),
    "block128": jaxfp8.Float8BlockScaling(),
    "mxfp8": jaxfp8.MXFP8BlockScaling(),
}


class Block(nn.Module):
    recipe: Any
    dtype: Any

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=self.dtype,
            dot_general_cls=self.recipe and jaxfp8.make_dot_general_cls(self.recipe),
        )
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        qkv = dense(3 * WIDTH, name="qkv")(norm(name="norm1")(x))
        query, key, value = jnp.unstack(
            qkv.reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS), axis=2
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(WIDTH, name="out")(mixed.reshape(x.shape))
        h = dense(HIDDEN, name="up")(norm(name="norm2")(x)).astype(jnp.float32)
        return x + dense(WIDTH, name="down")(nn.gelu(h).astype(self.dtype))


class Transformer(nn.Module):
    recipe: Any
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=self.dtype)
        x = embed(VOCABULARY, name="embed")(tokens)
        x = x + embed(LENGTH, name="position")(jnp.arange(tokens.shape[1]))
        for i in range(LAYERS):
            x = Block(self.recipe, self.dtype, name=f"block{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        y = nn.Dense(VOCABULARY, dtype=self.dtype, name="logits")(x)
        return y.astype(jnp.float32)


def batch(seed):
    """Sequences int32 `[batch, length + 1]` in which a token is that before it times 5
    plus 0 to 3.
    """
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(VOCABULARY, size=BATCH)]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + rng.integers(4, size=BATCH)) % VOCABULARY)
    return np.stack(tokens, axis=1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        model: the model.
        before: its variables half-way.
        variables: its variables at the end.
        tokens: int32 `[batches, batch, length]`, which it was not trained on.
        logits: f32 `[batches, batch, length, vocabulary]`, those of the next training
            step if a batch of `tokens` is its input.
    """

    model: Transformer
    before: Any
    variables: Any
    tokens: np.ndarray
    logits: np.ndarray


@functools.cache
def trained(name) -> Trained:
    """Train in float32 by the recipe of this name."""
    with as_users_have_jax():
        model = Transformer(RECIPES[name])
        variables = jax.jit(model.init)(jax.random.key(0), batch(0)[:, :-1])
        train = jaxfp8.linen.TrainState.create(
            apply_fn=model.apply, params=variables, tx=optax.adam(3e-3)
        )

        def loss_fn(variables, tokens):
            logits = model.apply(variables, tokens[:, :-1])
            loss = optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            )
            return loss.mean(), logits

        @jax.jit
        def step(train, tokens):
            grads, logits = jaxfp8.grad(loss_fn, has_aux=True)(train.params, tokens)
            return train.apply_gradients(grads=grads), logits

        before = None
        for i in range(STEPS):
            if i == STEPS // 2:
                before = train.params
            train, _ = step(train, batch(i))
        batches = np.stack([batch(STEPS + i) for i in range(BATCHES)])
        logits = np.stack([step(train, tokens)[1] for tokens in batches])
    return Trained(model, before, train.params, batches[:, :, :-1], logits)


def forward(model, variables, tokens, **compiler_options):
    """Logits f32 `[batches, batch, length, vocabulary]` of a compiled forward pass."""
    with as_users_have_jax():
        apply = jax.jit(model.apply, compiler_options=compiler_options)
        return np.stack([apply(variables, batch) for batch in tokens])
