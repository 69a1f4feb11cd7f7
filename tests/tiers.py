"""The three tiers of tests: `make test` (minutes), CI, and `make test-all`, from marks and the table below.

`slow` is what only `make test-all` runs, `ci` what CI runs besides `make test`. Few tests carry either by hand.
"""

import collections
import pathlib

# Folders and modules that `make test` leaves to CI: what is not needed to know whether training is right on a CPU.
CI = {
    *("aot", "benchmarks", "compare", "cuda", "fuzz", "integrations", "mutants", "native", "run_examples"),
    *("selftest", "soak", "test_autotune.py", "test_docs.py", "test_machine.py", "test_plan_files.py"),
}
# Where `make test` runs one case of each test; elsewhere it runs every value of every parameter once.
ONE_CASE = {
    *("bad_days", "convert", "inference", "inspect", "mesh", "mixed_precision", "reliability"),
    *("test_einsum.py", "test_ragged_dot.py"),
}


def mark(items, tests: pathlib.Path) -> None:
    """Add `slow` and `ci` to what the rules and the table say."""
    functions = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        path = cases[0].path.relative_to(tests)
        in_ci, one_case = bool(CI & {path.parts[0]}) or "mutant" in path.name, path.parts[0] in ONE_CASE
        values = collections.defaultdict(dict)
        positions = [_positions(case, values) for case in cases]
        sizes = {names: len(keys) for names, keys in values.items()}
        for case, position in zip(cases, positions, strict=True):
            if case.get_closest_marker("varied") and _differences(case, position) > 1:
                case.add_marker("slow")
            elif in_ci or (case is not cases[0] if one_case else not _is_diagonal(position, sizes)):
                case.add_marker("ci")


def _positions(case, values) -> dict:
    """The position of what each `parametrize` mark, and each fixture with parameters, gives a case.

    Args:
        values: parameter names -> their values so far -> position; grows by those of `case`.
    """
    if not hasattr(case, "callspec"):
        return {}
    marks = [_names(mark.args[0]) for mark in case.iter_markers("parametrize")]
    fixtures = [(name,) for name in case.callspec.params if not any(name in names for names in marks)]
    keys = {names: tuple(id(case.callspec.params[name]) for name in names) for names in marks + fixtures}
    return {names: values[names].setdefault(key, len(values[names])) for names, key in keys.items()}


def _differences(case, position) -> int:
    """How many `parametrize` marks do not give their first value; the jnp reference is a difference too."""
    others = sum(bool(position[_names(mark.args[0])]) for mark in case.iter_markers("parametrize"))
    return others + (case.callspec.params.get("implementation") == "reference")


def _names(argument) -> tuple:
    names = argument.split(",") if isinstance(argument, str) else argument
    return tuple(name.strip() for name in names)


def _is_diagonal(position, sizes) -> bool:
    """Whether a case lies on the diagonal of a product of parameters: so many cases that each value occurs."""
    steps = range(max(sizes.values(), default=1))
    return any(all(i == step % sizes[names] for names, i in position.items()) for step in steps)
