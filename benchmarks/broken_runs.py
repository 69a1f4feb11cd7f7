"""Figures before a run fails: clean runs of delayed scaling beside runs that are broken
on purpose.

    # runs and writes
    python benchmarks/broken_runs.py [--breaks NAME ...] [--seeds N] [--json PATH]
                                     [--picture PATH]
    # runs nothing
    python benchmarks/broken_runs.py --report [--json PATH] [--picture PATH]

A clean run trains the character-level transformer of `compare.py`. A broken run goes on
from its state in mid-run, with the same batches and one thing broken. After every step
the figures of `jaxfp8.inspect.measure` and `count` are reduced over all quantizers: the
largest `saturated`, `flushed`, `growth` and `scale_lag`, and the smallest `scale_lag`.
The norm of the gradient, which needs no FP8, is there to compare with.

- range: of a figure, from its smallest to its largest value in all clean runs, at the
  steps where the broken runs run.
- rise: the first step whose loss is more than 0.1 nat above that of the clean run on
  the same batch.
- lead: how many steps before the rise the figure first leaves its range; 0 is the step
  of the rise, negative is later.
- left by others: how many clean runs leave the range of the other clean runs. With few
  seeds a range is a guess.

Each break is made in bf16 too, without FP8, to see whether FP8 is what fails.
"""

import argparse
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8 import mixed_precision

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
from _compare_arms import ARMS  # noqa: E402
from _compare_corpus import Corpus  # noqa: E402
from _compare_model import LanguageModel  # noqa: E402
from _compare_training import create_state, loss_fn, make_optimizer  # noqa: E402
from _environment import environment  # noqa: E402

RESULT = pathlib.Path(__file__).parent / "results" / "broken_runs_cpu.json"
STEPS, BATCH, LENGTH, WIDTH, LAYERS = 300, 16, 64, 64, 2
DTYPE, RISE, EVERY = jnp.bfloat16, 0.1, 10
STATE = jaxfp8.OVERWRITE_WITH_GRADIENT
FIGURES = (
    "saturated",
    "flushed",
    "growth",
    "largest scale_lag",
    "smallest scale_lag",
    "gradient norm",
)
SHOWN = ("rate_grows", "weights", "inputs_grow", "gradients_40", "outlier_20")


def always(since: int) -> float:
    """The factor of a break that leaves something as it is; `since` counts the steps
    after the break.
    """
    return 1.0


def at_first(factor: float) -> Callable[[int], float]:
    return lambda since: factor if since == 0 else 1.0


class Break(NamedTuple):
    """One way to break a run. Factors are functions of the number of steps since the
    break.

    Attributes:
        text: says it in a table.
        parameter: the path of the parameter that is multiplied.
        factor: by which it is multiplied before a step.
        rate: multiplies what the optimizer adds to the parameters.
        loss_scale: multiplies the loss; the gradients are divided by it before the
            optimizer.
        random_text: whether the characters of batches are random.
        is_skipped: whether the first broken step is skipped: parameters and optimizer
            are those before it, and its loss does not count. FP8 state stays, and so
            does the outlier in it.
    """

    text: str
    parameter: tuple[str, ...] = ()
    factor: Callable[[int], float] = always
    rate: Callable[[int], float] = always
    loss_scale: float = 1.0
    random_text: bool = False
    is_skipped: bool = False


# in front of the product of queries, keys and values
NORM = ("block0", "RMSNorm_0", "scale")
BREAKS = {
    "rate": Break("learning rate x 30", rate=lambda since: 30.0),
    "rate_grows": Break(
        "learning rate x 1.05 every step", rate=lambda since: 1.05**since
    ),
    "weights": Break(
        "one kernel x 64, once", ("block1", "up", "kernel"), at_first(64.0)
    ),
    "inputs_grow": Break(
        "inputs of one product x 1.1 every step", NORM, lambda since: 1.1
    ),
    "gradients_12": Break("loss x 2**-12, gradients x 2**12", loss_scale=2.0**-12),
    "gradients_24": Break("loss x 2**-24, gradients x 2**24", loss_scale=2.0**-24),
    "gradients_40": Break("loss x 2**-40, gradients x 2**40", loss_scale=2.0**-40),
    "outlier_14": Break(
        "inputs of one product x 2**14 in a skipped step",
        NORM,
        at_first(2.0**14),
        is_skipped=True,
    ),
    "outlier_20": Break(
        "inputs of one product x 2**20 in a skipped step",
        NORM,
        at_first(2.0**20),
        is_skipped=True,
    ),
    "text": Break("random characters", random_text=True),
}


@jax.jit
def train_step(state, batch, rate, loss_scale):
    """Return `(state, loss, figures of all quantizers or None, norm of the
    gradient)`.
    """
    scale = mixed_precision.DynamicLossScale(value=loss_scale, good_steps=jnp.int32(0))
    loss, grads = mixed_precision.value_and_grad(loss_fn, scale)(
        state.params, state.apply_fn, batch
    )
    new = state.apply_gradients(grads=grads)
    before, after = state.params["params"], new.params["params"]
    params = jax.tree.map(lambda x, y: x + rate * (y - x), before, after)
    new = new.replace(params={**new.params, "params": params})
    measured = jaxfp8.inspect.measure(new) if STATE in new.params else None
    norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(grads["params"])))
    return new, loss, measured, norm


def multiplied(tree, path, factor: float):
    """The tree with the leaf at `path` times `factor`."""
    if not path:
        return tree * factor
    return {**tree, path[0]: multiplied(tree[path[0]], path[1:], factor)}


def reduced(measured, norm, rows) -> list[float]:
    """The figures of a step in the order of `FIGURES`, the worst of all quantizers; NaN
    where none has a figure.
    """
    values = {
        name: [row[name] for row in rows] for name in ("saturated", "flushed") if rows
    }
    for name, value in jaxfp8.inspect.scalars(measured).items():
        if not math.isnan(value):
            values.setdefault(name.rpartition("/")[2], []).append(value)
    worst = [
        max(values.get(name, [math.nan]))
        for name in ("saturated", "flushed", "growth", "scale_lag")
    ]
    return [
        float(f"{value:.4g}")
        for value in [*worst, min(values.get("scale_lag", [math.nan])), norm]
    ]


class Training:
    """The runs of both arms; programs are compiled once for all seeds."""

    def __init__(self, steps: int, start: int):
        self.steps, self.start, self.corpus = steps, start, Corpus()
        self.optimizer, self.models = make_optimizer(steps), {}

    def run(self, arm: str, seed: int, breaks) -> dict[str, dict]:
        """Train a clean run, and broken ones from its middle; return name -> loss and
        figures of each step.
        """
        model = self.models.setdefault(
            arm,
            LanguageModel(len(self.corpus.vocabulary), LENGTH, DTYPE, WIDTH, LAYERS),
        )
        batches = list(self.corpus.random_batches(seed, self.steps, BATCH, LENGTH))
        state = create_state(ARMS[arm], model, seed, self.optimizer)
        faults = {"clean": Break("clean")} | {name: BREAKS[name] for name in breaks}
        with ARMS[arm].region():
            middle, _ = self.train(state, batches[: self.start], faults["clean"])
            return {
                name: self.train(middle, batches[self.start :], fault)[1]
                for name, fault in faults.items()
            }

    def train(self, state, batches, fault: Break) -> tuple:
        """Train on `batches`, broken by `fault`; return the last state, and loss and
        figures of each step.
        """
        rng, run = np.random.default_rng(0), {"loss": [], "figures": []}
        for since, batch in enumerate(batches):
            if fault.random_text:
                batch = rng.integers(
                    0, len(self.corpus.vocabulary), batch.shape, np.int32
                )
            broken, factor = state, fault.factor(since)
            if factor != 1:
                params = multiplied(state.params, ("params", *fault.parameter), factor)
                broken = state.replace(params=params)
            factors = np.float32(fault.rate(since)), np.float32(fault.loss_scale)
            step = broken, jnp.asarray(batch), *factors
            if STATE in state.params:
                (new, loss, measured, norm), counts = jaxfp8.inspect.count(
                    train_step, *step
                )
            else:
                new, loss, measured, norm = train_step(*step)
            if fault.is_skipped and since == 0:
                kept = {STATE: new.params[STATE]} if STATE in new.params else {}
                new, loss = state.replace(params={**state.params, **kept}), None
            state = new
            run["loss"].append(None if loss is None else float(f"{float(loss):.5g}"))
            if measured is not None:
                run["figures"].append(reduced(measured, norm, counts.rows))
        return state, run


def first(condition) -> int | None:
    """The index of the first true element, or None."""
    return int(np.argmax(condition)) if np.any(condition) else None


def rise(run: dict, clean: dict) -> int | None:
    """The first step whose loss is more than `RISE` above the clean run's, or is no
    number; not a skipped step.
    """
    pairs = zip(run["loss"], clean["loss"], strict=True)
    return first(
        [loss is not None and not loss - reference <= RISE for loss, reference in pairs]
    )


def limits(runs) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest value of each figure in all steps of the runs."""
    values = np.concatenate([run["figures"] for run in runs])
    return np.nanmin(values, axis=0), np.nanmax(values, axis=0)


def leaves(run: dict, low, high, every: int = 1) -> list[int | None]:
    """The first step at which each figure is outside of its range, where every so many
    steps are looked at.
    """
    values = np.array(run["figures"])
    is_seen = (np.arange(len(values)) % every == every - 1)[:, None]
    return [
        first(column) for column in (((values < low) | (values > high)) & is_seen).T
    ]


def results(runs: dict) -> dict:
    """Return what the tables show of all runs: ranges, and of each break its rises,
    extremes and exits of ranges.
    """
    clean = [found["clean"] for found in runs["delayed"].values()]
    low, high = limits(clean)
    exits = [
        leaves(run, *limits([other for other in clean if other is not run]))
        for run in clean
        if len(clean) > 1
    ]
    summary = {
        "range": [low.tolist(), high.tolist()],
        "clean runs": len(clean),
        "breaks": {},
    }
    summary["left by others"] = [
        sum(step is not None for step in steps) for steps in zip(*exits, strict=True)
    ]
    for name in BREAKS:
        delayed, bf16 = (
            [found for found in runs[arm].values() if name in found]
            for arm in ("delayed", "bf16")
        )
        if not delayed:
            continue
        smallest, largest = limits([found[name] for found in delayed])
        row = {"smallest": smallest.tolist(), "largest": largest.tolist()}
        row["rise"], row["bf16 rise"] = (
            [rise(run[name], run["clean"]) for run in arm] for arm in (delayed, bf16)
        )
        for every in (1, EVERY):
            row[f"leaves, every {every}"] = [
                leaves(found[name], low, high, every) for found in delayed
            ]
        summary["breaks"][name] = row
    return summary


def span(steps) -> str:
    """Steps of several seeds: from the first to the last, and in how many there is no
    such step.
    """
    found = [step for step in steps if step is not None]
    if not found:
        return "no"
    text = f"{min(found):+d}" + (
        f" to {max(found):+d}" if max(found) > min(found) else ""
    )
    return text + (
        f" ({len(found)} of {len(steps)})" if len(found) < len(steps) else ""
    )


def lead(rises, steps) -> str:
    """The lead of one figure in all seeds; where no loss rises, whether it left its
    range.
    """
    if any(step is not None for step in rises):
        pairs = [(a, b) for a, b in zip(rises, steps, strict=True) if a is not None]
        return span([None if b is None else a - b for a, b in pairs])
    count = sum(step is not None for step in steps)
    return (
        f"left ({count} of {len(steps)})"
        if 0 < count < len(steps)
        else "left"
        if count
        else "no"
    )


def tables(summary: dict) -> str:
    """Three tables: the extremes of each figure, its leads, and its leads where every
    tenth step is logged.
    """
    low, high = summary["range"]
    heads = "|".join(f" {figure} " for figure in FIGURES)
    lines = [f"| run |{heads}|", "|---" * (len(FIGURES) + 1) + "|"]
    lines += [
        "| clean, range | "
        + " | ".join(f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True))
        + " |"
    ]
    left = [
        f"{count} of {summary['clean runs']}" for count in summary["left by others"]
    ]
    lines += ["| clean, left by others | " + " | ".join(left) + " |"]
    for name, row in summary["breaks"].items():
        ends = [
            row["smallest" if figure.startswith("smallest") else "largest"][i]
            for i, figure in enumerate(FIGURES)
        ]
        lines += [
            f"| {BREAKS[name].text} | "
            + " | ".join(f"{end:.3g}" for end in ends)
            + " |"
        ]
    for every in (1, EVERY):
        lines += [
            "",
            f"| logged every {every} | loss rises | in bf16 |{heads}|",
            "|---" * (len(FIGURES) + 3) + "|",
        ]
        for name, row in summary["breaks"].items():
            cells = [span(row["rise"]), span(row["bf16 rise"])]
            cells += [
                lead(row["rise"], [steps[i] for steps in row[f"leaves, every {every}"]])
                for i in range(len(FIGURES))
            ]
            lines += [f"| {BREAKS[name].text} | " + " | ".join(cells) + " |"]
    return "\n".join(lines)


def plot(path: pathlib.Path, record: dict) -> None:
    """Draw loss and figures of the runs that are kept: a row for each, a column for
    each break.
    """
    from matplotlib.figure import Figure

    names, bounds = (
        [name for name in record["runs"] if name != "clean"],
        np.transpose(record["summary"]["range"]),
    )
    rows = ("loss", "saturated", "flushed", "growth", "smallest scale_lag")
    figure = Figure(
        figsize=(2.4 * len(names) + 1, 1.5 * len(rows)), layout="constrained"
    )
    axes = figure.subplots(
        len(rows), len(names), sharex=True, sharey="row", squeeze=False
    )
    for column, name in zip(axes.T, names, strict=True):
        column[0].set_title(
            BREAKS[name].text.replace(" in ", "\nin ").replace(" every", "\nevery"),
            fontsize=8,
        )
        column[-1].set_xlabel("steps since the break", fontsize=8)
        step = rise(record["runs"][name], record["runs"]["clean"])
        for axis, row in zip(column, rows, strict=True):
            for run, color in (("clean", "#999999"), (name, "#0b6fd6")):
                values = record["runs"][run]
                values = (
                    values["loss"]
                    if row == "loss"
                    else np.array(values["figures"])[:, FIGURES.index(row)]
                )
                axis.plot(values, color=color, linewidth=1)
            if row != "loss":
                axis.axhspan(
                    *bounds[FIGURES.index(row)], color="#ffb000", alpha=0.4, linewidth=0
                )
            if step is not None:
                axis.axvline(step, color="#c4262e", linewidth=1, linestyle="--")
            if row in ("saturated", "flushed"):
                axis.set_yscale("symlog", linthresh=1e-5)
                axis.set_yticks([0, 1e-4, 1e-2, 1], ["0", "0.01 %", "1 %", "100 %"])
            elif row == "growth":
                axis.set_yscale("log")
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=7)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(row.replace(" ", "\n"), fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--breaks",
        nargs="+",
        choices=BREAKS,
        default=list(BREAKS),
        metavar="NAME",
        help=", ".join(BREAKS),
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="of broken runs (default: %(default)s)"
    )
    parser.add_argument(
        "--clean",
        type=int,
        default=8,
        help="seeds of clean runs (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="of a run; it breaks in the middle (default: %(default)s)",
    )
    parser.add_argument(
        "--report", action="store_true", help="run nothing: the runs of --json"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, default=RESULT, help="(default: %(default)s)"
    )
    parser.add_argument("--picture", type=pathlib.Path, help="draw the first seed here")
    args = parser.parse_args(argv)
    if not args.report:
        training, runs = (
            Training(args.steps, args.steps // 2),
            {"delayed": {}, "bf16": {}},
        )
        for seed in range(max(args.seeds, args.clean)):
            is_broken = seed < args.seeds
            for arm in runs if is_broken else ("delayed",):
                start = time.perf_counter()
                runs[arm][seed] = training.run(
                    arm, seed, args.breaks if is_broken else ()
                )
                print(
                    f"{arm}, seed {seed}: {time.perf_counter() - start:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
        # Steps are kept of what the picture shows.
        kept = {
            name: run
            for name, run in runs["delayed"][0].items()
            if name in ("clean", *SHOWN)
        }
        record = {"environment": environment(), "summary": results(runs), "runs": kept}
        args.json.write_text(json.dumps(record) + "\n")
    record = json.loads(args.json.read_text())
    print(tables(record["summary"]))
    if args.picture:
        plot(args.picture, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
