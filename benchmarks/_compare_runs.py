"""Runs of the arms with one seed, and figures over several seeds."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Run:
    """The curves and times of one arm with one seed.

    Attributes:
        step_ms: the time of each step, in ms.
        train_losses: the training loss of each step, in nat.
        validation: pairs `(step, validation loss)`.
        skipped: how many steps were skipped, because scaled gradients overflowed.
    """

    step_ms: list = dataclasses.field(default_factory=list)
    train_losses: list = dataclasses.field(default_factory=list)
    validation: list = dataclasses.field(default_factory=list)
    skipped: int = 0

    @property
    def median_step_ms(self) -> float:
        """The median time of a step, without the first step of a run, which may compile
        and touches new memory.
        """
        return float(np.median(self.step_ms[1:]))

    def record(self) -> dict:
        """Return the median time and the curves as a dict for JSON."""
        validation = [[step, round(loss, 5)] for step, loss in self.validation]
        train = np.round(smooth(self.train_losses)[1], 4).tolist()
        return {
            "median_ms_per_step": round(self.median_step_ms, 2),
            "validation": validation,
            "train": train,
        }


def summarize(
    seeds: list[dict[str, Run]], reference: str | None = "bf16"
) -> dict[str, dict]:
    """Return for each arm its last validation losses, their mean and the median ms of a
    step.

    If `reference` is one of the arms, the result also has the differences to its
    losses, their mean and the interval.

    Args:
        seeds: for each seed a dict name -> Run.
        reference: the name of the arm whose losses are subtracted, or None.
    """
    results = {}
    for name in seeds[0]:
        losses = [runs[name].validation[-1][1] for runs in seeds]
        results[name] = {
            "validation_losses": losses,
            "mean_validation_loss": float(np.mean(losses)),
        }
        results[name]["median_ms_per_step"] = float(
            np.median([runs[name].median_step_ms for runs in seeds])
        )
        if reference in seeds[0]:
            # Arms of one seed have the same weights and the same text, so losses are
            # compared seed by seed.
            differences = np.subtract(
                losses, [runs[reference].validation[-1][1] for runs in seeds]
            )
            results[name][f"minus_{reference}"] = differences.tolist()
            results[name][f"mean_minus_{reference}"] = float(np.mean(differences))
            results[name][f"interval_minus_{reference}"] = interval(differences)
    return results


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t: `P(|T| <= quantile) = 0.95`.

    With `t = sqrt(degrees) tan(angle)` the density of the angle is
    `cos(angle)**(degrees - 1)`, up to a factor.
    """
    edges = np.linspace(0, np.pi / 2, 20_001)
    mass = np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (degrees - 1))
    return float(degrees**0.5 * np.tan(np.interp(0.95 * mass[-1], mass, edges[1:])))


def interval(differences) -> dict:
    """Return the mean of paired differences and its 95 % confidence interval; with one
    seed the bounds are None.
    """
    # Seeds are independent of each other, but arms of one seed are not: the variance is
    # that of the differences.
    count, mean = len(differences), float(np.mean(differences))
    if count == 1:
        return {"mean": mean, "low": None, "high": None, "seeds": 1}
    half = student_t(count - 1) * float(np.std(differences, ddof=1)) / count**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": count}


def record(seeds: list[dict[str, Run]]) -> list[dict]:
    """Return the curves for JSON: for each seed a dict name -> `Run.record()`."""
    return [{name: run.record() for name, run in runs.items()} for runs in seeds]


def smooth(losses, blocks: int = 100):
    """Average losses over stretches of equal length; return
    `(steps in the middle, means)`, both f64 `(n,)`.

    n is the number of losses where that is less than `blocks`, else from `blocks` to
    `2 * blocks - 1`.
    """
    size = max(1, len(losses) // blocks)
    count = len(losses) // size
    return (np.arange(count) + 0.5) * size, np.reshape(
        losses[: count * size], (count, size)
    ).mean(axis=1)


def validation_of(seeds, name):
    """Return `(steps, losses)` of an arm's validations: a list of n steps, and an array
    `(seeds, n)`.
    """
    steps = [step for step, _ in seeds[0][name].validation]
    return steps, np.array(
        [[loss for _, loss in runs[name].validation] for runs in seeds]
    )
