"""Pipelines: each stage keeps its own state, the max over microbatches, as without a pipeline; and no program hangs."""

import os
import pathlib
import pickle
import subprocess
import sys

import pytest

from mesh import pipelines

SECONDS = 240  # it takes about 20


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs all programs in a process of its own: `name -> collectives`, of those that were right; and what it said."""
    folder = tmp_path_factory.mktemp("pipelines")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-m", "mesh.pipelines", folder]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        said = done.stderr
    except subprocess.TimeoutExpired as late:
        said = f"not finished after {SECONDS} seconds: {late.stderr}"
    return {file.name: pickle.loads(file.read_bytes()) for file in folder.iterdir()}, said


@pytest.mark.parametrize("name", pipelines.PROGRAMS)
def test_as_without_a_pipeline(finished, name):
    """Weights, losses and states of four steps, bit for bit; amaxes never meet those of another stage."""
    programs, said = finished
    assert name in programs, said
    reductions = [collective for collective in programs[name] if collective.is_amax]
    assert reductions, "data is cut, so amaxes have to be reduced"
    stages = [{2 * i, 2 * i + 1} for i in range(pipelines.STAGES)]
    for reduction in reductions:
        assert list(map(set, reduction.groups)) == stages, str(reduction)
