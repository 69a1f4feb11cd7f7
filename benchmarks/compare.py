"""Train or time one small language model in every precision: time, memory and loss of
each.

All arms start from the same weights, see the same text and take turns step by step. All
arms train one model: an arm is a dtype, and a recipe that `jaxfp8.autocast` selects.
"""

import argparse
import contextlib
import importlib.util
import math
import sys

import _compare_report
import jax.numpy as jnp
from _compare_arms import ARMS, Arm, has_tf32
from _compare_corpus import Corpus
from _compare_model import HEAD, LanguageModel
from _compare_programs import Program, compile_step
from _compare_training import create_state, make_optimizer, time_steps, train

CHECK_STEPS = 5  # the steps whose losses are compared before times are taken
# nat, between losses after these steps; a first loss is log(103) = 4.6
MAX_CHECK_DIFFERENCE = 0.1

TINY = {"steps": 4, "batch": 2, "width": HEAD, "layers": 1, "length": 32}


def parse_arguments(argv=None) -> argparse.Namespace:
    """Read the command line; an option that makes no sense ends the program with a
    message.
    """
    parser = argparse.ArgumentParser(
        prog="python benchmarks/compare.py",
        description=__doc__.split("\n\n")[0],
        epilog="The proof of convergence of every recipe: "
        f"--steps {_compare_report.PROOF_STEPS} --seeds {_compare_report.PROOF_SEEDS}",
    )
    arms = [name for name in ARMS if name != "tf32" or has_tf32()]
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="training steps, or timed ones (default: 200)",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="paired repetitions (default: 1)"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=arms,
        metavar="ARM",
        help=f"of {', '.join(ARMS)} (default: all)",
    )
    parser.add_argument(
        "--batch", type=int, default=16, help="windows of text a step (default: 16)"
    )
    parser.add_argument(
        "--length", type=int, default=128, help="characters of a window (default: 128)"
    )
    parser.add_argument(
        "--width",
        type=int,
        default=128,
        help=f"width, a multiple of {HEAD} (default: 128)",
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="blocks of the model (default: 2)"
    )
    parser.add_argument(
        "--time-only", action="store_true", help="no training to the end, no losses"
    )
    parser.add_argument(
        "--out", default="compare.png", help="picture (default: compare.png)"
    )
    parser.add_argument("--json", help="write settings, versions and results here")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="4 steps of the smallest model: does it run at all?",
    )
    args = parser.parse_args(argv)
    if args.tiny:
        vars(args).update(TINY)
    # Refuse options that make no sense before anything is compiled.
    if args.steps < 2:
        parser.error(
            f"--steps has to be 2 or more (the first one warms up), got {args.steps}"
        )
    for option in ("seeds", "batch", "length", "layers"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} has to be 1 or more, got {getattr(args, option)}")
    if args.width < HEAD or args.width % HEAD:
        parser.error(f"--width has to be a multiple of {HEAD}, got {args.width}")
    if args.time_only and args.seeds > 1:
        parser.error("--seeds goes with training, not with --time-only")
    if "tf32" in args.arms and not has_tf32():
        parser.error(
            "--arms: tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; "
            "leave it out"
        )
    args.arms = list(dict.fromkeys(args.arms))
    return args


class Comparison:
    """The arms of a command line: their models, programs and first states."""

    def __init__(self, args, corpus: Corpus):
        self.args, self.corpus = args, corpus
        self.arms: dict[str, Arm] = {name: ARMS[name] for name in args.arms}
        # Where only times are measured, any length of the schedule will do: take that
        # of the proof.
        self.optimizer = make_optimizer(
            _compare_report.PROOF_STEPS if args.time_only else args.steps
        )
        count, size = (
            len(corpus.vocabulary),
            {"width": args.width, "layers": args.layers},
        )
        self.models = {
            name: LanguageModel(count, args.length, arm.dtype, **size)
            for name, arm in self.arms.items()
        }
        self.programs: dict[str, Program] = {}

    @property
    def steps(self) -> dict:
        """The compiled training step of each arm, by name."""
        return {name: program.step for name, program in self.programs.items()}

    def states(self, seed: int) -> dict:
        """Return the first TrainState of each arm, by name."""
        return {
            name: create_state(arm, self.models[name], seed, self.optimizer)
            for name, arm in self.arms.items()
        }

    def batches(self, seed: int, steps: int):
        """Yield the batches of a seed, int32 `[batch, length + 1]`, which are the same
        for all arms.
        """
        for windows in self.corpus.random_batches(
            seed, steps, self.args.batch, self.args.length
        ):
            yield jnp.asarray(windows)

    def compile(self) -> None:
        """Compile the training step of every arm."""
        batch = next(self.batches(0, 1))
        for name, state in self.states(0).items():
            print(f"compiling {name}", file=sys.stderr, flush=True)
            self.programs[name] = compile_step(self.arms[name], state, batch)

    def train(self) -> list:
        """Train the arms; return for each seed a dict name -> Run."""
        limit = 2 if self.args.tiny else None
        validation = jnp.asarray(
            self.corpus.validation_batches(16, self.args.length, limit)
        )
        seeds = []
        with progress(self.args.steps * self.args.seeds) as show:
            for seed in range(self.args.seeds):
                batches = self.batches(seed, self.args.steps)
                states = self.states(seed)
                _, runs = train(
                    self.arms,
                    self.steps,
                    states,
                    batches,
                    validation,
                    self.args.steps,
                    show,
                )
                seeds.append(runs)
        return seeds

    def time(self) -> dict:
        """Return the ms of each timed step, by arm; compare losses first.

        Raises:
            AssertionError: the loss of an arm is not finite, or more than
                MAX_CHECK_DIFFERENCE off the reference.
        """
        states, runs = train(
            self.arms,
            self.steps,
            self.states(0),
            self.batches(0, CHECK_STEPS),
            None,
            CHECK_STEPS,
        )
        # An arm may be fast because it computes something else: do not time such an
        # arm.
        losses = {name: run.train_losses[-1] for name, run in runs.items()}
        expected = losses[_compare_report.reference_of(losses) or self.args.arms[0]]
        for name, loss in losses.items():
            if not (
                math.isfinite(loss) and abs(loss - expected) <= MAX_CHECK_DIFFERENCE
            ):
                raise AssertionError(
                    f"{name}: loss {loss} after {CHECK_STEPS} steps, expected "
                    f"{expected}"
                )
        return time_steps(self.steps, states, next(self.batches(1, 1)), self.args.steps)


@contextlib.contextmanager
def progress(total: int):
    """Yield a function of the runs that shows one more turn and its losses on a bar of
    tqdm, if tqdm is installed.
    """
    if not importlib.util.find_spec("tqdm"):
        yield lambda runs: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="step", dynamic_ncols=True) as bar:

        def show(runs: dict) -> None:
            bar.set_postfix(
                {name: f"{run.train_losses[-1]:.3f}" for name, run in runs.items()},
                refresh=False,
            )
            bar.update()

        yield show


def main(argv=None) -> int:
    """Run the command; return 1 where the proof fails."""
    args = parse_arguments(argv)
    comparison = Comparison(args, Corpus())
    comparison.compile()
    if args.time_only:
        seeds, results = (
            [],
            _compare_report.timed_results(comparison.time(), comparison.programs),
        )
    else:
        seeds = comparison.train()
        results = _compare_report.results_of(seeds, comparison.programs)
    print(_compare_report.table(results))
    print(_compare_report.notes(comparison.programs))
    if args.json:
        _compare_report.write_json(args.json, vars(args), results, seeds)
    if importlib.util.find_spec("matplotlib"):
        from _compare_plot import plot

        plot(args.out, _compare_report.device_name(), results, seeds)
        print(f"picture: {args.out}")
    else:
        print("no picture: pip install matplotlib")
    # Only a run that is long enough to prove convergence has a verdict.
    if args.time_only or not _compare_report.is_proof(
        args.steps, args.seeds, args.arms
    ):
        return 0
    passed, verdict = _compare_report.judge(results)
    print(verdict)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
