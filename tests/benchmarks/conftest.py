"""The programs of benchmarks/ can be imported; that of a test module is a fixture."""

import importlib
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def program(monkeypatch, request):
    """The program `NAME` of the module, whose `SIZES` are in place of its own."""
    module = importlib.import_module(request.module.NAME)
    for name, value in getattr(request.module, "SIZES", {}).items():
        monkeypatch.setattr(module, name, value)
    return module
