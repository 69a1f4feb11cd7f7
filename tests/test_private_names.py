"""Every private name of JAX that the package and its tests need: named here, and in
this JAX.

A name that a new version drops goes red here before anything else does; a JAX without
it is refused at import.
"""

import ast
import importlib.util
import pathlib
import sys

import another_process
import jax
import pytest
from jax._src import ad_util
from jax._src.lax import lax as lax_module

ROOT = pathlib.Path(__file__).parents[1]
NEEDED = {
    "jaxfp8/_jax/_compat.py": {
        "jax._src.dispatch.prim_requires_devices_during_lowering",
        "jax._src.interpreters.ad.LinearizeTrace",
        "jax._src.interpreters.ad.primitive_linearizations",
        "jax._src.interpreters.partial_eval.DynamicJaxprTrace",
        "jax._src.ad_util.raw_jaxval_adders",
        "jax._src.ad_util.stop_gradient_p",
        "jax._src.core.physical_aval",
        "jax._src.dtypes.ExtendedDType",
        "jax._src.earray.EArray",
        "jax._src.interpreters.pxla.global_result_handlers",
        "jax._src.lax.lax",
        "jax._src.lax.lax._stop_gradient",
    },
    "tests/compile_cache.py": {"jax._src.compiler._get_cache_key"},
    "tests/test_private_names.py": {
        "jax._src.ad_util.raw_jaxval_adders",
        "jax._src.lax.lax._stop_gradient",
    },
}


def private_names(source: str) -> set[str]:
    """The names from `jax._src` that a program imports, and the attributes that it
    reads of such modules.
    """
    modules = {}
    names = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "jax._src"
        ):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                try:
                    importlib.import_module(name)
                    modules[alias.asname or alias.name] = name
                except ImportError:
                    names.add(name)
        elif isinstance(node, ast.Import):
            names |= {
                alias.name for alias in node.names if alias.name.startswith("jax._src")
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_hook":
            names.add(ast.literal_eval(node.args[0]))
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            names.add(f"{modules[node.value.id]}.{node.attr}")
    return names


def test_names_are_in_the_table():
    files = [*(ROOT / "jaxfp8").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    found = {
        str(path.relative_to(ROOT)): private_names(path.read_text()) for path in files
    }
    assert {path: names for path, names in found.items() if names} == NEEDED


def without(monkeypatch, name):
    """Take a private name out of JAX."""
    module, _, attribute = name.rpartition(".")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", sorted(NEEDED["jaxfp8/_jax/_compat.py"]))
def test_a_jax_without_a_hook_is_refused(name, monkeypatch):
    """The hook and the version are named, and JAX stays as it is: state would be summed
    in silence otherwise.
    """
    path = ROOT / "jaxfp8" / "_jax" / "_compat.py"
    spec = importlib.util.spec_from_file_location("jaxfp8._jax.another_compat", path)
    adders = dict(ad_util.raw_jaxval_adders)
    stop_gradient = lax_module._stop_gradient
    with monkeypatch.context() as changes:
        without(changes, name)
        with pytest.raises(
            ImportError,
            match=(
                rf"jaxfp8 needs {name}, which JAX {jax.__version__} lacks.*"
                "pip install"
            ),
        ):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert (ad_util.raw_jaxval_adders, lax_module._stop_gradient) == (
        adders,
        stop_gradient,
    )


def test_the_package_is_refused_as_a_whole():
    script = (
        "import sys, jax; del jax._src.earray; sys.modules['jax._src.earray'] = None; "
        "import jaxfp8"
    )
    error = another_process.python("-c", script, code=1).stderr
    assert "ImportError: jaxfp8 needs jax._src.earray.EArray, which JAX" in error
