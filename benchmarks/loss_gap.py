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
- as served: the same two, with both models evaluated in bf16, or the arm in FP8 with
  current scaling; the reference is evaluated in bf16 either way.
- lag: how many steps earlier the reference was where the arm is at its end, as a
  fraction of the run: its validation curve, between its points a straight line, first
  gets down to the arm's final loss there. Where the arm ends below its reference, roles
  are exchanged and the lag is negative. It is defined for runs that end above, and it
  is no measure of longer runs: the learning rate falls, so the last steps of a run gain
  other amounts than more steps would.

The model is a character-level transformer; embeddings are bf16 in all FP8 arms, and
logits but where the arm says otherwise.
"""

import argparse
import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

sys.path[:0] = [str(pathlib.Path(__file__).parent)]
from _compare_runs import interval  # noqa: E402
from _compare_training import create_state, make_optimizer, mean_loss, train_step  # noqa: E402
from _environment import environment, write  # noqa: E402
from _loss_gap_arms import ABLATION, ARMS, RECIPES, SERVED  # noqa: E402
from _runs import TEXTS, corpora, found_runs, run_missing  # noqa: E402

import jaxfp8  # noqa: E402

RUNS = pathlib.Path(__file__).parent / "results" / "loss_gap.jsonl"
STEPS, BATCH, LENGTH, WIDTH = 600, 16, 64, 64
POINTS = 10  # of a validation curve


class Training:
    """The runs of one number of steps; programs are compiled once for all seeds."""

    def __init__(self, steps: int):
        self.steps, self.corpora, self.models = steps, corpora(), {}
        self.optimizer = make_optimizer(steps)
        # `(state, curve)` from which other arms go on, by text, arm, seed and step
        self.kept = {}

    def run(self, text: str, name: str, seed: int) -> dict:
        """Train; return the final loss, the validation curve `[step, loss]`, the final
        loss as served in bf16 and in FP8, and the time that it took.
        """
        arm, start = ARMS[name], time.perf_counter()
        state, done, curve = self.first_state(text, name, seed)
        validation = self.validation(text)
        kept = {
            self.steps_before(other.after[1])
            for other in ARMS.values()
            if other.after and other.after[0] == name
        }
        batches = self.corpora[text].random_batches(seed, self.steps, BATCH, LENGTH)
        with arm.precision.region():
            for i, batch in itertools.islice(enumerate(batches, start=1), done, None):
                state, loss, _ = jax.block_until_ready(
                    train_step(state, jnp.asarray(batch))
                )
                if i % max(1, self.steps // POINTS) == 0 or i == self.steps:
                    curve.append([i, float(mean_loss(state, validation))])
                if i in kept:
                    self.kept[text, name, seed, i] = jax.device_get(state), [*curve]
        served = {}
        for precision, other in (("bf16", "bf16"), ("fp8", "current")):
            with ARMS[other].precision.region():
                served[precision] = float(mean_loss(state, validation))
        return {
            "validation": curve[-1][1],
            "curve": curve,
            "served": served,
            "train": float(loss),
            "seconds": round(time.perf_counter() - start, 1),
        }

    def steps_before(self, part: float) -> int:
        """The steps before the last `part` of a run."""
        return self.steps - round(part * self.steps)

    def validation(self, text: str):
        return jnp.asarray(self.corpora[text].validation_batches(BATCH, LENGTH))

    def first_state(self, text: str, name: str, seed: int):
        """The state that an arm starts from, how many steps it has, and its curve."""
        arm, vocabulary = ARMS[name], len(self.corpora[text].vocabulary)
        model = self.models.setdefault(
            (text, name), arm.model(vocabulary, LENGTH, WIDTH)
        )
        state = create_state(arm.precision, model, seed, self.optimizer)
        if arm.after is None:
            return state, 0, []
        before, part = arm.after
        done = self.steps_before(part)
        if (text, before, seed, done) not in self.kept:
            self.run(text, before, seed)
        old, curve = self.kept[text, before, seed, done]
        return changed(state, old), done, [*curve]


def changed(state, old):
    """The run of `old` under another recipe, of which `state` is the first state.

    Weights and optimizer go on, and the FP8 state that both recipes have.
    """
    owg = jaxfp8.OVERWRITE_WITH_GRADIENT
    fp8 = flatten_dict(state.params.get(owg, {}))
    fp8 |= flatten_dict(old.params.get(owg, {}))
    params = old.params | {owg: unflatten_dict(fp8)}
    return state.replace(step=old.step, opt_state=old.opt_state, params=params)


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
        row["served"] = served(found, text, name)
        results.setdefault(text, {})[name] = row
    return results


def served(found: dict, text: str, name: str) -> dict:
    """Return for both precisions of evaluation the loss of an arm above that of its
    reference in bf16, and less that of the arm beside it in the same precision; empty
    without such runs.
    """

    def differences(other, precision, others_precision):
        return [
            run["served"][precision] - beside["served"][others_precision]
            for run, beside in pairs(found, text, name, other).values()
            if "served" in run and "served" in beside
        ]

    rows = {}
    for precision in ("bf16", "fp8"):
        above = differences(ARMS[name].reference, precision, "bf16")
        less = differences(ARMS[name].beside, precision, precision)
        if above and less:
            rows[precision] = {"difference": interval(above)}
            rows[precision] |= {"to_delayed": interval(less)}
    if rows:
        runs = [run for run, _ in pairs(found, text, name, name).values()]
        own = [
            run["served"]["fp8"] - run["validation"] for run in runs if "served" in run
        ]
        rows["fp8"]["to_own_precision"] = interval(own)
    return rows


def cell(row, name, form=".4f") -> str:
    """A figure with its interval; a dash where the row has none."""
    if name not in row:
        return "-"
    mean, high = row[name]["mean"], row[name]["high"]
    return f"{mean:+{form}}" + ("" if high is None else f"±{high - mean:{form}}")


def served_table(results: dict) -> str:
    """A line for each arm that was evaluated as served in bf16 and in FP8."""
    heads = [
        f"{precision}, {head}: {text}"
        for precision in ("bf16", "FP8")
        for head in ("above bf16", "less delayed")
        for text in results
    ]
    lines = [f"| | pairs | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name, arm in SERVED.items():
        rows = [rows.get(name, {}).get("served") for rows in results.values()]
        if not all(rows):
            continue
        count = ", ".join(str(row["fp8"]["difference"]["seeds"]) for row in rows)
        cells = [
            cell(row[precision], key)
            for precision in ("bf16", "fp8")
            for key in ("difference", "to_delayed")
            for row in rows
        ]
        lines.append(f"| {arm.title} | {count} | {' | '.join(cells)} |")
    own = [rows.get("delayed", {}).get("served") for rows in results.values()]
    if own and all(own):
        cells = ", ".join(cell(row["fp8"], "to_own_precision") for row in own)
        title = "Delayed scaling in FP8, less its loss with its own scales"
        lines += ["", f"{title}: {cells}."]
    return "\n".join(lines)


def table(results: dict, arms=RECIPES) -> str:
    """A line for each of `arms` that has a result; the lag of recipes alone."""
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
    tables = table(results), table(results, ABLATION), served_table(results)
    print("\n\n".join(tables))
    write(args.json, environment=environment(), results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
