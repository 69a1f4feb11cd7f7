"""Pipelines: each stage keeps its own state, the max over microbatches, as without a
pipeline; and no program hangs.
"""

import pickle

import another_process
import pytest

from mesh import pipelines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The collectives of all programs, which ran, in a process that would be stopped,
    and were right.
    """
    folder = tmp_path_factory.mktemp("pipelines")
    another_process.python(
        "-m", "mesh.pipelines", folder, PYTHONPATH=another_process.PATH
    )
    return folder


@pytest.mark.parametrize("name", pipelines.PROGRAMS)
def test_as_without_a_pipeline(folder, name):
    """Weights, losses and states of four steps, bit for bit; amaxes never meet those of
    another stage.
    """
    reductions = [
        collective
        for collective in pickle.loads((folder / name).read_bytes())
        if collective.is_amax
    ]
    assert reductions, "data is cut, so amaxes have to be reduced"
    stages = [{2 * i, 2 * i + 1} for i in range(pipelines.STAGES)]
    for reduction in reductions:
        assert list(map(set, reduction.groups)) == stages, str(reduction)
