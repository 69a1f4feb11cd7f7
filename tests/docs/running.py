"""Running an example in a process of its own, reading its table, and importing it."""

import contextlib
import importlib
import pathlib

import another_process
from promotion import as_users_have_jax

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(folder, name, *options):
    """The finished process of an example, in a folder; devices are those that a user
    has.
    """
    return another_process.python(
        EXAMPLES / f"{name}.py", *options, cwd=folder, XLA_FLAGS=None
    )


@contextlib.contextmanager
def imported(monkeypatch, name):
    """An example as a module, with JAX as a user has it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with as_users_have_jax():
        yield importlib.import_module(name)


def rows(lines) -> dict[str, list[str]]:
    """The lines of a table by their first word."""
    return {line.split()[0]: line.split()[1:] for line in lines}


def assert_table(lines):
    """The table of two arms after a tiny run: a loss, its difference to bf16, a
    time.
    """
    table = rows(lines)
    assert set(table) == {"arm", "bf16", "jaxfp8"} and table["bf16"][1] == "-"
    for arm in ("bf16", "jaxfp8"):
        loss, _, ms, _ = table[arm]
        assert 0 < float(loss) < 5 and float(ms) > 0  # log(103 characters) is 4.6
    return table
