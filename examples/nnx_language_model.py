"""The language model in Flax NNX: the same small transformer on the same text, trained
in bf16 and in FP8.

Switching to FP8 is one argument of `nnx.Linear`, `dot_general` (see `Block`). The
training step is the same for both: `jaxfp8.nnx.value_and_grad` differentiates
parameters and FP8 state, and `jaxfp8.nnx.Optimizer` gives the parameters to optax and
stores the state.
"""

import time

import _options
import _report
import jax
import jax.numpy as jnp
import optax
from _data import Corpus
from flax import nnx
from tqdm import tqdm

import jaxfp8.nnx

LENGTH = 128  # characters of context
WIDTH, HEADS, LAYERS = 128, 4, 2


class Block(nnx.Module):
    """Pre-norm attention and MLP; attention scores stay in bf16."""

    def __init__(self, make_dot_general, rngs):
        def linear(inputs, outputs):
            # The one argument: jax.lax.dot_general is bf16, a
            # jaxfp8.nnx.Fp8DotGeneral() of its own is FP8.
            dot_general = make_dot_general()
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=False,
                dtype=jnp.bfloat16,
                dot_general=dot_general,
                rngs=rngs,
            )

        self.norm1 = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.norm2 = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def __call__(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, HEADS, width // HEADS)
        query, key, value = jnp.unstack(qkv, axis=2)
        attended = jax.nn.dot_product_attention(
            query, key, value, is_causal=True
        ).reshape(x.shape)
        x = x + self.out(attended)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class LanguageModel(nnx.Module):
    """A small transformer. Embedding, norms and logits stay in bf16, as usual in FP8
    training.
    """

    def __init__(self, vocabulary, make_dot_general, rngs):
        self.embed = nnx.Embed(vocabulary, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List(Block(make_dot_general, rngs) for _ in range(LAYERS))
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, vocabulary, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x)).astype(jnp.float32)


ARMS = {"bf16": lambda: jax.lax.dot_general, "jaxfp8": jaxfp8.nnx.Fp8DotGeneral}


def loss_fn(model, batch):
    """Return the mean cross entropy of the next character, in nat."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch[:, :-1]), batch[:, 1:]
    ).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = jaxfp8.nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def mean_loss(model, batches):
    return jax.lax.map(lambda batch: loss_fn(model, batch), batches).mean()


def create(make_dot_general, vocabulary, seed, steps):
    model = LanguageModel(vocabulary, make_dot_general, nnx.Rngs(seed))
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps, 3e-4)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1)
    )
    return model, jaxfp8.nnx.Optimizer(model, tx, wrt=nnx.Param)


def main():
    args = _options.parse(
        __doc__, ARMS, steps=150, batch=16, tiny_batch=2, length=LENGTH
    )
    corpus = Corpus()
    arms = {
        name: create(ARMS[name], len(corpus.vocabulary), args.seed, args.steps)
        for name in args.arms
    }
    runs = {name: _report.Run() for name in arms}
    batches = corpus.random_batches(args.seed, args.steps, args.batch, LENGTH)
    for batch in tqdm(batches, total=args.steps, unit="step", dynamic_ncols=True):
        for name, (model, optimizer) in arms.items():
            start = time.perf_counter()
            runs[name].train_losses.append(float(train_step(model, optimizer, batch)))
            runs[name].step_ms.append(1e3 * (time.perf_counter() - start))
    validation = corpus.validation_batches(16, LENGTH, limit=2 if args.tiny else None)
    for name, (model, _) in arms.items():
        runs[name].validation.append((args.steps, float(mean_loss(model, validation))))
    print(_report.table(_report.summarize([runs])))


if __name__ == "__main__":
    main()
