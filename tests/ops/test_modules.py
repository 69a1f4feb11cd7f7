"""Compiled modules that are no modules, foreign or missing: `import jaxfp8` names the
reason and the reference runs.

Each import is in a process of its own, in an installation made of links to this
package.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import jaxfp8
from jaxfp8.ops import _ffi

MODULE = _ffi.module_path("_cpu")
NATIVE = pytest.mark.skipif(MODULE is None, reason="the CPU module is not installed")
SCRIPT = """
import sys
# The finder of an editable install would find its own package first.
sys.meta_path = [finder for finder in sys.meta_path
                 if "_editable" not in finder.__module__]
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp
import jaxfp8
from jaxfp8.ops import _ffi
assert jaxfp8.__file__.startswith(sys.argv[1]), jaxfp8.__file__
lowered = jax.jit(jaxfp8.ops.amax).lower(jnp.ones(3))
assert "jaxfp8_amax" not in lowered.as_text() and lowered.compile()(
    jnp.array([1.0, -3, 2])) == 3
print(_ffi.libraries()[0].error)
"""


@pytest.fixture
def installation(tmp_path):
    """A folder with the Python files of the package and no compiled module."""
    package = tmp_path / "jaxfp8"
    package.mkdir()
    for path in Path(jaxfp8.__file__).parent.iterdir():
        if not path.name.startswith(("_cpu", "_cuda", "_modules")):
            (package / path.name).symlink_to(path)
    return package


def warning_in(installation) -> str:
    """Import the package of that folder in a new process, which must warn once: the
    warning.
    """
    folder = installation.parent
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    reason = done.stdout.strip()
    (warning,) = done.stderr.splitlines()
    assert reason and reason in warning, warning
    return warning


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "file too short"),
        (b"not a module" * 1000, "invalid ELF header"),
    ],
    ids=["empty", "garbage"],
)
def test_a_file_that_is_no_module_of_this_machine(installation, content, reason):
    path = installation / Path(MODULE).name
    path.write_bytes(content)
    warning = warning_in(installation)
    assert f"ignoring {path}, which does not load: " in warning and reason in warning


@pytest.mark.slow
@pytest.mark.parametrize(
    "report, reason",
    [
        (
            "cpu: not built: Python.h of Python 3.12 was not found: install it\ncuda: "
            "not built: X\n",
            None,
        ),
        ("cpu: built by GNU 12.2.0 for Python 3.12.1\n", "has no file for Python"),
        ("", "install jaxfp8 again"),
    ],
    ids=["no Python.h", "another Python", "no report"],
)
def test_a_module_that_is_not_there(installation, report, reason):
    (installation / "_modules.txt").write_text(report)
    warning = warning_in(installation)
    assert (
        reason or "not built: Python.h of Python 3.12 was not found: install it"
    ) in warning
    assert (
        "jaxfp8: running on the slower jnp reference, without compiled kernels: "
        in warning
    )


@pytest.fixture(params=["jaxfp8_cuda13", "jaxfp8_cuda12"])
def project(request, tmp_path, monkeypatch):
    """An installed project with a module `_cuda` and one `_cpu`, of the version of this
    jaxfp8: its name.
    """
    for name in ("_cuda.py", "_cpu.py"):
        (tmp_path / request.param).mkdir(exist_ok=True)
        (tmp_path / request.param / name).write_text("# empty")
    write_version(tmp_path, request.param, importlib.metadata.version("jaxfp8"))
    monkeypatch.syspath_prepend(tmp_path)
    yield request.param
    for name in [name for name in sys.modules if name.startswith(request.param)]:
        del sys.modules[name]


def write_version(folder, project, version):
    metadata = folder / f"{project}-1.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(
        f"Metadata-Version: 2.4\nName: {project.replace('_', '-')}\nVersion: "
        f"{version}\n"
    )


def test_the_module_of_a_project(project, monkeypatch, tmp_path):
    """It is found where a build has put none into the package."""
    monkeypatch.setattr(_ffi, "_PACKAGES", _ffi._PACKAGES[1:])
    assert _ffi.module_path("_cuda") == str(tmp_path / project / "_cuda.py")
    assert _ffi._load_module("_cuda").__name__ == f"{project}._cuda"
    assert _ffi.module_path("_tpu") is None


@NATIVE
def test_the_module_of_a_build_comes_first(project):
    assert _ffi.module_path("_cpu") == MODULE
    assert _ffi._load_module("_cpu").__name__ == "jaxfp8._cpu"


def test_a_project_of_another_version(project, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(_ffi, "_PACKAGES", _ffi._PACKAGES[1:])
    monkeypatch.setattr(_ffi, "_errors", {})
    write_version(tmp_path, project, "0.1.0")
    assert not _ffi._load("CUDA")
    version = importlib.metadata.version("jaxfp8")
    extra = project.removeprefix("jaxfp8_")
    reason = (
        f"of version 0.1.0, expected that of jaxfp8, {version}: pip install "
        f'"jaxfp8[{extra}]=={version}"'
    )
    assert (
        f"jaxfp8: ignoring {tmp_path / project / '_cuda.py'}, which is {reason}"
        in caplog.text
    )


def test_projects_have_one_version_and_one_build():
    """The extras ask for the module of this very version, which is built with what
    builds the package.
    """
    root = Path(__file__).parents[2]
    package, module = (
        tomllib.loads((root / name).read_text())
        for name in ("pyproject.toml", "cuda/pyproject.toml")
    )
    version = package["project"]["version"]
    extras = package["project"]["optional-dependencies"]
    assert jaxfp8.__version__ == version and re.findall(
        module["tool"]["scikit-build"]["metadata"]["version"]["regex"],
        (root / "pyproject.toml").read_text(),
    ) == [version]
    for extra in ("cuda13", "cuda12"):
        assert f"jaxfp8-{extra}=={version}" in extras[extra]
    assert module["build-system"] == package["build-system"]
    for key in ("requires-python", "license"):
        assert module["project"][key] == package["project"][key]


def test_old_modules_are_not_registered(monkeypatch):
    """A module that lacks a custom call of this version, as after an update without a
    build.
    """
    monkeypatch.setattr(_ffi, "_errors", {})
    monkeypatch.setattr(
        _ffi,
        "_load_module",
        lambda name: types.SimpleNamespace(registrations=lambda: {}),
    )
    assert not _ffi._load("cpu")
    assert (
        "built from other sources, without jaxfp8_adam_update_v1, "
        in _ffi._errors["cpu"]
    )
