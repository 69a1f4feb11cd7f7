"""Pipelines: each stage keeps its own state, the max over microbatches, as without a
pipeline; and no program hangs.
"""

import another_process

from mesh import pipelines


def test_as_without_a_pipeline():
    """Weights, losses and states of four steps, bit for bit, in a process that would be
    stopped.
    """
    done = another_process.python(
        "-m", "mesh.pipelines", PYTHONPATH=another_process.PATH
    )
    assert done.stdout.splitlines() == list(pipelines.PROGRAMS)
