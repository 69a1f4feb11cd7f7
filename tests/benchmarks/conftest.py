"""The program of a test module in benchmarks/."""

import importlib
import pathlib

import pytest


@pytest.fixture
def program(monkeypatch, request):
    """The program `NAME` of the module, whose `SIZES` are in place of its own."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module(request.module.NAME)
    for name, value in getattr(request.module, "SIZES", {}).items():
        monkeypatch.setattr(module, name, value)
    return module
