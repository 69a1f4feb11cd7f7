"""What an update of AdamW with moments in FP8 costs on an H200."""

import pytest

PROGRAM = "optimizers"


def test_bytes(report):
    """One pass for the update, and for each moment one that finds the numbers of blocks and one that rounds.

    The first reads 2 bytes of codes and 8 of the gradient and the parameter, and writes 12: the parameter and the f32
    moments. The second reads a moment and its codes, 5 bytes; the third too, and writes codes, 6. The numbers of blocks
    are some 10 bytes for 128 elements, written and read in each of several small fusions.
    """
    assert report["float32"]["bytes_per_parameter"] == pytest.approx(28, abs=0.1)
    assert 22 + 2 * (5 + 6) <= report["fp8"]["bytes_per_parameter"] <= 46
    assert report["fp8"]["temporary_bytes_per_parameter"] <= 8.3
    assert report["fp8"]["launches"] <= 20
