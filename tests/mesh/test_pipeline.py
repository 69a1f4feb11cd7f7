"""Pipelines: each stage keeps its own state, the max over microbatches, as without a pipeline; and no program hangs."""

import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
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


def test_stages_and_microbatches_differ():
    """Else comparisons would not show that stages keep their own, nor that the largest microbatch counts."""
    run = pipelines.reference()
    for operand in ("input", "output_grad"):
        histories = getattr(run.state, operand).amax_history
        assert (histories > 0).all() and len({history.tobytes() for history in histories}) == pipelines.STAGES
    assert all(np.frexp(scale)[0] == 0.5 for scale in run.state.input.scale[:, 0])
    for x, _ in pipelines.batches():
        largest = np.abs(x).max(axis=(1, 2))
        assert (largest[1] > np.delete(largest, 1)).all()


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
