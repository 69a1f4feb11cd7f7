"""The example of a test module, by the name that the module gives."""

import pytest

from . import running


@pytest.fixture
def example(monkeypatch, request):
    """The example `NAME` as a module, with JAX as a user has it."""
    with running.imported(monkeypatch, request.module.NAME) as module:
        yield module
