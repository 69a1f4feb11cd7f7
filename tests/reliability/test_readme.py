"""The table of README.md is true: all tests that it names exist, and all tests of this folder are in it."""

import ast
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent
NAMED = set(re.findall(r"`([\w/]+\.py::test_\w+)`", (FOLDER / "README.md").read_text()))


def names_in(file: pathlib.Path) -> set[str]:
    """The `file::test` of a file, from its source."""
    if not file.exists():
        return set()
    functions = (node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    return {f"{file.relative_to(FOLDER.parent).as_posix()}::{name}" for name in functions if name.startswith("test_")}


def test_every_test_named_exists():
    files = {name.split("::")[0] for name in NAMED}
    assert len(files) > 15, "the table was read"
    missing = NAMED - set().union(*(names_in(FOLDER.parent / file) for file in files))
    assert not missing, sorted(missing)


def test_every_row_has_a_test():
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row != "| row | tests |"]
    assert len(rows) > 40 and not [row for row in rows if "::test_" not in row]
    # Nothing that looks like a test escapes the check because it is written in another way.
    assert sum(row.count("::") for row in rows) == sum(len(re.findall(r"`[\w/]+\.py::test_\w+`", row)) for row in rows)


def test_every_test_of_this_folder_is_named():
    own = set().union(*(names_in(file) for file in FOLDER.glob("test_*.py") if file != pathlib.Path(__file__)))
    assert own and not own - NAMED, sorted(own - NAMED)
