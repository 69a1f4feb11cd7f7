"""The packages of jaxfp8 have floors: imports go down, and not between packages of one
floor; no module lies loose.
"""

import ast
import graphlib
import pathlib

import another_process

PACKAGE = pathlib.Path(__file__).parents[1] / "jaxfp8"
# From the ground. A package may import those of lower floors, and itself.
FLOORS = [
    "numerics _jax",
    "ops",
    "recipes",
    "dot",
    "train",
    "mixed_precision collectives optim",
    "linen nnx",
    "inference",
    "convert integrations",
    "inspect",
    "selftest",
    "__init__ __main__",
]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names.split()}


def module_of(path: pathlib.Path) -> str:
    """`recipes._delayed`; of a package its name, of jaxfp8 itself `__init__`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports() -> dict[str, set[str]]:
    """The modules of the package that each of them imports, also inside of
    functions.
    """
    paths = {
        module_of(path.relative_to(PACKAGE)): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return {module: set(_imported(paths, module)) - {module} for module in paths}


def _imported(paths, module):
    is_package = paths[module].name == "__init__.py"
    here = (
        []
        if module == "__init__"
        else module.split(".")
        if is_package
        else module.split(".")[:-1]
    )
    for node in ast.walk(ast.parse(paths[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1] + (
                node.module.split(".") if node.module else []
            )
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "jaxfp8"
        ):
            base = node.module.split(".")[1:]
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from (
                ".".join(name[1:]) or "__init__"
                for name in names
                if name[0] == "jaxfp8"
            )
            continue
        else:
            continue
        for alias in node.names:
            below = ".".join([*base, alias.name])
            yield below if below in paths else ".".join(base) or "__init__"


def test_no_module_lies_loose():
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == {"__init__", "__main__"}


def test_imports_go_downward():
    wrong = []
    for module, others in imports().items():
        for other in others:
            above, below = (name.split(".")[0] for name in (module, other))
            is_down = FLOOR.get(above, -1) > FLOOR.get(below, len(FLOORS))
            if above != below and not is_down:
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_there_is_no_circle():
    graphlib.TopologicalSorter(imports()).prepare()  # which names the modules of one


def test_checkpoint_policies_is_a_module_of_jaxfp8():
    """Its file is in `dot`, its name is not."""
    program = (
        "import jaxfp8.checkpoint_policies as policies; from "
        "jaxfp8.checkpoint_policies import OUTPUT_NAME\n"
        "import jaxfp8; assert policies is jaxfp8.checkpoint_policies and OUTPUT_NAME "
        "== policies.OUTPUT_NAME"
    )
    another_process.python("-c", program)
