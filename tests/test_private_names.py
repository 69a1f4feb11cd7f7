"""Every private JAX name that the package and its tests need: named here, in one file of the package, and in this JAX.

A name that a new JAX drops goes red here before anything else does; the package itself then runs by what is left
(`tests/test_fallback.py`).
"""

import ast
import importlib
import pathlib

import jax
import pytest

from jaxfp8._jax import _compat

ROOT = pathlib.Path(__file__).parents[1]
NEEDED = {
    "jaxfp8/_jax/_compat.py": {
        "jax._src.dispatch.prim_requires_devices_during_lowering",
        "jax._src.interpreters.ad.LinearizeTrace",
        "jax._src.interpreters.ad.primitive_linearizations",
        "jax._src.ad_util.raw_jaxval_adders",
        "jax._src.ad_util.stop_gradient_p",
        "jax._src.core.ShapedArray",
        "jax._src.core.physical_aval",
        "jax._src.dtypes.ExtendedDType",
        "jax._src.earray.EArray",
        "jax._src.interpreters.pxla.global_result_handlers",
        "jax._src.lax.lax._stop_gradient",
    },
    "tests/compile_cache.py": {"jax._src.compiler._get_cache_key"},
}


def private_names(source: str) -> set[str]:
    """The names from `jax._src` that a program imports, and the attributes that it reads of such modules."""
    modules, names = {}, set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                try:
                    importlib.import_module(name)
                    modules[alias.asname or alias.name] = name
                except ImportError:
                    names.add(name)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("jax._src")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add(f"{modules[node.value.id]}.{node.attr}")
    return names


def test_names_are_in_the_table():
    files = [*(ROOT / "jaxfp8").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    found = {str(path.relative_to(ROOT)): private_names(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == NEEDED


@pytest.mark.parametrize("name", sorted(set().union(*NEEDED.values())))
def test_jax_has_it(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute), f"JAX {jax.__version__} has no {name}"


def test_what_the_names_are_for():
    """With them, state combines by max by itself, and products linearize without a detour."""
    assert _compat.MAX_DTYPE is not None and _compat._linearizations and _compat._need_devices


def test_another_name_is_seen():
    source = "from jax._src import core as c\nfrom jax._src.core import Trace\nc.eval_jaxpr"
    assert private_names(source) == {"jax._src.core.Trace", "jax._src.core.eval_jaxpr"}
