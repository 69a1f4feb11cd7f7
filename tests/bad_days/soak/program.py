"""What happens in a run: random batches, trainers, restarts and meshes, step by step.

As in `mesh/cases.py` every tensor that is quantized has an amax of 7 times a power of
two, so that scales are powers of two and sums exact, spikes and all. What happens to a
batch is an event of `bad_days/events.py`.
"""

import dataclasses

import ml_dtypes
import numpy as np
from mesh import cases

from bad_days import events as bad_days

MESHES = ("one device", "dp", "fsdp 2x4", "fsdp+tp 2x2x2")


@dataclasses.dataclass(frozen=True)
class Event:
    """One step and what comes before it.

    Attributes:
        before: "save", "restore" (the last checkpoint: the run goes back), "restart"
            (through a checkpoint), or "".
        mesh: where the step runs.
        trainer: "guarded" (a weight without a finite gradient stays), "skipping" (a
            step that is not finite changes nothing) or "accumulating" (two batches,
            guarded).
        batches: `(x, target, size, pin)` of each microbatch; see `batch`.
        what: the kind of data, for the report.
    """

    before: str
    mesh: str
    trainer: str
    batches: tuple
    what: str

    def __str__(self) -> str:
        return ", ".join(
            filter(None, (self.what, self.trainer, self.mesh, self.before))
        )


def batch(rng, what):
    """`(x, target, size, pin)`: x bf16 and target f32 `[b, s, d]`; size f32 `[b, 1, f]`
    scales the hidden layer, and pin bool `[b, s, f]` says which one of its values and
    gradients is 7 times that."""
    level = int(rng.integers(-1, 2))
    x, row = cases.tensor(rng, level)
    target, _ = cases.tensor(rng, -level)
    x, target = bad_days.apply(what, rng, x, target)
    size, column = cases.hidden_sizes(rng, row)
    pin = np.zeros((cases.BATCH, cases.LENGTH, cases.HIDDEN), bool)
    pin[row, rng.integers(cases.LENGTH), column] = True
    return x.astype(ml_dtypes.bfloat16), target, size, pin


KINDS = dict(zip(bad_days.EVENTS, (0.7, 0.06, 0.06, 0.04, 0.08, 0.06), strict=True))
TRAINERS = {"guarded": 0.5, "skipping": 0.25, "accumulating": 0.25}
BEFORE = {"": 0.88, "save": 0.04, "restore": 0.04, "restart": 0.04}
MOVE = 0.05


def events(steps: int, seed: int):
    """The events of a run, one after the other."""
    rng = np.random.default_rng(seed)
    mesh = MESHES[0]

    def choice(options):
        return str(rng.choice(list(options), p=list(options.values())))

    for _ in range(steps):
        if rng.random() < MOVE:
            mesh = str(rng.choice([name for name in MESHES if name != mesh]))
        what = choice(KINDS)
        trainer = choice(TRAINERS)
        count = 2 if trainer == "accumulating" else 1
        # Of two microbatches the last is as the step, the other ordinary.
        batches = [batch(rng, "ordinary") for _ in range(count - 1)] + [
            batch(rng, what)
        ]
        yield Event(choice(BEFORE), mesh, trainer, tuple(batches), what)


SCRIPT = (
    ("", "one device", "guarded", "ordinary"),
    ("save", "one device", "guarded", "spike in x"),
    ("", "one device", "guarded", "NaN"),
    ("", "one device", "guarded", "ordinary"),
    ("", "dp", "skipping", "Inf"),
    ("", "dp", "skipping", "spike in grad"),
    ("restore", "fsdp 2x4", "accumulating", "tiny"),
    ("restart", "fsdp 2x4", "accumulating", "Inf"),
    ("", "one device", "guarded", "ordinary"),
)


def scripted():
    """A short run in which everything happens: see `Event` for the fields."""
    rng = np.random.default_rng(0)
    for before, mesh, trainer, what in SCRIPT:
        batches = [batch(rng, "ordinary")] if trainer == "accumulating" else []
        yield Event(before, mesh, trainer, (*batches, batch(rng, what)), what)
