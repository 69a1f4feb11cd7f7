"""The vectors of conformance/ are the oracle's; the checker accepts jaxfp8, and finds
libraries that are wrong.
"""

import types

import another_process
import numpy as np
import pytest

from .conformance import FOLDER, load

check, generate, ours = load("check"), load("generate"), load("jaxfp8_adapter")


@pytest.mark.parametrize("op", generate.OPS, ids=lambda op: op.__name__)
def test_vectors_are_the_oracle_s(op):
    expected = generate.arrays(op)
    with np.load(FOLDER / "vectors" / f"{op.__name__}.npz") as file:
        assert file.files == list(expected)
        for name in file.files:
            assert (
                file[name].dtype == expected[name].dtype
                and file[name].tobytes() == expected[name].tobytes()
            ), name


def test_jaxfp8_is_accepted():
    ran, failures = check.check(ours)
    assert (
        not failures
        and set(ran) == {op.__name__ for op in generate.OPS}
        and all(ran.values())
    )


def changed(op, name, change):
    """jaxfp8 with another answer of one op."""

    def function(**arguments):
        result = getattr(ours, op)(**arguments)
        return result | {name: change(result[name], arguments)}

    return types.SimpleNamespace(**{op: function})


MUTANTS = {
    "a code that is off by one": changed(
        "quantize",
        "codes",
        lambda codes, _: np.where(codes == 0x31, 0x32, codes).astype(np.uint8),
    ),
    "one element of the sum": changed(
        "train_step",
        "kernel_grad",
        lambda g, a: g - np.float32(1e-4) * np.outer(a["x"][0], a["grad"][0]),
    ),
    "another dtype": changed(
        "train_step", "input_scale_inv", lambda s, _: s.astype(np.float64)
    ),
    "another shape": changed("dequantize", "values", lambda v, _: v.reshape(16, 16)),
    "an answer is missing": types.SimpleNamespace(dequantize=lambda **_: {}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name):
    ran, failures = check.check(MUTANTS[name])
    assert failures and sum(map(bool, ran.values())) == 1, name


def test_the_program(tmp_path):
    """Numpy alone: an adapter of one op, that is wrong."""
    adapter = tmp_path / "adapter.py"
    adapter.write_text(
        "def dequantize(codes, scale_inv, format):\n    return {'values': "
        "codes.astype('f4')}\n"
    )
    said = another_process.python(FOLDER / "check.py", adapter, code=1).stdout
    assert "quantize: not in the adapter" in said and "dequantize: 2 cases" in said
    assert "dequantize, e4m3: values: 25" in said
