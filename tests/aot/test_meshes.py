"""All-reduces of amaxes in a scan over eight layers with FSDP on eight H200s: how often
each runs in a step.

XLA moves one out of a loop for each result that the loop stacks, and the combiner does
not merge those of two loops, of which the second reads what the first gives.
"""

import pytest

PROGRAM = "meshes"
SCANS = {
    "shard_map, all saved": [1],
    "shard_map, codes saved": [1],
    "shard_map, nothing saved": [1],
    "jit, all saved": [1, 1],
    "jit, codes saved": [1, 1],
    "jit, nothing saved": [1, 8],
}


@pytest.mark.parametrize("name", SCANS)
def test_all_reduces_of_a_scan(report, name):
    assert sorted(report[name]) == SCANS[name]
