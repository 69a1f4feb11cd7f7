"""The runs of the arms with one seed, and the figures over seeds."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Run:
    """One arm of one seed.

    Attributes:
        step_ms: time of each step.
        train_losses: of each step.
        validation: `(step, loss)`.
        skipped: how many steps were, because scaled gradients overflowed.
    """

    step_ms: list = dataclasses.field(default_factory=list)
    train_losses: list = dataclasses.field(default_factory=list)
    validation: list = dataclasses.field(default_factory=list)
    skipped: int = 0

    @property
    def median_step_ms(self) -> float:
        """Return the median without the first step of a run, which may compile and touches new memory."""
        return float(np.median(self.step_ms[1:]))

    def record(self) -> dict:
        """Return the curves for JSON."""
        validation = [[step, round(loss, 5)] for step, loss in self.validation]
        train = np.round(smooth(self.train_losses)[1], 4).tolist()
        return {"median_ms_per_step": round(self.median_step_ms, 2), "validation": validation, "train": train}


def summarize(seeds: list[dict[str, Run]], reference: str | None = "bf16") -> dict[str, dict]:
    """Return for each arm the last validation losses, their differences to the reference, means, interval, ms a step.

    Args:
        seeds: for each seed name -> Run.
        reference: the arm whose losses are subtracted, where it is one of them.
    """
    results = {}
    for name in seeds[0]:
        losses = [runs[name].validation[-1][1] for runs in seeds]
        results[name] = {"validation_losses": losses, "mean_validation_loss": float(np.mean(losses))}
        results[name]["median_ms_per_step"] = float(np.median([runs[name].median_step_ms for runs in seeds]))
        if reference in seeds[0]:
            # Arms of one seed have the same weights and the same text, so losses are compared seed by seed.
            differences = np.subtract(losses, [runs[reference].validation[-1][1] for runs in seeds])
            results[name][f"minus_{reference}"] = differences.tolist()
            results[name][f"mean_minus_{reference}"] = float(np.mean(differences))
            results[name][f"interval_minus_{reference}"] = interval(differences)
    return results


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t: `P(|T| <= quantile) = 0.95`.

    With `t = sqrt(degrees) tan(angle)` the density is `cos(angle)**(degrees - 1)` on a quarter turn, but for a factor.
    """
    edges = np.linspace(0, np.pi / 2, 20_001)
    mass = np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (degrees - 1))
    return float(degrees**0.5 * np.tan(np.interp(0.95 * mass[-1], mass, edges[1:])))


def interval(differences) -> dict:
    """Return the mean of paired differences and its 95 % confidence interval; of one seed alone the bounds are None."""
    # Seeds are independent, arms of one seed are not: differences have one variance, that of pairs.
    count, mean = len(differences), float(np.mean(differences))
    if count == 1:
        return {"mean": mean, "low": None, "high": None, "seeds": 1}
    half = student_t(count - 1) * float(np.std(differences, ddof=1)) / count**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": count}


def record(seeds: list[dict[str, Run]]) -> list[dict]:
    """Return curves for JSON, one entry a seed."""
    return [{name: run.record() for name, run in runs.items()} for runs in seeds]


def smooth(losses, blocks: int = 100):
    """Return means over up to `blocks` stretches of equal length, and the step in the middle of each."""
    size = max(1, len(losses) // blocks)
    count = len(losses) // size
    return (np.arange(count) + 0.5) * size, np.reshape(losses[: count * size], (count, size)).mean(axis=1)


def validation_of(seeds, name):
    """Return steps `(n,)` and validation losses `(seeds, n)` of an arm."""
    steps = [step for step, _ in seeds[0][name].validation]
    return steps, np.array([[loss for _, loss in runs[name].validation] for runs in seeds])
