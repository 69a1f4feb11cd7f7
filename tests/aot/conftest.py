"""Programs for H200s, or another GPU, compiled once for the tests of a module."""

import json

import pytest

from . import compiler


@pytest.fixture(
    scope="module",
    params=[13, pytest.param(12, marks=pytest.mark.slow)],
    ids=["cuda13", "cuda12"],
)
def on_h200(request):
    """`compiler.run`; skips where there is no compiler."""
    return compiler_of(request.param)


def compiler_of(cuda: int):
    if reason := compiler.missing(cuda):
        pytest.skip(reason)
    return lambda *arguments: compiler.run(*arguments, cuda=cuda)


@pytest.fixture(scope="module")
def counts(on_h200, request):
    """`counts[case][candidate]`: what `programs` prints for the `GROUP` that the module
    names, on its `GPU`.
    """
    gpu = getattr(request.module, "GPU", "h200")
    return json.loads(
        on_h200("programs", "--quickly", "--gpu", gpu, request.module.GROUP)
    )


@pytest.fixture(scope="module")
def report(on_h200, request):
    """What the module of this folder that a test's module names, as its `PROGRAM`,
    prints.
    """
    return json.loads(on_h200(request.module.PROGRAM))
