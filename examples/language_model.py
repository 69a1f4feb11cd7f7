"""Trains a small character-level transformer on real text: in bf16, in FP8 with jaxfp8
and in FP8 with Flax.

Switching to FP8 is one argument of `nn.Dense`, `dot_general_cls` (see `Block`); model,
optimizer and training step stay as they were. The scales live in a variable collection
of their own, and their gradient *is* their next value. `jaxfp8.linen.TrainState` stores
that value, and shows the optimizer, its clipping and its weight decay, the parameters
only. The other arms have Flax's `TrainState`.

All arms of a seed start from the same weights, see the same batches and take turns step
by step, so differences in loss are due to the arithmetic alone and a busy machine slows
all arms alike.
"""

import argparse
import functools
import sys
import time
import warnings
from typing import Any

import _report
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _data import Corpus
from flax.training.train_state import TrainState
from tqdm import tqdm

import jaxfp8

LENGTH = 128  # characters of context
WIDTH, HEADS, LAYERS = 128, 4, 2
PEAK_LEARNING_RATE = 3e-3


class Block(nn.Module):
    """Pre-norm attention and MLP. The four projections take `dot_general_cls`;
    attention scores stay in bf16.
    """

    dot_general_cls: Any

    @nn.compact
    def __call__(self, x):
        # The one argument: None is bf16, jaxfp8.Fp8DotGeneral is FP8.
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=jnp.bfloat16,
            dot_general_cls=self.dot_general_cls,
        )
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
        batch, length, width = x.shape

        qkv = dense(3 * width, name="qkv")(norm()(x)).reshape(
            batch, length, 3, HEADS, width // HEADS
        )
        query, key, value = jnp.unstack(qkv, axis=2)
        attended = jax.nn.dot_product_attention(
            query, key, value, is_causal=True
        ).reshape(x.shape)
        x = x + dense(width, name="out")(attended)
        hidden = nn.gelu(dense(4 * width, name="up")(norm()(x)))
        return x + dense(width, name="down")(hidden)


class LanguageModel(nn.Module):
    """A small transformer. Embedding, norms and logits stay in bf16 in every arm, as
    usual in FP8 training.
    """

    vocabulary: int
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens):
        embed = functools.partial(nn.Embed, features=WIDTH, dtype=jnp.bfloat16)
        x = embed(self.vocabulary, name="embed")(tokens)
        x = x + embed(LENGTH, name="position")(jnp.arange(tokens.shape[1]))
        for i in range(LAYERS):
            x = Block(self.dot_general_cls, name=f"block{i}")(x)
        x = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        return nn.Dense(self.vocabulary, dtype=jnp.bfloat16, name="logits")(x).astype(
            jnp.float32
        )


class UnscaledFp8DotGeneral(nn.Module):
    """The control: FP8 products whose scales are 1 and stay 1. The control has to fail,
    or the proof proves nothing.
    """

    @nn.compact
    def __call__(self, x, kernel, dimension_numbers, precision=None):
        del precision
        # the largest values of the formats
        recipe = jaxfp8.StaticScaling(input=448.0, kernel=448.0, output_grad=57344.0)
        return jaxfp8.dot_general(x, kernel, dimension_numbers, recipe=recipe)


ARMS = {"bf16": None, "jaxfp8": jaxfp8.Fp8DotGeneral, "flax": nn.Fp8DirectDotGeneralOp}
CONTROL = {"control": UnscaledFp8DotGeneral}


def loss_fn(variables, apply_fn, batch):
    """Return the mean cross entropy of the next character, in nat."""
    logits = apply_fn(variables, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def mean_loss(state, batches):
    """Return the mean loss of batches `(batches, batch, length + 1)`; one batch at a
    time, to keep the memory small.
    """
    return jax.lax.map(
        functools.partial(loss_fn, state.params, state.apply_fn), batches
    ).mean()


def make_optimizer(steps):
    """Make AdamW after clipping; warm-up over the first tenth of the run, then a cosine
    down to a tenth of the peak.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, steps // 10, steps, PEAK_LEARNING_RATE / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1)
    )


def init_all(model, seed):
    return model.init(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def init_parameters(model, seed):
    return init_all(model, seed)["params"]


@functools.partial(jax.jit, static_argnums=0)
def init_state(model, seed):
    variables = init_all(model, seed)
    return {name: variables[name] for name in variables if name != "params"}


def init(model, seed):
    """Make the parameters, the same in every arm, and in FP8 arms the collection of
    scales and amax histories.

    All arms take the parameters of the one in bf16, so that they are compiled once.
    """
    bf16 = model.clone(dot_general_cls=None)
    return {"params": init_parameters(bf16, seed), **init_state(model, seed)}


def create_state(model, seed, optimizer):
    is_flax = model.dot_general_cls in (
        None,
        nn.Fp8DotGeneral,
        nn.Fp8DirectDotGeneralOp,
    )
    cls = TrainState if is_flax else jaxfp8.linen.TrainState
    return cls.create(apply_fn=model.apply, params=init(model, seed), tx=optimizer)


def train(models, optimizer, seed, batches, validation, steps, bar):
    """Train all arms on the same batches, turn by turn; return a `_report.Run` for each
    arm.
    """
    states = {
        name: create_state(model, seed, optimizer) for name, model in models.items()
    }
    runs = {name: _report.Run() for name in models}
    for i, batch in enumerate(batches, start=1):
        for name, run in runs.items():
            start = time.perf_counter()
            states[name], loss = jax.block_until_ready(train_step(states[name], batch))
            run.step_ms.append(1e3 * (time.perf_counter() - start))
            run.train_losses.append(float(loss))
        bar.set_description(f"seed {seed}", refresh=False)
        bar.set_postfix(
            {name: f"{run.train_losses[-1]:.3f}" for name, run in runs.items()},
            refresh=False,
        )
        bar.update()

        if i % max(1, steps // 100) == 0:
            for name, run in runs.items():
                run.record_scales(
                    i, states[name].params.get(jaxfp8.OVERWRITE_WITH_GRADIENT, {})
                )
        # Validation takes as long as seven steps.
        if i % max(30, steps // 10) == 0 or i == steps:
            for name, run in runs.items():
                run.validation.append((i, float(mean_loss(states[name], validation))))
    return runs


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=(
            "By default one seed and a shortened run (150 steps), to end within "
            "minutes on two CPU cores. The full proof is: --steps 1000 --seeds 3 "
            "--control"
        ),
    )
    parser.add_argument(
        "--steps", type=int, default=150, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="paired repetitions (default: %(default)s)"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=16,
        help=f"windows of {LENGTH} characters a step (default: 16)",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="add FP8 without scaling, which has to fail",
    )
    parser.add_argument(
        "--out", default="language_model.png", help="picture (default: %(default)s)"
    )
    parser.add_argument("--json", help="write settings, versions and results here")
    parser.add_argument(
        "--tiny", action="store_true", help="4 steps on 2 windows: does it run at all?"
    )
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.batch = 4, 2
    if args.steps < 2 or args.seeds < 1 or args.batch < 1:
        parser.error(
            "--steps has to be 2 or more (the first one compiles), --seeds and "
            "--batch 1 or more"
        )
    return args


def main():
    args = parse_arguments()
    corpus = Corpus()
    arms = {name: ARMS[name] for name in args.arms} | (CONTROL if args.control else {})
    if args.control:  # the control never updates its state, of which jaxfp8 warns
        warnings.simplefilter("ignore", jaxfp8.FP8StateWarning)
    models = {
        name: LanguageModel(len(corpus.vocabulary), cls) for name, cls in arms.items()
    }
    optimizer = make_optimizer(args.steps)
    validation = corpus.validation_batches(16, LENGTH, limit=2 if args.tiny else None)
    seeds = []
    with tqdm(
        total=args.steps * args.seeds, desc="compiling", unit="step", dynamic_ncols=True
    ) as bar:
        for seed in range(args.seeds):
            batches = corpus.random_batches(seed, args.steps, args.batch, LENGTH)
            seeds.append(
                train(models, optimizer, seed, batches, validation, args.steps, bar)
            )

    results = _report.summarize(seeds)
    print(_report.table(results))
    _report.plot(seeds, args.out)
    print(f"picture: {args.out}")
    if args.json:
        _report.write_json(args.json, vars(args), corpus, seeds, results)
    if (
        args.steps < 1000
        or args.seeds < 3
        or not {"bf16", "jaxfp8", "flax", "control"} <= set(arms)
    ):
        return 0
    passed, verdict = _report.judge(results)
    print(verdict)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
