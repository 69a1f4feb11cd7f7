"""The packages of jaxfp8 have floors: imports go down, and not between packages of one
floor; no module lies loose.
"""

import ast
import graphlib
import pathlib

import another_process
import pytest

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


def imports(folder: pathlib.Path) -> dict[str, set[str]]:
    """The modules that each module of the package in `folder` imports of that package,
    also inside of functions.
    """
    paths = {
        module_of(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*.py"))
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


def loose(folder: pathlib.Path) -> list[str]:
    """The modules that lie in no package."""
    return sorted(
        path.stem
        for path in folder.glob("*.py")
        if path.stem not in ("__init__", "__main__")
    )


def not_downward(folder: pathlib.Path) -> list[str]:
    """Imports between packages that do not go down."""
    found = []
    for module, others in imports(folder).items():
        for other in others:
            above = module.split(".")[0]
            below = other.split(".")[0]
            if above != below and not FLOOR.get(above, -1) > FLOOR.get(
                below, len(FLOORS)
            ):
                found.append(f"{module} imports {other}")
    return sorted(found)


def circle(folder: pathlib.Path) -> list[str]:
    """Modules that import each other, in a ring."""
    try:
        graphlib.TopologicalSorter(imports(folder)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_module_lies_loose():
    assert loose(PACKAGE) == []


def test_imports_go_downward():
    assert not_downward(PACKAGE) == []


def test_there_is_no_circle():
    assert circle(PACKAGE) == []


@pytest.mark.parametrize(
    "file, line, wrong",
    [
        ("ops/_a.py", "from ..recipes import x", ["ops._a imports recipes"]),
        (
            "ops/_a.py",
            "def f():\n    from jaxfp8.dot._b import x",
            ["ops._a imports dot._b"],
        ),
        ("ops/_a.py", "import jaxfp8", ["ops._a imports __init__"]),
        ("linen/_a.py", "from .. import nnx", ["linen._a imports nnx"]),
        ("train/_a.py", "from .. import _loose", ["train._a imports _loose"]),
        (
            "linen/_a.py",
            "from ..train._b import x\nfrom .. import ops, dot\nfrom . import _c",
            [],
        ),
    ],
)
def test_wrong_imports_are_found(tmp_path, file, line, wrong):
    for name in (
        "ops/_b.py",
        "recipes/__init__.py",
        "dot/_b.py",
        "nnx/__init__.py",
        "train/_b.py",
        "_loose.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("ops", "dot"):
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line)
    assert not_downward(tmp_path) == wrong
    assert loose(tmp_path) == ["_loose"] and circle(tmp_path) == []


def test_circles_are_found(tmp_path):
    (tmp_path / "ops").mkdir()
    for one, other in ("ab", "bc", "ca"):
        (tmp_path / "ops" / f"_{one}.py").write_text(f"from . import _{other}")
    assert len(circle(tmp_path)) == 4


def test_checkpoint_policies_is_a_module_of_jaxfp8():
    """Its file is in `dot`, its name is not."""
    program = (
        "import jaxfp8.checkpoint_policies as policies; from "
        "jaxfp8.checkpoint_policies import OUTPUT_NAME\n"
        "import jaxfp8; assert policies is jaxfp8.checkpoint_policies and OUTPUT_NAME "
        "== policies.OUTPUT_NAME"
    )
    another_process.python("-c", program)
