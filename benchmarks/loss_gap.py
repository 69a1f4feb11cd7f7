"""The gap of FP8's validation loss to bf16's, and what makes it: paired runs on two texts.

    python benchmarks/loss_gap.py [--arms ARM ...] [--texts manual source] [--seeds N] [--runs FOLDER] [--report]

All arms of a seed start from the same weights and see the same batches. A run is one JSON file in `--runs`; what is
there is not run again, and `--report` runs nothing. The figures of an arm, over the seeds that it and its reference
have:

- difference: its loss at the end less that of its reference, the mean and its 95 % confidence interval (Student's t).
- lag: how many steps earlier the reference was where the arm is at its end, as a fraction of the run: its validation
  curve, between its points a straight line, first gets down to the arm's final loss there. Where the arm ends below its
  reference, roles are exchanged and the lag is negative. It is defined for runs that end above, and it is no measure
  of longer runs: the learning rate falls, so the last steps of a run gain other amounts than more steps would.

The model is a character-level transformer; embeddings and logits are bf16 in all FP8 arms.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from jaxfp8.compare._runs import interval
from jaxfp8.compare._training import create_state, make_optimizer, mean_loss, train_step

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
from _environment import environment  # noqa: E402
from _loss_gap_arms import ARMS, RECIPES  # noqa: E402
from _runs import TEXTS, corpora, found_runs, run_missing  # noqa: E402

RUNS = pathlib.Path(__file__).parent / "results" / "loss_gap"
STEPS, BATCH, LENGTH, WIDTH, LAYERS = 600, 16, 64, 64, 2
POINTS = 10  # of a validation curve


class Training:
    """The runs of one number of steps; programs are compiled once for all seeds."""

    def __init__(self, steps: int):
        self.steps, self.corpora, self.models = steps, corpora(), {}
        self.optimizer = make_optimizer(steps)

    def run(self, text: str, arm: str, seed: int) -> dict:
        """Train; return the final loss, the validation curve `[step, loss]` and the time that it took."""
        corpus, start = self.corpora[text], time.perf_counter()
        model = self.models.setdefault((text, arm), ARMS[arm].model(len(corpus.vocabulary), LENGTH, WIDTH, LAYERS))
        validation, curve = jnp.asarray(corpus.validation_batches(BATCH, LENGTH)), []
        state = create_state(ARMS[arm].precision, model, seed, self.optimizer)
        with ARMS[arm].precision.region():
            for i, batch in enumerate(corpus.random_batches(seed, self.steps, BATCH, LENGTH), start=1):
                state, loss, _ = jax.block_until_ready(train_step(state, jnp.asarray(batch)))
                if i % max(1, self.steps // POINTS) == 0 or i == self.steps:
                    curve.append([i, float(mean_loss(state, validation))])
        seconds = round(time.perf_counter() - start, 1)
        return {"validation": curve[-1][1], "curve": curve, "train": float(loss), "seconds": seconds}


def first_step(curve, loss: float) -> float:
    """The step at which a curve first gets down to a loss that its end is not above."""
    index = next(i for i, (_, point) in enumerate(curve) if point <= loss)
    step, point = curve[index]
    if index == 0:
        return step
    before, above = curve[index - 1]
    return before + (step - before) * (above - loss) / (above - point)


def lag(curve, reference) -> float:
    """The steps that an arm is behind its reference at its end, as a fraction of the run; negative where it is ahead.

    NaN where a curve is not finite.
    """
    steps, loss = curve[-1]
    best = reference[-1][1]
    if not abs(loss - best) < float("inf"):
        return float("nan")
    behind = first_step(reference, loss) if loss >= best else first_step(curve, best)
    return (1 if loss >= best else -1) * (steps - behind) / steps


def figures(found: dict) -> dict:
    """For each text and arm the figures over the seeds that the arm and its reference have."""
    results = {}
    for text, name in itertools.product(TEXTS, ARMS):
        reference = ARMS[name].reference
        seeds = sorted(seed for t, arm, seed in found if (t, arm) == (text, name) and (text, reference, seed) in found)
        if not seeds:
            continue
        pairs = [(found[text, name, seed], found[text, reference, seed]) for seed in seeds]
        row = {"seeds": seeds, "validation": [run["validation"] for run, _ in pairs], "reference": reference}
        if name != reference:
            row["difference"] = interval([run["validation"] - exact["validation"] for run, exact in pairs])
            row["differences"] = [run["validation"] - exact["validation"] for run, exact in pairs]
            row["lag"] = interval([lag(run["curve"], exact["curve"]) for run, exact in pairs])
        results.setdefault(text, {})[name] = row
    return results


def table(results: dict) -> str:
    """A line for each text and arm."""

    def cell(row, form):
        bounds = "-" if row["low"] is None else f"{row['low']:{form}} to {row['high']:{form}}"
        return f"{row['mean']:{form}} | {bounds}"

    lines = [
        "| text | arm | seeds | loss | nat above reference | 95 % | lag | 95 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for text, rows in results.items():
        for name, row in rows.items():
            line = f"| {text} | {name} | {len(row['seeds'])} | {statistics.fmean(row['validation']):.4f} | "
            cells = f"{cell(row['difference'], '+.4f')} | {cell(row['lag'], '+.1%')}" if "lag" in row else "- | | - |"
            lines.append(line + cells + " |")
    return "\n".join(lines)


def plot(path: pathlib.Path, results: dict) -> None:
    """Draw the differences with their intervals, and each seed as a point, a panel a text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(results), 1.2 + 0.35 * max(map(len, results.values()))), layout="constrained")
    for axis, (text, rows) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        names = [name for name in rows if "difference" in rows[name]]
        for y, name in enumerate(names):
            row = rows[name]["difference"]
            half = None if row["low"] is None else row["high"] - row["mean"]
            axis.errorbar(row["mean"], y, xerr=half, fmt="o", color="#0b6fd6", capsize=4)
            axis.plot(rows[name]["differences"], [y + 0.25] * row["seeds"], ".", color="#999999", markersize=4)
        axis.set_yticks(range(len(names)), [f"{name} ({len(rows[name]['seeds'])})" for name in names])
        axis.axvline(0, color="#444444", linewidth=1)
        axis.invert_yaxis()
        axis.set(title=text, xlabel="nat above the reference; mean, 95 % interval, seeds")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(RECIPES), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--seeds", type=int, default=8, help="paired runs of each text and arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run (default: %(default)s)")
    parser.add_argument("--runs", type=pathlib.Path, default=RUNS, help="(default: benchmarks/results/loss_gap)")
    parser.add_argument("--report", action="store_true", help="run nothing: figures of all runs that are there")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.add_argument("--picture", type=pathlib.Path, help="draw the figures here")
    args = parser.parse_args(argv)
    if args.report:
        found = found_runs(args.runs, args.steps)
    else:
        keys = [(text, arm, seed) for seed in range(args.seeds) for text in args.texts for arm in args.arms]
        found = run_missing(args.runs, keys, args.steps, Training(args.steps).run)
    results = figures(found)
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
    if args.picture:
        plot(args.picture, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
