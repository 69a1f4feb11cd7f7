"""What a row of the scoreboard is, and how a library's outcome on it is called."""

import contextlib
import dataclasses
import enum
import re
from collections.abc import Callable

import jax


class Outcome(enum.Enum):
    RIGHT = "right"
    WRONG = "silently wrong"
    # an error that names an operand or the state, where an answer was wanted
    NAMED = "named error"
    ERROR = "error"
    NOT_APPLICABLE = "not applicable"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """An outcome and the number or message behind it."""

    outcome: Outcome
    measured: str


ROWS: list["Row"] = []


@dataclasses.dataclass(frozen=True)
class Row:
    """One bad day.

    Attributes:
        of: what goes wrong, and what is right then.
        case: which case, where there are several; else "".
        judge: `library -> Verdict`. It may raise what the library raises.
        peer: why it does not apply to Flax, or None.
        any_layer: whether NNX has it as well; not where it knows Linen, or is about the
            numbers of operands alone.
    """

    of: str
    case: str
    judge: Callable
    peer: str | None
    any_layer: bool

    @property
    def subject(self) -> str:
        return self.judge.__module__.rsplit(".", 1)[-1]

    @property
    def name(self) -> str:
        return self.judge.__name__

    @property
    def title(self) -> str:
        return f"{self.of}; {self.case}" if self.case else self.of


def row(of: str, case: str = "", *, peer: str | None = None, any_layer: bool = False):
    """Makes `library -> Verdict` a row."""

    def register(judge):
        ROWS.append(Row(of, case, judge, peer, any_layer))
        return judge

    return register


class Tally:
    """Counts the cases of a row; one wrong case makes the row wrong, silently unless
    all of them raised.
    """

    def __init__(self):
        self.count = 0
        self.wrong = []
        self.silent = False

    def __call__(self, good, what: str, silent: bool = True) -> None:
        self.count += 1
        if not bool(good):
            # What is silent is said first.
            self.wrong.insert(
                0 if silent and not self.silent else len(self.wrong), what
            )
            self.silent |= silent

    @contextlib.contextmanager
    def raising(self, what: str):
        """An error in here is a wrong case of its own, and no silent one."""
        try:
            yield
        except Exception as error:  # whatever a library raises
            self(False, f"{what}: {message(error)}", silent=False)

    def verdict(self, measured: str = "") -> Verdict:
        """`measured` is said where all is right; else how many are wrong, and the first
        of them.
        """
        if not self.count:
            raise AssertionError("a row without cases proves nothing")
        if not self.wrong:
            return Verdict(
                Outcome.RIGHT, measured or f"{self.count} of {self.count} right"
            )
        outcome = Outcome.WRONG if self.silent else Outcome.ERROR
        return Verdict(
            outcome, f"{len(self.wrong)} of {self.count} wrong: {self.wrong[0]}"
        )


# What an error must say to be called named: the operand or state that it is about.
_NAMES = (
    r"\b(x|kernel|grad|lhs|rhs|state|scale|amax_history|restored|"
    r"_overwrite_with_gradient)\b|\w_(scale|amax_history)\b"
)


def message(error: BaseException) -> str:
    """An error's type and first line, shortened."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def is_named(error: BaseException, names: str = _NAMES) -> bool:
    return re.search(names, str(error)) is not None


def refused(
    call: Callable, tally: Tally, what: str, names: str, accepted=lambda got: False
) -> None:
    """One case: `call` must raise an error that names what `names` matches, or give
    what is `accepted` as right.
    """
    try:
        got = jax.block_until_ready(call())
    except Exception as error:  # whatever a library raises is judged by what it says
        tally(is_named(error, names), f"{what}: {message(error)}", silent=False)
    else:
        tally(accepted(got), f"{what} is accepted")


def judged(row: Row, library) -> Verdict:
    """The verdict, where the library raises as well."""
    if row.peer and not library.is_ours:
        return Verdict(Outcome.NOT_APPLICABLE, row.peer)
    try:
        return row.judge(library)
    except Exception as error:  # whatever a library raises is its outcome
        return Verdict(
            Outcome.NAMED if is_named(error) else Outcome.ERROR, message(error)
        )
