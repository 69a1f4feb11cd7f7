"""Measures a whole training step by every trainer: effects, operations, compilation,
and milliseconds on the host.

    python benchmarks/trainers.py [--json FILE] [--turns N] [--only CASE ...] [--check]

A step is README's own: gradient, optimizer, next FP8 state. All candidates have one
model, batch and optimizer, and take turns in one run. `flax` is Flax's TrainState, or
`flax.nnx.Optimizer`, on jaxfp8's model: what FP8 costs there is in it, so a ratio to it
is the cost of our trainer. Peers are the model in bfloat16 and with Flax's own FP8.
Losses are compared before anything is timed. `--check` fails where a goal is missed.
"""

import functools
import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from _environment import result_parser, shown_environment, write  # noqa: E402
from flax import nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import jaxfp8  # noqa: E402

WIDTH, BATCH, MICROBATCHES = 64, 32, 4
COMPILATIONS = 7
TX = optax.adam(1e-3)
# Each ratio to the candidate `flax` of the same case.
GOALS = {"operations": 1.25, "compile_ms": 1.4, "step_ms": 1.2}
ACCUMULATION_GOALS = dict.fromkeys(GOALS, 1.2)
LOWERING_GOAL = 5.0  # of 100 layers, beside 25
RULES = [(".*", jaxfp8.DelayedScaling())]


class MLP(nn.Module):
    """README's model: the widths, and gelu between."""

    widths: tuple[int, ...]
    dot_general_cls: Callable | None = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, dtype=jnp.bfloat16, dot_general_cls=self.dot_general_cls
        )
        *hidden, last = self.widths
        for width in hidden:
            x = nn.gelu(dense(width)(x))
        return dense(last)(x)


class NNXMLP(nnx.Module):
    """The same in NNX."""

    def __init__(self, widths, rngs):
        pairs = zip((widths[-1], *widths), widths, strict=False)
        self.layers = nnx.List(
            [nnx.Linear(n, m, dtype=jnp.bfloat16, rngs=rngs) for n, m in pairs]
        )

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.gelu(layer(x))
        return last(x)


def batch(features):
    return jax.random.normal(jax.random.key(0), (BATCH, features))


def squared(y):
    """The loss: of a target that no layer gives at once, so that losses of five steps
    can be compared.
    """
    return jnp.mean((y.astype(jnp.float32) - 1) ** 2)


def with_train_state(model, cls, x, change=dict):
    """Return README's step, and its first arguments, of variables as `change` makes
    them.
    """
    variables = change(model.init(jax.random.key(1), x))
    state = cls.create(apply_fn=model.apply, params=variables, tx=TX)

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            return squared(state.apply_fn(params, x))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, (state, x)


def with_optimizer(model, x, accumulate=None):
    """Return the same step by `jaxfp8.train.optimizer` and `optax.apply_updates`, and
    its first arguments.

    `accumulate(acc, grads)` adds the gradients of `MICROBATCHES` batches.
    """
    variables, tx = model.init(jax.random.key(1), x), jaxfp8.train.optimizer(TX)

    @jax.jit
    def step(state, x):
        variables, opt_state = state

        def loss_fn(variables, x):
            return squared(model.apply(variables, x))

        value_and_grad = jax.value_and_grad(loss_fn)
        if accumulate is None:
            loss, grads = value_and_grad(variables, x)
        else:
            grads = None
            for part in jnp.split(x, MICROBATCHES):
                loss, new = value_and_grad(variables, part)
                grads = new if grads is None else accumulate(grads, new)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return (optax.apply_updates(variables, updates), opt_state), loss

    return step, ((variables, tx.init(variables)), x)


def with_nnx(model, make_optimizer, value_and_grad, x):
    """Return the step of an NNX model, and its first arguments."""
    state = model, make_optimizer(model)

    @nnx.jit
    def step(state, x):
        model, optimizer = state
        loss, grads = value_and_grad(lambda model: squared(model(x)))(model)
        optimizer.update(model, grads)
        return loss

    return step, (state, x)


def linen(widths):
    x = batch(widths[-1])
    model = MLP(widths)
    fp8 = jaxfp8.quantize(model, RULES)
    return {
        "bf16": with_train_state(model, TrainState, x),
        "flax's FP8": with_train_state(MLP(widths, nn.Fp8DotGeneral), TrainState, x),
        "flax": with_train_state(MLP(widths, jaxfp8.Fp8DotGeneral), TrainState, x),
        "linen.TrainState": with_train_state(fp8, jaxfp8.linen.TrainState, x),
        "train.optimizer": with_optimizer(fp8, x),
    }


def stacked(widths):
    model, stack = jaxfp8.quantize(MLP(widths), RULES), jaxfp8.train.stack_state
    x = batch(widths[-1])
    step = with_train_state(model, jaxfp8.linen.TrainState, x, stack)
    return {"linen, stacked": step}


def nnx_models(widths):
    x = batch(widths[-1])

    def model(quantize=True):
        made = NNXMLP(widths, nnx.Rngs(0))
        return jaxfp8.quantize(made, RULES) if quantize else made

    flax_optimizer = functools.partial(nnx.Optimizer, tx=TX, wrt=nnx.Param)
    return {
        "bf16": with_nnx(model(quantize=False), flax_optimizer, nnx.value_and_grad, x),
        "flax": with_nnx(model(), flax_optimizer, jaxfp8.nnx.value_and_grad, x),
        "nnx.Optimizer": with_nnx(
            model(),
            functools.partial(jaxfp8.nnx.Optimizer, tx=TX),
            jaxfp8.nnx.value_and_grad,
            x,
        ),
    }


def accumulation(widths):
    x = batch(widths[-1])
    model = jaxfp8.quantize(MLP(widths), RULES)

    def by_tree_map(acc, grads):
        """Add up the state too: a wrong program, whose cost is that of the sum
        alone.
        """
        return jax.tree.map(jnp.add, acc, grads)

    return {
        "flax": with_optimizer(model, x, by_tree_map),
        "accumulate_gradients": with_optimizer(model, x, jaxfp8.accumulate_gradients),
    }


DEEP, README = (WIDTH,) * 12, (256, 64)
MICRO = "12 layers, four microbatches"
CASES = {
    "README's program": lambda: linen(README),
    "12 layers": lambda: linen(DEEP) | stacked(DEEP),
    "12 layers, NNX": lambda: nnx_models(DEEP),
    MICRO: lambda: accumulation(DEEP),
}


def is_ours(candidate: str) -> bool:
    return candidate.startswith(("linen", "train", "nnx", "accumulate"))


def program_of(step, arguments) -> dict:
    """Return what is in a step's program, and the CPU time to make it."""
    starts = [time.process_time()]
    traced = step.trace(*arguments)
    starts.append(time.process_time())
    lowered = traced.lower()
    starts.append(time.process_time())
    lowered.compile()
    starts.append(time.process_time())
    seconds = [end - start for start, end in itertools.pairwise(starts)]
    parts = dict(zip(("trace_ms", "lower_ms", "compile_ms"), seconds, strict=True))
    text = lowered.as_text()
    traced = getattr(traced, "traced", traced)  # of nnx.jit's
    return {
        "effects": len(traced.jaxpr.effects),
        "operations": len(re.findall(r"^\s+%\S+ = ", text, re.MULTILINE)),
    } | {name: 1e3 * seconds for name, seconds in parts.items()}


class Run:
    """A run: each call takes a step, and returns the seconds until the call returned
    and until all was done.
    """

    def __init__(self, step, arguments):
        self.step, (self.state, self.x) = step, arguments
        self.loss = None

    def __call__(self):
        start = time.perf_counter()
        out = self.step(self.state, self.x)
        returned = time.perf_counter()
        if isinstance(out, tuple):
            self.state, self.loss = out
        else:
            self.loss = out  # NNX changes the model in place
        jax.block_until_ready(
            (
                nnx.state(self.state) if isinstance(out, jax.Array) else self.state,
                self.loss,
            )
        )
        return returned - start, time.perf_counter() - start


def compare_losses(case, runs):
    for _ in range(5):
        for run in runs.values():
            run()
    losses = {name: float(run.loss) for name, run in runs.items()}
    # Of e4m3's and e5m2's rounding; a wrong state or optimizer is off by far more.
    least, most = min(losses.values()), max(losses.values())
    if not most - least < 0.1 * abs(most):
        raise AssertionError(f"{case}: losses differ: {losses}")


def measure(case, turns) -> list[dict]:
    candidates = CASES[case]()
    programs = {name: [] for name in candidates}
    for _ in range(COMPILATIONS):  # in turns, as the steps
        for name, candidate in CASES[case]().items():
            programs[name].append(program_of(*candidate))
    runs = {name: Run(*candidate) for name, candidate in candidates.items()}
    compare_losses(case, runs)
    taken = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            taken[name].append(run())
    rows = []
    for name, seconds in taken.items():
        host, step = zip(*seconds, strict=True)
        row = {"case": case, "candidate": name, **programs[name][0]}
        row |= {
            key: statistics.median(p[key] for p in programs[name])
            for key in row
            if key.endswith("_ms")
        }
        rows.append(
            row
            | {
                "host_ms": 1e3 * statistics.median(host),
                "step_ms": 1e3 * statistics.median(step),
            }
        )
    base = next(row for row in rows if row["candidate"] == "flax")
    goals = ACCUMULATION_GOALS if case == MICRO else GOALS
    for row in rows:
        row["of_flax"] = {key: row[key] / base[key] for key in goals}
        row["missed"] = []
        if is_ours(row["candidate"]):
            row["missed"] = [
                key for key, goal in goals.items() if row["of_flax"][key] > goal
            ]
            row["missed"] += ["effects"] if row["effects"] else []
    return rows


def lowering() -> dict:
    """Return CPU seconds to trace and lower a step of 25 layers and of 100, by
    `linen.TrainState`.
    """
    seconds = {}
    for layers in (25, 100):
        programs = [program_of_lowering(layers) for _ in range(3)]
        seconds[layers] = statistics.median(programs)
    return {"case": "lowering", "seconds": seconds, "ratio": seconds[100] / seconds[25]}


def program_of_lowering(layers):
    step, arguments = with_train_state(
        jaxfp8.quantize(MLP((WIDTH,) * layers), RULES),
        jaxfp8.linen.TrainState,
        batch(WIDTH),
    )
    start = time.process_time()
    step.lower(*arguments)
    return time.process_time() - start


def line(row) -> str:
    numbers = "  ".join(
        f"{key} {row[key]:8.2f}"
        for key in ("trace_ms", "lower_ms", "compile_ms", "host_ms", "step_ms")
    )
    ratios = "  ".join(f"{value:.2f}" for value in row["of_flax"].values())
    missed = f"  MISSED {', '.join(row['missed'])}" if row["missed"] else ""
    return (
        f"{row['case']:28} {row['candidate']:20} effects {row['effects']}  operations "
        f"{row['operations']:5}  {numbers}  of flax: {ratios}{missed}"
    )


def main():
    parser = result_parser(__doc__, turns=200)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*CASES, "lowering"],
        default=[*CASES, "lowering"],
        metavar="CASE",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where a goal is missed"
    )
    args = parser.parse_args()
    described = shown_environment()
    rows, missed = [], False
    for case in args.only:
        if case == "lowering":
            row = lowering()
            missed |= row["ratio"] > LOWERING_GOAL
            print(
                f"lowering: {row['seconds']}: {row['ratio']:.2f} (goal {LOWERING_GOAL})"
            )
            rows.append(row)
            continue
        for row in measure(case, args.turns):
            missed |= bool(row["missed"])
            print(line(row), flush=True)
            rows.append(row)
    write(args.json, environment=described, rows=rows)
    if args.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
