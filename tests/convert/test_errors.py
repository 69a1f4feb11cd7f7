"""What converters refuse: each error names the function, the leaf, what was expected,
and often what to call.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from parametrize import each_row

from jaxfp8 import convert

from . import cases
from .cases import OWG, state_leaves

STATE, PLAIN = state_leaves(5), {"input_amax_history": np.zeros(3)}
NEW = cases.model_variables()
HALF = {
    OWG: {
        "Dense_0": {
            "Fp8DotGeneral_0": {"input_amax_history": STATE["input_amax_history"]}
        }
    }
}
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
        ValueError,
        r"\['0', '8', .* match no module",
        {"Fp8Einsum_0": STATE},
        swapped="Fp8Einsum_0",
    ),
    "history of 0": resize(ValueError, "len: expected an int.* got 0", PLAIN, 0),
    "history of 2.0": resize(TypeError, "len: expected an int.* got 2.0", PLAIN, 2.0),
    "no history": resize(
        ValueError, "resize_history: .*without them", {"kernel": np.zeros(3)}, 2
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
        ValueError, "Fp8DotGeneral_0/input: expected its .* scale, got one", HALF
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
}


@each_row("call, error, match", ERRORS)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()
