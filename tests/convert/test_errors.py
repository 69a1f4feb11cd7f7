"""What converters refuse: each error names the function, the leaf, what was expected,
and often what to call.
"""

import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import convert

from . import cases
from .cases import E4M3, OWG, QArray, qtensor, state_leaves

STATE, PLAIN = state_leaves(5), {"input_amax_history": np.zeros(3)}
NEW = cases.model_variables()
HALF = {
    OWG: {
        "Dense_0": {
            "Fp8DotGeneral_0": {"input_amax_history": STATE["input_amax_history"]}
        }
    }
}
WIDER = {"params": {"Dense_0": {"kernel": np.zeros((2, 4), np.float32)}}}
TWO_NAMES = {"Fp8DotGeneralOp_0": STATE, "Fp8DirectDotGeneralOp_0": STATE}


def without(leaves, name):
    return {key: leaf for key, leaf in leaves.items() if key != name}


def flax(error, match, variables, **options):
    return (
        lambda: convert.from_flax(variables, **options),
        error,
        f"from_flax: .*{match}",
    )


def resize(error, match, tree, length):
    return (
        lambda: convert.resize_history(tree, length),
        error,
        match,
    )


def merge(error, match, restored, new=NEW):
    return (
        lambda: convert.merge_state(new, restored),
        error,
        f"merge_state: restored: .*{match}",
    )


def scale_of(leaf):
    """Variables in which a leaf is the scale of a kernel."""
    variables = cases.model_variables()
    variables[OWG]["Dense_0"]["Fp8DotGeneral_0"]["kernel_scale"] = leaf
    return variables


def qarray(match, q):
    return lambda: convert.to_qarray(q), ValueError, match


def from_qarray(match, codes, scale, zero_point=None, **options):
    return (
        lambda: convert.from_qarray(QArray(codes, scale, zero_point), **options),
        ValueError,
        match,
    )


def operand(match, q):
    return lambda: convert.to_scaled_matmul(q), ValueError, match


def from_operand(match, codes, scales):
    return lambda: convert.from_scaled_matmul(codes, scales), ValueError, match


def codes(*shape):
    return jnp.ones(shape, E4M3)


ones = jnp.ones
ERRORS = {
    "Flax, no state": flax(
        ValueError, "params", {"params": {"kernel": np.ones(3, np.float32)}}
    ),
    "Flax, empty": flax(ValueError, OWG, {}),
    "Flax, not a dict": flax(TypeError, "variables.*list", [STATE]),
    "Flax, NANOO": flax(
        ValueError,
        "Dense_0/NANOO.*fnuz",
        {OWG: {"Dense_0": {"NANOOFp8DotGeneralOp_0": STATE}}},
    ),
    "Flax, incomplete": flax(
        ValueError,
        "Op_0/kernel_scale",
        {"Fp8DotGeneralOp_0": without(STATE, "kernel_scale")},
    ),
    "Flax, one name": flax(ValueError, "Fp8DotGeneral_0", TWO_NAMES),
    "Flax, scale": flax(
        ValueError,
        r"input: expected .*a scale \(\.\.\., 1\), got .*\(3,\)",
        {**STATE, "input_scale": np.ones(3, np.float32)},
    ),
    "Flax, dtype": flax(
        TypeError, "input_scale.*int32", {**STATE, "input_scale": np.ones(1, np.int32)}
    ),
    "Flax, not an array": flax(
        TypeError, "input_scale.*float", {**STATE, "input_scale": 1.0}
    ),
    "Flax, pattern": flax(
        ValueError,
        "sum_1.*Fp8Einsum_0",
        {"Fp8Einsum_0": STATE},
        swapped=["Fp8Einsum_1"],
    ),
    "Flax, pattern string": flax(
        TypeError, "swapped", {"Fp8Einsum_0": STATE}, swapped="Fp8Einsum_0"
    ),
    "to Flax": (
        lambda: convert.to_flax({"Fp8DotGeneral_0": STATE}, name="Fp8Einsum"),
        *(ValueError, "to_flax: name: .*Fp8Einsum"),
    ),
    "history of 0": resize(ValueError, "len: expected at least 1, .*got 0", PLAIN, 0),
    "history of 2.0": resize(TypeError, "len: expected an int", PLAIN, 2.0),
    "no history": resize(
        ValueError, "resize_history: .*without any", {"kernel": np.zeros(3)}, 2
    ),
    "merged, Flax's": merge(
        ValueError, "Dense_0/Fp8DirectDotGeneralOp_0/.*from_flax", convert.to_flax(NEW)
    ),
    "merged, TransformerEngine's": merge(
        ValueError,
        r"TEWrapper_dot_general_0/.*1 / its scale.*roll\(its amax_history, 1, "
        r"axis=-1\)",
        {
            OWG: {
                "Dense_0": {
                    "TEWrapper_dot_general_0": {
                        "x_amax_history": np.zeros(3, np.float32)
                    }
                }
            }
        },
    ),
    "merged, unknown": merge(
        ValueError,
        "the model has no such state",
        NEW,
        cases.model_variables(layers=["Dense_0"]),
    ),
    "merged, stacked": merge(
        ValueError, r"\(4,\) up to .*, got \(2, 4\)", cases.model_variables(lead=(2,))
    ),
    "merged, scale": merge(
        ValueError,
        r"kernel_scale: .* \(1,\), got \(2,\)",
        scale_of(np.ones(2, np.float32)),
    ),
    "merged, half": merge(
        ValueError, "amax_history: expected input_scale beside it, got", HALF
    ),
    "merged, width": merge(
        ValueError, r"params/Dense_0/kernel: expected .* \(2, 2\), got \(2, 4\)", WIDER
    ),
    "merged, dtype": merge(
        TypeError,
        "kernel_scale: expected a floating dtype, got int8",
        scale_of(np.ones(1, np.int8)),
    ),
    "merged, not a dict": merge(TypeError, "list", []),
    "nothing to reset": (
        lambda: convert.reset_state({"params": {"scale": ones(3)}}),
        *(ValueError, "reset_state: tree: expected amax_history and scale"),
    ),
    "qarray, no codes": qarray(
        "q: expected FP8 codes with scales, got float32",
        jaxfp8.QTensor(ones((4, 4)), None),
    ),
    "qarray, a rest": qarray(
        r"\(128, 128\) that divide .*\(150, 128\)", qtensor((150, 128), (128, 128))
    ),
    "qarray, cut off": qarray(
        "cut off, or lies across dimensions", qtensor((2, 96, 128), (128, 128))
    ),
    "int8": from_qarray(
        "expected codes in FP8 .*got int8", ones((4, 4), jnp.int8), ones((1, 1))
    ),
    "zero point": from_qarray("zero_point", codes(4, 4), ones((1, 1)), ones((1, 1))),
    "batch of 0": from_qarray(
        "after 0 batch dimensions", codes(4, 6, 8), ones((1, 2, 8))
    ),
    "batch of 1": from_qarray(
        "after 1 batch dimensions", codes(3, 4, 8), ones((1, 4, 1)), batch=1
    ),
    "half": from_qarray(
        r"codes \(4, 6, 8\) and scales \(2, 6, 8\)", codes(4, 6, 8), ones((2, 6, 8))
    ),
    "one scale": operand(
        r"expected blocks \(1, c\) .* got block=None", qtensor((8, 64), None)
    ),
    "squares": operand(r"got block=\(128, 128\)", qtensor((256, 256), (128, 128))),
    "a part of a block": operand(
        "that divide the 72 columns", qtensor((8, 72), (1, 32))
    ),
    "five scales": from_operand(
        "whose number divides K", codes(2, 4, 64), ones((2, 4, 5))
    ),
    "rank 2": from_operand("expected codes ", codes(4, 64), ones((4, 2))),
    "floats": from_operand(
        "got float32 and float32", ones((1, 4, 64)), ones((1, 4, 2))
    ),
}


@pytest.mark.parametrize("call, error, match", ERRORS.values(), ids=ERRORS)
def test_errors(call, error, match, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", types.SimpleNamespace(QArray=QArray))
    with pytest.raises(error, match=match):
        call()
