"""The packages of jaxfp8 have floors: imports go down, and not between packages of one
floor; no module lies loose.
"""

import ast
import graphlib
import importlib.util
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


def imports() -> dict[str, set[str]]:
    """The modules of the package that each of them imports, also inside of
    functions.
    """
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    return {module: set(_imported(paths, module)) - {module} for module in paths}


def _imported(paths, module):
    path = paths[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package)
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] == "jaxfp8":
                yield name if name in paths else name.rpartition(".")[0]


def test_no_module_lies_loose():
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == {"__init__", "__main__"}


def test_imports_go_downward():
    wrong = []
    for module, others in imports().items():
        for other in others:
            # jaxfp8 itself is its `__init__`
            above, below = (
                f"{name}.__init__".split(".")[1] for name in (module, other)
            )
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
