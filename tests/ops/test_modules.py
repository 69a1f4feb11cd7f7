"""Compiled modules that do not load, are foreign or missing: the reason is named.
`.ci/run` installs without a compiler and without Python.h, where the reference runs.
"""

import importlib.metadata
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

import jaxfp8
from jaxfp8.ops import _ffi

MODULE = _ffi.module_path("_cpu")
NATIVE = pytest.mark.skipif(MODULE is None, reason="the CPU module is not installed")


@pytest.mark.parametrize(
    "report, reason",
    [
        (
            "cpu: built by GNU 12\n",
            "has no file for Python .* .built by GNU 12",
        ),
        ("", "install jaxfp8 again"),
    ],
)
def test_a_module_that_is_not_there(report, reason, monkeypatch, tmp_path):
    (tmp_path / "_modules.txt").write_text(report)
    monkeypatch.setattr(jaxfp8, "__path__", [str(tmp_path)])
    monkeypatch.setattr(_ffi, "_PACKAGES", ())
    monkeypatch.setattr(_ffi, "_SOURCES", tmp_path / "CMakeLists.txt")
    with pytest.raises(_ffi.Unavailable, match=reason):
        _ffi._load_module("_cpu")


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


def loading(monkeypatch, caplog) -> str:
    """What is said of a module of a project that is ignored."""
    monkeypatch.setattr(_ffi, "_PACKAGES", _ffi._PACKAGES[1:])
    assert _ffi._load("CUDA").error
    return caplog.text


def test_a_project_of_another_version(project, monkeypatch, tmp_path, caplog):
    write_version(tmp_path, project, "0.1.0")
    version = importlib.metadata.version("jaxfp8")
    extra = project.removeprefix("jaxfp8_")
    reason = (
        f"of version 0.1.0, expected that of jaxfp8, {version}: pip install "
        f'"jaxfp8[{extra}]=={version}"'
    )
    path = tmp_path / project / "_cuda.py"
    assert f"ignoring {path}, which is {reason}" in loading(monkeypatch, caplog)


def test_a_file_that_does_not_load(project, monkeypatch, tmp_path, caplog):
    path = tmp_path / project / "_cuda.py"
    path.write_text("raise ImportError('invalid ELF header')")
    reason = "does not load: invalid ELF header"
    assert f"ignoring {path}, which {reason}" in loading(monkeypatch, caplog)


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
    monkeypatch.setattr(
        _ffi,
        "_load_module",
        lambda name: types.SimpleNamespace(registrations=lambda: {}),
    )
    reason = "built from other sources, without jaxfp8_adam_update_v1, "
    assert reason in _ffi._load("cpu").error
