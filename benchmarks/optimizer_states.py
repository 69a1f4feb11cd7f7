"""Compares optimizers with moments in FP8 to float32: losses over paired seeds, sizes
of updates, bytes, time.

    python benchmarks/optimizer_states.py [--only losses updates memory time]
                                          [--arms ARM ...] [--seeds N]
                                          [--runs PATH] [--json PATH]

- losses: a character-level transformer in float32 on two texts, Python's manual and the
  source code of optax, with AdamW, and with Lion and SGD with momentum 0.9, whose
  moments are signed. All arms of a seed start from the same weights and see the same
  batches. A run is a line of JSON in `--runs`; what is there is not run again. The
  figure is the validation loss less that of the same optimizer in float32: the mean
  over seeds with its 95 % confidence interval (Student's t).
- updates: 2000 steps on gradients `mean + noise` whose noise is the same within a block
  ("alike") or lognormal with sigma 2 ("mixed"). The mean size of the last update over
  float32 Adam's, and the norm of their difference over the norm of float32 Adam's.
- memory: bytes a parameter of the arrays that the transformer's optimizer holds.
- time: one AdamW update of four kernels of 1024 x 1024, in turns with float32 AdamW's:
  `quantized(optax.adamw)`, and `optim.adamw` by `update` and by `apply`.

The control keeps both moments in e4m3 linearly, in the same blocks: it has to miss the
limits, which tests/optim/test_page.py has.
"""

import argparse
import functools
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax

import jaxfp8
from jaxfp8 import optim

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
from _compare_corpus import Corpus  # noqa: E402
from _compare_model import LanguageModel  # noqa: E402
from _compare_runs import interval  # noqa: E402
from _compare_training import PEAK_LEARNING_RATE, loss_fn  # noqa: E402
from _environment import environment, write  # noqa: E402
from _runs import TEXTS, corpora, run_missing  # noqa: E402
from _timing import interleaved  # noqa: E402

STEPS, BATCH, LENGTH, WIDTH, LAYERS = 600, 16, 64, 64, 2


def linear(tx):
    """The control: both moments in e4m3, as multiples of 1 / 448 of the amax of 128
    elements, rounded to nearest.
    """

    def rounded(x):
        if x.size < 4096:
            return x
        blocks = x.reshape(-1, math.gcd(x.size, 128))
        amax = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
        scale = jnp.where(amax > 0, 448 / amax, 1)
        return (
            (blocks * scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) / scale
        ).reshape(x.shape)

    def round_adam(node):
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        return node._replace(
            mu=jax.tree.map(rounded, node.mu), nu=jax.tree.map(rounded, node.nu)
        )

    def update(grads, state, params=None):
        updates, state = tx.update(grads, state, params)
        return updates, jax.tree.map(
            round_adam,
            state,
            is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState),
        )

    return optax.GradientTransformation(tx.init, update)


def make_optimizer(steps: int, name: str = "adam"):
    """Make an optimizer with clipped gradients; warm-up over a tenth, then a cosine to
    a tenth of the peak.
    """
    make, factor = OPTIMIZERS[name]
    peak = factor * PEAK_LEARNING_RATE
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps, peak / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), make(rate))


# What makes an optimizer of a learning rate, and its peak over that of AdamW.
OPTIMIZERS = {
    "adam": (functools.partial(optax.adamw, weight_decay=0.1), 1.0),
    "lion": (functools.partial(optax.lion, weight_decay=0.1), 0.2),
    "momentum": (functools.partial(optax.sgd, momentum=0.9), 100.0),
}
ARMS = {"float32": lambda tx: tx, "fp8": optim.quantized, "linear": linear}
# The arms of the losses: the optimizer, and one of ARMS.
RUNS = {arm: ("adam", arm) for arm in ARMS} | {
    f"{name}_{arm}": (name, arm)
    for name in ("lion", "momentum")
    for arm in ("float32", "fp8")
}


class Losses:
    """The training runs of one text: programs are compiled once for all seeds."""

    def __init__(self, corpus: Corpus, steps: int):
        self.corpus, self.steps = corpus, steps
        self.model = LanguageModel(
            len(corpus.vocabulary), LENGTH, jnp.float32, WIDTH, LAYERS
        )
        self.programs = {}

    def program(self, arm: str):
        """Return the optimizer and the training step of an arm."""
        if arm not in self.programs:
            optimizer, wrap = RUNS[arm]
            tx = ARMS[wrap](make_optimizer(self.steps, optimizer))

            @functools.partial(jax.jit, donate_argnums=(0, 1))
            def step(variables, opt_state, batch):
                loss, grads = jax.value_and_grad(loss_fn)(
                    variables, self.model.apply, batch
                )
                updates, opt_state = tx.update(grads, opt_state, variables)
                return optax.apply_updates(variables, updates), opt_state, loss

            self.programs[arm] = tx, step
        return self.programs[arm]

    @functools.partial(jax.jit, static_argnums=0)
    def mean_loss(self, variables, batches):
        return jax.lax.map(
            functools.partial(loss_fn, variables, self.model.apply), batches
        ).mean()

    def init(self, seed: int):
        # the layers of the model have FP8 products, which here run in float32
        with jaxfp8.autocast(enabled=False):
            return jax.jit(self.model.init)(
                jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32)
            )

    def run(self, arm: str, seed: int) -> dict:
        tx, step = self.program(arm)
        variables = self.init(seed)
        opt_state, losses = tx.init(variables), []
        with jaxfp8.autocast(enabled=False):
            for batch in self.corpus.random_batches(seed, self.steps, BATCH, LENGTH):
                variables, opt_state, loss = step(variables, opt_state, batch)
                losses.append(loss)
            validation = self.mean_loss(
                variables, self.corpus.validation_batches(16, LENGTH)
            )
        return {
            "validation": float(validation),
            "train": [round(float(loss), 4) for loss in losses[::10]],
        }


def measure_losses(
    names: list[str], arms: list[str], seeds: int, path: pathlib.Path, steps: int
) -> dict:
    """Run the runs that `path` lacks, seed by seed; return the figures of all runs in
    `path`.
    """
    texts = {
        name: Losses(corpus, steps)
        for name, corpus in corpora().items()
        if name in names
    }
    keys = [
        (text, arm, seed) for seed in range(seeds) for text in texts for arm in arms
    ]
    found = run_missing(
        path, keys, steps, lambda text, arm, seed: texts[text].run(arm, seed)
    )
    results = {}
    for text in texts:
        losses = {
            arm: [found[text, arm, seed]["validation"] for seed in range(seeds)]
            for arm in arms
        }
        results[text] = {arm: {"validation": values} for arm, values in losses.items()}
        for arm in arms:
            name, wrap = RUNS[arm]
            base = next(base for base in RUNS if RUNS[base] == (name, "float32"))
            if wrap != "float32" and base in losses:
                differences = [
                    a - b for a, b in zip(losses[arm], losses[base], strict=True)
                ]
                results[text][arm]["difference"] = interval(differences)
    return results


def measure_updates(steps: int = 2000, shape=(128, 1024)) -> dict:
    """Measure size and error of the update after `steps` steps, by distribution of the
    gradients and arm.
    """
    results = {}
    for name, sigma in {"alike": 0.0, "mixed": 2.0}.items():
        scale_key, mean_key, noise_key = jax.random.split(jax.random.key(0), 3)
        scale = 1e-3 * jnp.exp(sigma * jax.random.normal(scale_key, shape))
        mean = 0.1 * scale * jax.random.normal(mean_key, shape)
        txs = {arm: wrap(optax.scale_by_adam()) for arm, wrap in ARMS.items()}

        def step(states, i, txs=txs, scale=scale, mean=mean, key=noise_key):
            grads = mean + scale * jax.random.normal(
                jax.random.fold_in(key, i), scale.shape
            )
            both = {arm: tx.update(grads, states[arm]) for arm, tx in txs.items()}
            return {arm: state for arm, (_, state) in both.items()}, {
                arm: update for arm, (update, _) in both.items()
            }

        def run(txs=txs, step=step):
            states = {arm: tx.init(jnp.zeros(shape)) for arm, tx in txs.items()}
            states, _ = jax.lax.scan(
                lambda s, i: (step(s, i)[0], None), states, jnp.arange(steps - 1)
            )
            return step(states, steps - 1)[1]

        updates = jax.jit(run)()
        exact = updates.pop("float32")
        results[name] = {
            arm: {
                "size": float(jnp.mean(jnp.abs(update)) / jnp.mean(jnp.abs(exact))),
                "error": float(
                    jnp.linalg.norm(update - exact) / jnp.linalg.norm(exact)
                ),
            }
            for arm, update in updates.items()
        }
    return results


def measure_memory() -> dict:
    """Measure the bytes a parameter of the live arrays of a transformer's optimizer."""
    runs = Losses(Corpus(), STEPS)
    variables = runs.init(0)
    results = {}
    for arm in ("float32", "fp8"):
        state = jax.block_until_ready(runs.program(arm)[0].init(variables))
        parameters = sum(x.size for x in jax.tree.leaves(variables))
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        results[arm] = {"all": round(size / parameters, 4)}
    return results


def measure_time(turns: int = 15) -> dict:
    """Measure the median ms of an update in place, and the paired ratios to
    float32's.
    """
    params = {
        f"kernel{i}": jax.random.normal(jax.random.key(i), (1024, 1024))
        for i in range(4)
    }

    def candidate(tx, applies=False):
        # Arguments have the order of results, by which JAX decides which array is
        # written over which.
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, grads):
            if applies:
                return tx.apply(grads, opt_state, params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        grads = jax.tree.map(lambda x: 0.1 * x, params)
        state = [jax.tree.map(jnp.copy, params), tx.init(params)]

        def call():
            state[:] = step(*state, grads)
            return state

        return call

    arms = {
        "float32": candidate(optax.adamw(1e-3)),
        "quantized": candidate(optim.quantized(optax.adamw(1e-3))),
        "update": candidate(optim.adamw(1e-3)),
        "apply": candidate(optim.adamw(1e-3), applies=True),
    }
    timings = interleaved(arms, turns=turns)
    return {
        arm: {
            "ms": 1e3 * timing.median,
            "ratio": 1 / timing.times_faster(timings["float32"]),
        }
        for arm, timing in timings.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parts = ("losses", "updates", "memory", "time")
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=parts, help="(default: all)"
    )
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=list(RUNS),
        default=list(RUNS),
        help="of the losses",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=8,
        help="paired runs of each text and arm (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="steps of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=pathlib.Path,
        default=pathlib.Path("runs.jsonl"),
        help="(default: %(default)s)",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    args = parser.parse_args()
    measure = {
        "losses": functools.partial(
            measure_losses, args.texts, args.arms, args.seeds, args.runs, args.steps
        ),
        "updates": measure_updates,
        "memory": measure_memory,
        "time": measure_time,
    }
    results = {part: measure[part]() for part in args.only}
    print(json.dumps(results, indent=2))
    write(args.json, environment=environment(), results=results)


if __name__ == "__main__":
    main()
