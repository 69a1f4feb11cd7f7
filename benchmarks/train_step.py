"""Times a Dense layer and a training step of a language model on a CPU, against
bfloat16 and Flax's FP8 class.

    python benchmarks/train_step.py [--json PATH] [--turns N] [--only dense512 ...]

The model is the one of examples/language_model.py, four layers of width 256, with AdamW
after clipping. Peers are the same model in bfloat16 and with Flax's FP8 class. A ratio
is the median over turns of two calls side by side, so that a busy machine slows both.
Before anything is timed, losses and gradients are compared.
"""

import math
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _timing  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _environment import result_parser, shown_environment, write  # noqa: E402

import jaxfp8  # noqa: E402

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
import language_model  # noqa: E402

OURS = "jaxfp8"
# The goals: how many times as fast as Flax's FP8 class, and as bfloat16.
GOALS = {"dense512": (1.4, 1.1), "dense1024": (1.4, 1.1), "language_model": (1.6, 1.2)}


def dense_layers(width):
    """Return the candidates of a Dense layer, by name."""
    return {
        OURS: jaxfp8.linen.Dense(width, use_bias=False, dtype=jnp.bfloat16),
        "drop-in": nn.Dense(
            width,
            use_bias=False,
            dtype=jnp.bfloat16,
            dot_general_cls=jaxfp8.Fp8DotGeneral,
        ),
        "flax": nn.Dense(
            width, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=nn.Fp8DotGeneral
        ),
        "bf16": nn.Dense(width, use_bias=False, dtype=jnp.bfloat16),
    }


def dense(width):
    """Return for each candidate a function that runs forward and backward; its
    gradients were checked.
    """
    x, grad = (
        jax.random.normal(jax.random.key(i), (width, width), jnp.bfloat16)
        for i in range(2)
    )

    def call_of(layer):
        variables = layer.init(jax.random.key(2), x)

        @jax.jit
        def step(variables, x, grad):
            y, vjp = jax.vjp(layer.apply, variables, x)
            return y, vjp(grad)

        return lambda: step(variables, x, grad)

    calls = {name: call_of(layer) for name, layer in dense_layers(width).items()}
    kernels = {
        name: np.asarray(call()[1][0]["params"]["kernel"], np.float32)
        for name, call in calls.items()
    }
    for name, kernel in kernels.items():
        # e5m2 rounds by up to 2**-3 and e4m3 by up to 2**-4 of an element, a third of
        # these in the root mean square.
        error = np.linalg.norm(kernel - kernels["bf16"]) / np.linalg.norm(
            kernels["bf16"]
        )
        if not error < 0.1:
            raise AssertionError(
                f"dense{width}, {name}: the kernel's gradient is off by {error:.3f}"
            )
    return calls


class ScannedLanguageModel(nn.Module):
    """The language model with a scan over its layers; jaxfp8's scan reads their state
    outside of the loop.
    """

    vocabulary: int
    dot_general_cls: Any

    @nn.compact
    def __call__(self, tokens):
        scan = (
            jaxfp8.linen.scan
            if self.dot_general_cls is jaxfp8.Fp8DotGeneral
            else nn.scan
        )
        stacked = {"params": 0, jaxfp8.OVERWRITE_WITH_GRADIENT: 0}
        options = {
            "variable_axes": stacked,
            "split_rngs": {"params": True},
            "length": language_model.LAYERS,
        }
        x = nn.Embed(self.vocabulary, language_model.WIDTH, dtype=jnp.bfloat16)(tokens)
        block = language_model.Block(self.dot_general_cls, name="blocks")
        x, _ = scan(lambda block, x, _: (block(x), None), **options)(block, x, None)
        return nn.Dense(self.vocabulary, dtype=jnp.bfloat16)(
            nn.RMSNorm(dtype=jnp.bfloat16)(x)
        ).astype(jnp.float32)


def language_model_steps(
    width, layers, batch, check_steps, model=language_model.LanguageModel
):
    """Return for each arm a function that takes the next training step, after
    `check_steps` steps were compared.
    """
    language_model.WIDTH, language_model.LAYERS = width, layers
    corpus = language_model.Corpus()
    optimizer = language_model.make_optimizer(1000)
    batches = list(corpus.random_batches(0, check_steps, batch, language_model.LENGTH))
    batches = [jnp.asarray(windows) for windows in batches]
    states, losses = {}, {}
    for name, cls in language_model.ARMS.items():
        state = language_model.create_state(
            model(len(corpus.vocabulary), cls), 0, optimizer
        )
        for windows in batches:
            state, loss = language_model.train_step(state, windows)
        states[name], losses[name] = state, float(loss)
    for name, loss in losses.items():
        # All arms have the same weights and text. The runs of examples/ stay within
        # 0.02 nat of each other; a first loss is log(103) = 4.6.
        if not (math.isfinite(loss) and abs(loss - losses["bf16"]) < 0.1):
            raise AssertionError(
                f"language model, {name}: loss {loss}, bf16 {losses['bf16']}"
            )

    def call_of(name):
        def call():
            states[name], loss = language_model.train_step(states[name], batches[0])
            return loss

        return call

    return {name: call_of(name) for name in states}


# Smaller sizes than those of the goals show where FP8 starts to pay, to choose
# `DelayedScaling(min_size=)`.
CASES = {
    "dense64": lambda tiny: dense(64),
    "dense128": lambda tiny: dense(64 if tiny else 128),
    "dense256": lambda tiny: dense(64 if tiny else 256),
    "dense512": lambda tiny: dense(64 if tiny else 512),
    "dense1024": lambda tiny: dense(64 if tiny else 1024),
    "language_model": lambda tiny: (
        language_model_steps(32, 1, 2, 2)
        if tiny
        else language_model_steps(width=256, layers=4, batch=16, check_steps=5)
    ),
    "scanned_model": lambda tiny: (
        language_model_steps(32, 2, 2, 2, ScannedLanguageModel)
        if tiny
        else language_model_steps(256, 4, 16, 5, ScannedLanguageModel)
    ),
}


def measure(case: str, turns: int, tiny: bool) -> dict:
    timings = _timing.interleaved(CASES[case](tiny), turns=turns)
    ours = timings[OURS]
    ratios = {
        peer: ours.times_faster(timings[peer]) for peer in timings if peer != OURS
    }
    cpu = {
        name: float(np.median(timing.cpu_seconds)) for name, timing in timings.items()
    }
    goals = dict(zip(("flax", "bf16"), GOALS.get(case, (None, None)), strict=True))
    return {
        "case": case,
        "ms": {name: 1e3 * timing.median for name, timing in timings.items()},
        "cpu_ms": {name: 1e3 * seconds for name, seconds in cpu.items()},
        "spread": {name: timing.spread for name, timing in timings.items()},
        "times_faster_than": ratios,
        "times_less_cpu_than": {peer: cpu[peer] / cpu[OURS] for peer in ratios},
        "goals": goals,
        "met": all(
            goal is None or ratios[peer] >= goal for peer, goal in goals.items()
        ),
    }


def line(row: dict) -> str:
    times = "  ".join(
        f"{name} {ms:.2f} ({row['cpu_ms'][name]:.2f})" for name, ms in row["ms"].items()
    )
    ratios = "  ".join(
        f"{row['times_faster_than'][peer]:.2f}x {peer} (goal {goal}, CPU time "
        f"{row['times_less_cpu_than'][peer]:.2f}x)"
        for peer, goal in row["goals"].items()
    )
    return (
        f"{row['case']:15} {'met' if row['met'] else 'MISSED':6} {ratios}   ms (CPU "
        f"ms): {times}"
    )


def main():
    parser = result_parser(__doc__, turns=30)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes: does it run at all?"
    )
    args = parser.parse_args()
    described = shown_environment()
    rows = []
    for case in args.only:
        rows.append(measure(case, args.turns, args.tiny))
        print(line(rows[-1]), flush=True)
    write(args.json, environment=described, rows=rows)


if __name__ == "__main__":
    main()
