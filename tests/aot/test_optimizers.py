"""What an update of an optimizer with moments in FP8 costs on an H200."""

import pytest

PROGRAM = "optimizers"


def test_bytes(report):
    """One pass for the update, into which XLA fuses the decoding, and for each moment
    one that encodes, in place.

    The first reads 2 bytes of codes and 8 of the gradient and the parameter, and writes
    12: the parameter and the f32 moments. The others read a moment and its codes, and
    write codes: 6 bytes. Each also has 5 bytes of an amax and an exponent for 128
    elements, read twice and written, and 4 of a key, written and read.
    """
    assert report["float32"]["bytes_per_parameter"] == pytest.approx(28, abs=0.1)
    assert report["fp8"]["bytes_per_parameter"] == pytest.approx(
        22 + 2 * 6 + 2 * (15 + 8) / 128, abs=0.01
    )
    assert report["fp8"]["temporary_bytes_per_parameter"] <= 8.3


def test_launches(report):
    """Five a leaf: the update, and of each moment the keys and the kernel. Some more
    compute scalars.
    """
    assert report["float32"]["launches"] == 1 + 2
    assert report["fp8"]["launches"] == 5 + 3
    assert report["fp8, four leaves"]["launches"] <= 4 * 5 + 4
    assert report["fp8, four leaves"]["temporary_bytes_per_parameter"] <= 8.3 / 4


def test_a_whole_step_in_one_pass(report):
    """The kernel reads a gradient, 4 bytes, and two codes, and writes codes, and an
    update or a parameter.

    An update is 4 bytes, written over the gradient; XLA reads it and the parameter, and
    writes that: 12. Here gradients are arguments of the program, which are copied
    first: 8. A parameter is 8 bytes. Two amaxes and exponents of 128 elements are 10
    bytes each, read and written; two keys are 4 bytes each, written and read.
    """
    of_blocks = (2 * 10 + 2 * 8) / 128
    assert report["adamw, update"]["bytes_per_parameter"] == pytest.approx(
        8 + 4 + 4 + 4 + 12 + of_blocks, abs=0.01
    )
    assert report["adamw, apply"]["bytes_per_parameter"] == pytest.approx(
        4 + 4 + 8 + of_blocks, abs=0.01
    )
    # Clipping reads the gradients once more, of float32 as well.
    assert report["adamw, apply, clipped"]["bytes_per_parameter"] == pytest.approx(
        4 + 16 + of_blocks, abs=0.01
    )
    assert report["float32, clipped"]["bytes_per_parameter"] == pytest.approx(
        4 + 28, abs=0.1
    )
    # Keys are the only temporary memory.
    assert report["adamw, apply"]["temporary_bytes_per_parameter"] <= 0.1


def test_launches_of_a_whole_step(report):
    """Of a leaf the kernel and the keys, and small leaves share both. Four more compute
    the numbers of the step.
    """
    assert report["adamw, apply"]["launches"] <= 2 + 4
    # a copy of the gradient, and the sum
    assert report["adamw, update"]["launches"] <= 2 + 2 + 4
    assert report["adamw, apply, four leaves"]["launches"] <= 4 * 2 + 4
    assert report["adamw, apply, 32 small leaves"]["launches"] <= 2 * 2 + 4
    assert report["float32, 32 small leaves"]["launches"] >= 32


def test_one_moment(report):
    """Lion's update reads a byte of codes and 8 of the gradient and the parameter, and
    writes 8.
    """
    assert report["lion, float32"]["bytes_per_parameter"] == pytest.approx(20, abs=0.1)
    assert report["lion, fp8"]["bytes_per_parameter"] == pytest.approx(
        17 + 6 + (15 + 8) / 128, abs=0.01
    )
    assert report["lion, fp8"]["launches"] <= 3 + 3
