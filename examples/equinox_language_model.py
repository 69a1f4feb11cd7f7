"""The language model in Equinox: the same small transformer on the same text, trained
in bf16 and in FP8.

jaxfp8 has no Equinox layer and needs none: `Linear` below holds its FP8 state in a
field, next to the kernel. The gradient then holds the next state,
`jaxfp8.train.optimizer` keeps optax away from the state, and
`jaxfp8.train.apply_updates` stores it. Layers see one vector, as usual in Equinox;
under `jax.vmap` a layer is still one matrix product.
"""

import time

import _options
import _report
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _data import Corpus
from tqdm import tqdm

import jaxfp8

LENGTH = 128  # characters of context
WIDTH, HEADS, LAYERS = 128, 4, 2


class Linear(eqx.Module):
    """`x @ kernel` for a vector x; in FP8 if there is a recipe, else in the dtype of x.

    FP8 quantizes the f32 kernel itself, without a bf16 copy, and gives the kernel's
    gradient in f32.
    """

    kernel: jax.Array  # f32 (inputs, outputs)
    state: jaxfp8.DotGeneralState | None
    recipe: jaxfp8.DelayedScaling | None = eqx.field(static=True)

    def __init__(self, inputs, outputs, recipe, key):
        self.kernel = jax.random.normal(key, (inputs, outputs)) / inputs**0.5
        self.state = None if recipe is None else jaxfp8.init_state(recipe)
        self.recipe = recipe

    def __call__(self, x):
        if self.recipe is None:
            return x @ self.kernel.astype(x.dtype)
        matmul = (((0,), (0,)), ((), ()))
        return jaxfp8.dot_general(
            x,
            self.kernel,
            matmul,
            recipe=self.recipe,
            state=self.state,
            preferred_element_type=x.dtype,
        )


class Block(eqx.Module):
    """Pre-norm attention and MLP; attention scores stay in bf16."""

    norm1: eqx.nn.RMSNorm
    qkv: Linear
    out: Linear
    norm2: eqx.nn.RMSNorm
    up: Linear
    down: Linear

    def __init__(self, recipe, key):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = (
            eqx.nn.RMSNorm(WIDTH, use_bias=False) for _ in range(2)
        )
        self.qkv = Linear(WIDTH, 3 * WIDTH, recipe, keys[0])
        self.out = Linear(WIDTH, WIDTH, recipe, keys[1])
        self.up = Linear(WIDTH, 4 * WIDTH, recipe, keys[2])
        self.down = Linear(4 * WIDTH, WIDTH, recipe, keys[3])

    def __call__(self, x):
        """Compute the block of x, bf16 `(length, WIDTH)`."""
        qkv = jax.vmap(self.qkv)(jax.vmap(self.norm1)(x)).reshape(
            len(x), 3, HEADS, WIDTH // HEADS
        )
        query, key, value = jnp.unstack(qkv, axis=1)
        attended = jax.nn.dot_product_attention(
            query, key, value, is_causal=True
        ).reshape(x.shape)
        x = x + jax.vmap(self.out)(attended)
        return x + jax.vmap(self.down)(
            jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        )


class LanguageModel(eqx.Module):
    """A small transformer. Embedding, norms and logits stay in bf16, as usual in FP8
    training.
    """

    embed: jax.Array
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    logits: Linear

    def __init__(self, vocabulary, recipe, key):
        embed, position, logits, *blocks = jax.random.split(key, 3 + LAYERS)
        self.embed = jax.random.normal(embed, (vocabulary, WIDTH)) / WIDTH**0.5
        self.position = jax.random.normal(position, (LENGTH, WIDTH)) / WIDTH**0.5
        self.blocks = [Block(recipe, key) for key in blocks]
        self.norm = eqx.nn.RMSNorm(WIDTH, use_bias=False)
        self.logits = Linear(WIDTH, vocabulary, None, logits)

    def __call__(self, tokens):
        """Compute logits f32 `(length, vocabulary)` of tokens, int `(length,)`."""
        x = (self.embed[tokens] + self.position[: len(tokens)]).astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.logits)(jax.vmap(self.norm)(x)).astype(jnp.float32)


RECIPES = {"bf16": None, "jaxfp8": jaxfp8.DelayedScaling()}


def loss_fn(model, batch):
    """Return the mean cross entropy of the next character, in nat."""
    return optax.softmax_cross_entropy_with_integer_labels(
        jax.vmap(model)(batch[:, :-1]), batch[:, 1:]
    ).mean()


@eqx.filter_jit(donate="all")
def train_step(model, opt_state, tx, batch):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return jaxfp8.train.apply_updates(model, updates), opt_state, loss


@eqx.filter_jit
def mean_loss(model, batches):
    return jax.lax.map(lambda batch: loss_fn(model, batch), batches).mean()


def make_optimizer(steps):
    """Make AdamW after clipping; the wrapper shows parameters only to optax, and
    overwrites the FP8 state.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps, 3e-4)
    return jaxfp8.train.optimizer(
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1)
        )
    )


def create(recipe, vocabulary, seed, tx):
    model = LanguageModel(vocabulary, recipe, jax.random.key(seed))
    return model, tx.init(eqx.filter(model, eqx.is_array))


def main():
    args = _options.parse(
        __doc__, RECIPES, steps=150, batch=16, tiny_batch=2, length=LENGTH
    )
    corpus, tx = Corpus(), make_optimizer(args.steps)
    arms = {
        name: create(RECIPES[name], len(corpus.vocabulary), args.seed, tx)
        for name in args.arms
    }
    runs = {name: _report.Run() for name in arms}
    batches = corpus.random_batches(args.seed, args.steps, args.batch, LENGTH)
    for batch in tqdm(batches, total=args.steps, unit="step", dynamic_ncols=True):
        for name, run in runs.items():
            start = time.perf_counter()
            *arms[name], loss = train_step(*arms[name], tx, jnp.asarray(batch))
            run.train_losses.append(float(loss))
            run.step_ms.append(1e3 * (time.perf_counter() - start))
    validation = jnp.asarray(
        corpus.validation_batches(16, LENGTH, limit=2 if args.tiny else None)
    )
    for name, (model, _) in arms.items():
        runs[name].validation.append((args.steps, float(mean_loss(model, validation))))
    print(_report.table(_report.summarize([runs])))


if __name__ == "__main__":
    main()
