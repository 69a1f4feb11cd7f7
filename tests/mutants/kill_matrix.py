"""A kill matrix: which tests fail for which small change of the package.

    python -m tests.mutants.kill_matrix [PYTEST'S ARGUMENTS] # hours: see --help
    python -m tests.mutants.kill_matrix --merge [PARTS]      # parts into one, a report

A mutant is one change inside one function: a comparison, an operator, a constant, a
condition, what is returned. `kill_matrix.json` has for each mutant the tests that fail,
those that pass, and those that run its line but had no time.

One run of the tests finds which reach the line of which mutant. A mutant is then tried
by them, first the cheapest of each file, and by their files' other tests, until
`--seconds` are over. It lives in a fork, whose import of the package compiles it: what
a test does in a Python that it starts, it does without the mutant.

400 mutants are one in 27. A test that could leave by them may be all that sees another:
look at what it shows.
"""

import argparse
import ast
import collections
import dataclasses
import hashlib
import importlib.machinery
import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time

import jax
import pytest

# Imported once, in place of in each fork; none starts a backend, whose threads a fork
# would lack.
for name in ("chex", "flax.linen", "flax.nnx", "hypothesis", "optax"):
    importlib.import_module(name)
ROOT = pathlib.Path.cwd()
MATRIX = ROOT / "tests" / "mutants" / "kill_matrix.json"
MARKS = "not slow and not gpu and not ci"
OPTIONS = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
SILENCE = 600  # seconds, after which a test hangs
PAIRS = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    "min": "max",
    "minimum": "maximum",
    "any": "all",
}
OTHER = PAIRS | {b: a for a, b in PAIRS.items()} | {ast.FloorDiv: ast.Mult}
# Messages, what Python evaluates outside of a call, and `zip(strict=True)`.
LEFT_OUT = ast.Raise, ast.JoinedStr, ast.arguments, ast.AnnAssign


@dataclasses.dataclass
class Mutant:
    """A node of a tree, its field, and what that becomes."""

    name: str  # path, function, kind, number: an edit elsewhere leaves it
    path: pathlib.Path
    lines: range  # from the start of its statement
    tree: ast.Module
    change: tuple


def changes(node):
    """Yield kind, field and new value for each way to change a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield "comparison", "ops", [OTHER[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            yield "operator", "op", OTHER[type(op)]()
        case ast.Name(id=name) if name in OTHER:
            yield "name", "id", OTHER[name]
        case ast.Attribute(attr=name) if name in OTHER:
            yield "name", "attr", OTHER[name]
        case ast.UnaryOp(op=ast.Not()):
            yield "not", "operand", ast.UnaryOp(ast.Not(), node.operand)
        case ast.Constant(value=bool(value)):
            yield "constant", "value", not value
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", "value", value + 1
        case ast.If() | ast.IfExp():
            yield "true", "test", ast.Constant(True)
            yield "false", "test", ast.Constant(False)
        case ast.Return(value=ast.AST()):
            yield "return", "value", ast.Constant(None)


def mutants_of(path: pathlib.Path) -> list[Mutant]:
    tree = ast.parse(path.read_text())
    found, counts = [], collections.Counter()

    def walk(node, function, is_inside, first):
        if isinstance(node, LEFT_OUT) or getattr(node, "arg", "") == "strict":
            return
        first = node.lineno if isinstance(node, ast.stmt) else first
        for kind, *change in changes(node) if is_inside else ():
            name = f"{path.relative_to(ROOT)} {function} {kind}"
            counts[name] += 1
            lines = range(first, getattr(node, "test", node).end_lineno + 1)
            change = node, *change
            found.append(Mutant(f"{name} {counts[name]}", path, lines, tree, change))
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
            is_inside = is_inside or isinstance(node, ast.FunctionDef)
            children = node.body
        for child in children:
            walk(child, function, is_inside, first)

    walk(tree, "", False, 0)
    return found


def choose(count: int) -> list[Mutant]:
    """About so many mutants, from each file by its size; an edit changes few."""

    def place(mutant):
        return hashlib.sha256(f"0 {mutant.name}".encode()).digest()

    files = [mutants_of(path) for path in sorted(ROOT.glob("jaxfp8/**/*.py"))]
    share = count / sum(map(len, files))
    return [
        mutant
        for file in files
        for mutant in sorted(file, key=place)[: max(1, round(share * len(file)))]
    ]


class Baseline:
    """Send each test that passes, with its seconds and the mutants that it reaches."""

    def __init__(self, pipe, mutants):
        self.pipe, self.places = pipe, collections.defaultdict(dict)
        for mutant in mutants:
            for line in mutant.lines:
                names = self.places[str(mutant.path)].setdefault(line, [])
                names.append(mutant.name)

    def trace(self, frame, event, arg):
        lines = self.places.get(frame.f_code.co_filename)
        if lines is None:
            return None
        self.reached.update(lines.get(frame.f_lineno, ()))
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        jax.clear_caches()  # a test reaches what an earlier one has traced
        self.reached, self.passed = set(), False
        start = time.process_time()
        for module in threading, sys:
            module.settrace(self.trace)
        try:
            return (yield)
        finally:
            for module in threading, sys:
                module.settrace(None)
            seconds = round(time.process_time() - start, 2)
            if self.passed:
                self.pipe.send((item.nodeid, (seconds, sorted(self.reached))))

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.passed = report.passed


class Trial:
    """Send each test with whether it fails: so do those that hang or die."""

    def __init__(self, pipe, tests):
        self.pipe, self.tests = pipe, tests

    def pytest_collection_finish(self, session):
        for test in set(self.tests) - {item.nodeid for item in session.items}:
            self.pipe.send((test, True))

    def pytest_runtest_logstart(self, nodeid):
        self.failed = False
        self.pipe.send((nodeid, True))

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed

    def pytest_runtest_logfinish(self, nodeid):
        self.pipe.send((nodeid, self.failed))


def install(mutant: Mutant) -> None:
    """Let the next import of the mutant's module compile the mutant."""
    setattr(*mutant.change)
    code = compile(ast.fix_missing_locations(mutant.tree), mutant.path, "exec")
    loader = importlib.machinery.SourceFileLoader
    from_disk = loader.get_code

    def get_code(self, name):
        is_mutant = pathlib.Path(self.path) == mutant.path
        return code if is_mutant else from_disk(self, name)

    loader.get_code = get_code
    if {"ops", "_jax"} & set(mutant.path.parts):
        # Their rules act while XLA compiles, when a kept program has its name already.
        jax.config.update("jax_enable_compilation_cache", False)


def run_pytest(pipe, arguments, plugin, mutant) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    if mutant is not None:
        install(mutant)
    pipe.send(("ended", pytest.main([*OPTIONS, *arguments], plugins=[plugin])))


def in_fork(arguments, plugin, what, mutant=None) -> dict:
    """What the plugin sends, from pytest in a fork of this process; at last "ended"."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    work = theirs, arguments, plugin(theirs, what), mutant
    child = multiprocessing.get_context("fork").Process(target=run_pytest, args=work)
    child.start()
    theirs.close()
    sent = {}
    try:
        while "ended" not in sent and ours.poll(SILENCE):
            test, result = ours.recv()
            sent[test] = result
    except EOFError:
        pass  # it died
    child.kill()
    child.join()
    return sent


def in_turn(reaching: set[str], baseline: dict) -> list[str]:
    """The tests that reach a mutant, then the others of their files: each time one of
    each file, the cheapest first.
    """
    files = {test: test.partition("::")[0] for test in baseline}
    reached = {files[test] for test in reaching}
    turns, counts = {}, collections.Counter()
    for test in sorted(baseline, key=lambda test: baseline[test][0]):
        if files[test] in reached:
            group = test not in reaching, files[test]
            counts[group] += 1
            turns[test] = group[0], counts[group]
    return sorted(turns, key=turns.get)


def try_mutant(mutant: Mutant, baseline: dict, seconds: float) -> dict:
    reaching = {test for test in baseline if mutant.name in baseline[test][1]}
    tests = []
    for test in in_turn(reaching, baseline):
        seconds -= baseline[test][0]
        if seconds > 0 or not tests:
            tests.append(test)
    fails = in_fork(tests, Trial, tests, mutant) if tests else {}
    fails.pop("ended", None)
    node = mutant.change[0]
    return {
        "at": f"{node.lineno}:{node.col_offset}",
        "fail": [test for test in fails if fails[test]],
        "pass": [test for test in fails if not fails[test]],
        "untried": reaching.difference(fails),
    }


LISTS = "fail", "pass", "untried"


def load(path) -> dict:
    matrix = json.loads(pathlib.Path(path).read_text())
    tests = list(matrix["tests"])
    for row in matrix["mutants"].values():
        row |= {field: [tests[i] for i in numbers(row[field])] for field in LISTS}
    return matrix


def save(matrix: dict, path) -> None:
    """Write tests as the numbers of their lines."""
    numbered = {test: i for i, test in enumerate(sorted(matrix["tests"]))}
    rows = {
        name: row | {field: ranges(numbered[t] for t in row[field]) for field in LISTS}
        for name, row in matrix["mutants"].items()
    }
    text = json.dumps(matrix | {"mutants": rows}, indent=1, sort_keys=True)
    pathlib.Path(path).write_text(text + "\n")


def ranges(values) -> str:
    """Render [1, 2, 3, 7] as "1-3 7"."""
    runs = []
    for value in sorted(values):
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return " ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def numbers(text: str) -> list[int]:
    ends = [run.split("-") for run in text.split()]
    return [i for run in ends for i in range(int(run[0]), int(run[-1]) + 1)]


def can_leave(matrix: dict) -> list[str]:
    """The tests whose every kill dies elsewhere, all at once, the slowest first; only
    those that had time for every mutant that they reach.
    """
    rows = matrix["mutants"].values()
    untried = {test for row in rows for test in row["untried"]}
    killers = [set(row["fail"]) for row in rows]
    leaving = []
    for test in sorted(matrix["tests"], key=matrix["tests"].get, reverse=True):
        kills = [tests for tests in killers if test in tests]
        if kills and test not in untried and min(map(len, kills)) > 1:
            leaving.append(test)
            for tests in kills:
                tests.remove(test)
    return leaving


def report(matrix: dict) -> None:
    rows = matrix["mutants"]
    killed = {name for name in rows if rows[name]["fail"]}
    survivors = {name for name in rows if rows[name]["pass"]} - killed
    for name in sorted(survivors):
        row = rows[name]
        print(f"survives: {name}, {row['at']}; {len(row['untried'])} tests untried")
    for test in can_leave(matrix):
        print(f"could leave: {test}, {matrix['tests'][test]} s")
    unreached = len(rows) - len(killed) - len(survivors)
    print(f"{len(rows)} mutants: {len(killed)} killed, {len(survivors)} survive")
    print(f"{unreached} that no test reaches")


def run(args, arguments: list[str]) -> dict:
    mutants = choose(args.count)
    kept = pathlib.Path(args.baseline or os.devnull)
    if kept.is_file():
        baseline = json.loads(kept.read_text())
    else:
        baseline = in_fork(arguments, Baseline, mutants)
        ended = baseline.pop("ended", None)
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise SystemExit(f"pytest {' '.join(arguments)}: {ended!r}")
        kept.write_text(json.dumps(baseline))
    part, parts = map(int, args.part.split("/"))
    only = tuple(args.only.split(","))
    mine = [mutant for mutant in mutants if mutant.name.startswith(only)]
    matrix = {"tests": {test: baseline[test][0] for test in baseline}, "mutants": {}}
    for mutant in mine[part - 1 :: parts]:
        row = try_mutant(mutant, baseline, args.seconds)
        matrix["mutants"][mutant.name] = row
        save(matrix, args.out)
        print(f"{mutant.name}: {len(row['fail'])} fail, {len(row['pass'])} pass")
    return matrix


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--count", type=int, default=400, help="of mutants; default %(default)s")
    add("--only", default="", help="mutants whose names begin so, or so: A,B")
    add("--part", default="1/1", metavar="K/N", help="of the mutants")
    add("--seconds", type=float, default=30, help="of tests, for a mutant")
    add("--baseline", metavar="FILE", help="which tests reach what, kept between runs")
    add("--out", default=MATRIX, help="default %(default)s")
    add("--merge", nargs="*", metavar="FILE", help="default: what --out has")
    args, arguments = parser.parse_known_args()
    if args.merge is None:
        matrix = run(args, arguments or ["tests", "-m", MARKS])
    else:
        matrix = {"tests": {}, "mutants": {}}
        for part in map(load, args.merge or [args.out]):
            for key in matrix:
                matrix[key] |= part[key]
        save(matrix, args.out)
    report(matrix)


if __name__ == "__main__":
    main()
