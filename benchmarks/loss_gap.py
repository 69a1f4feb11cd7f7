"""The gap of FP8's validation loss to bf16's, and what makes it: paired runs on two
texts.

    python benchmarks/loss_gap.py [--arms ARM ...] [--texts manual source] [--seeds N]
                                  [--runs PATH] [--report]

All arms of a seed start from the same weights and see the same batches. A run is one
line of JSON in `--runs`; what is there is not run again, and `--report` runs nothing.
Bits differ from processor to processor, so that two runs are a pair where one kind of
processor made both. The figures of an arm are means over its pairs, with 95 %
confidence intervals (Student's t):

- nat above bf16: its loss at the end less that of its reference, which is "f32" in
  float32 and else "bf16".
- less delayed: its loss less that of delayed scaling's run, the same way.
- lag: how many steps earlier the reference was where the arm is at its end, as a
  fraction of the run: its validation curve, between its points a straight line, first
  gets down to the arm's final loss there. Where the arm ends below its reference, roles
  are exchanged and the lag is negative. It is defined for runs that end above, and it
  is no measure of longer runs: the learning rate falls, so the last steps of a run gain
  other amounts than more steps would.

The model is a character-level transformer; embeddings and logits are bf16 in all FP8
arms.
"""

import argparse
import itertools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
from _compare_runs import interval  # noqa: E402
from _compare_training import create_state, make_optimizer, mean_loss, train_step  # noqa: E402
from _environment import environment  # noqa: E402
from _loss_gap_arms import ABLATION, ARMS, RECIPES  # noqa: E402
from _runs import TEXTS, corpora, found_runs, run_missing  # noqa: E402

RUNS = pathlib.Path(__file__).parent / "results" / "loss_gap.jsonl"
STEPS, BATCH, LENGTH, WIDTH, LAYERS = 600, 16, 64, 64, 2
POINTS = 10  # of a validation curve


class Training:
    """The runs of one number of steps; programs are compiled once for all seeds."""

    def __init__(self, steps: int):
        self.steps, self.corpora, self.models = steps, corpora(), {}
        self.optimizer = make_optimizer(steps)

    def run(self, text: str, arm: str, seed: int) -> dict:
        """Train; return the final loss, the validation curve `[step, loss]` and the
        time that it took.
        """
        corpus, start = self.corpora[text], time.perf_counter()
        model = self.models.setdefault(
            (text, arm), ARMS[arm].model(len(corpus.vocabulary), LENGTH, WIDTH, LAYERS)
        )
        validation, curve = jnp.asarray(corpus.validation_batches(BATCH, LENGTH)), []
        state = create_state(ARMS[arm].precision, model, seed, self.optimizer)
        evaluated = ARMS[ARMS[arm].evaluated_in or arm].precision
        with ARMS[arm].precision.region():
            for i, batch in enumerate(
                corpus.random_batches(seed, self.steps, BATCH, LENGTH), start=1
            ):
                state, loss, _ = jax.block_until_ready(
                    train_step(state, jnp.asarray(batch))
                )
                if i % max(1, self.steps // POINTS) == 0 or i == self.steps:
                    with evaluated.region():
                        curve.append([i, float(mean_loss(state, validation))])
        seconds = round(time.perf_counter() - start, 1)
        return {
            "validation": curve[-1][1],
            "curve": curve,
            "train": float(loss),
            "seconds": seconds,
        }


def first_step(curve, loss: float) -> float:
    """The step at which a curve first gets down to a loss that its end is not above."""
    index = next(i for i, (_, point) in enumerate(curve) if point <= loss)
    step, point = curve[index]
    if index == 0:
        return step
    before, above = curve[index - 1]
    return before + (step - before) * (above - loss) / (above - point)


def lag(curve, reference) -> float:
    """The steps that an arm is behind its reference at its end, as a fraction of the
    run; negative where it is ahead.

    NaN where a curve is not finite.
    """
    steps, loss = curve[-1]
    best = reference[-1][1]
    if not abs(loss - best) < float("inf"):
        return float("nan")
    behind = first_step(reference, loss) if loss >= best else first_step(curve, best)
    return (1 if loss >= best else -1) * (steps - behind) / steps


def processor(run: dict) -> str:
    return run["environment"]["cpu"]


def pairs(found: dict, text: str, name: str, other: str) -> dict:
    """Return `(run, run of the other arm)` by seed, of the seeds that both have from
    one kind of processor.
    """
    exact = {
        seed: run
        for (t, arm, seed), run in sorted(found.items())
        if (t, arm) == (text, other)
    }
    runs = {
        seed: found[text, name, seed] for seed in exact if (text, name, seed) in found
    }
    return {
        seed: (run, exact[seed])
        for seed, run in runs.items()
        if processor(run) == processor(exact[seed])
    }


def figures(found: dict) -> dict:
    """Return for each text and arm the figures over the pairs of the arm and its
    reference.
    """
    results = {}
    for text, name in itertools.product(TEXTS, ARMS):
        reference = ARMS[name].reference
        both = pairs(found, text, name, reference)
        if not both:
            continue
        row = {
            "seeds": list(both),
            "validation": [run["validation"] for run, _ in both.values()],
        }
        row |= {"reference": reference}
        if name != reference:
            row["differences"] = [
                run["validation"] - exact["validation"] for run, exact in both.values()
            ]
            row["difference"] = interval(row["differences"])
            row["lag"] = interval(
                [lag(run["curve"], exact["curve"]) for run, exact in both.values()]
            )
        with_delayed = pairs(found, text, name, "delayed")
        if with_delayed and name not in ("delayed", reference):
            row["to_delayed"] = interval(
                [a["validation"] - b["validation"] for a, b in with_delayed.values()]
            )
        results.setdefault(text, {})[name] = row
    return results


def table(results: dict, arms=RECIPES) -> str:
    """A line for each of `arms` that has a result; the lag of recipes alone."""

    def cell(row, name, form):
        if name not in row:
            return "-"
        mean, high = row[name]["mean"], row[name]["high"]
        return f"{mean:+{form}}" + ("" if high is None else f"±{high - mean:{form}}")

    columns = [
        ("above bf16", "difference", ".4f"),
        ("less delayed", "to_delayed", ".4f"),
    ]
    if arms is RECIPES:
        columns += [("lag", "lag", ".1%")]
    heads = [f"{head}: {text}" for head, _, _ in columns for text in results]
    lines = [f"| | pairs | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name, arm in arms.items():
        rows = [rows.get(name, {}) for rows in results.values()]
        if any("difference" in row for row in rows):
            pairs = ", ".join(str(len(row.get("seeds", ()))) for row in rows)
            cells = [cell(row, key, form) for _, key, form in columns for row in rows]
            lines.append(f"| {arm.title} | {pairs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(RECIPES),
        metavar="ARM",
        help=", ".join(ARMS),
    )
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument(
        "--seeds",
        type=int,
        default=8,
        help="paired runs of each text and arm (default: %(default)s)",
    )
    parser.add_argument(
        "--first-seed", type=int, default=0, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=pathlib.Path,
        default=RUNS,
        help="(default: benchmarks/results/loss_gap.jsonl)",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing: figures of all runs that are there",
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    args = parser.parse_args(argv)
    if args.report:
        found = found_runs(args.runs, args.steps)
    else:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        keys = [
            (text, arm, seed)
            for seed in seeds
            for text in args.texts
            for arm in args.arms
        ]
        found = run_missing(args.runs, keys, args.steps, Training(args.steps).run)
    results = figures(found)
    print(f"{table(results, RECIPES)}\n\n{table(results, ABLATION)}")
    if args.json:
        args.json.write_text(
            json.dumps({"environment": environment(), "results": results}, indent=1)
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
