"""The FFI handlers over emulated and over interpreted kernels: the good calls of every
op, between gaps, against the oracle.
"""

import jax
import pytest
from ops import answers, cases, targets

from .. import emulated
from . import machine

# What the oracle has no bits of; rows have the kernels of delayed_scales and
# write_histories.
WITHOUT_ANSWER = (
    "scaled_matmul",
    "block_scaled_matmul",
    "ragged_matmul",
    "quantize_activation",
    "quantize_norm",
    "read_rows",
    "write_rows",
)
OPS = [
    op
    for op in targets.CUDA_SPECS
    if not op.startswith((*WITHOUT_ANSWER, "quantize_blocks_transpose"))
]
# operand -> result
IN_PLACE = {
    "write_histories": {0: 0, 1: 1},
    "write_histories, a product": {0: 0, 1: 1},
    "encode_moment": {0: 0, 1: 1, 2: 2},
    "adam_update": {result + 1: result for result in range(7)},
    "adam_update, no params": {result: result for result in range(7)},
}
SIZES = [{}, {"g": 3}, *targets.EMPTY]


@pytest.fixture(params=["emulated", "ptx"])
def prefix(request):
    """Of the custom calls over the emulated kernels, and over the interpreted ones."""
    if request.param == "ptx":
        library = machine.register_handlers(machine.ARCHITECTURE)
        yield "ptx_90a_cuda_"
        assert not (fault := machine.take_fault(library)), fault
    else:
        emulated.register_handlers()
        yield "emulated_cuda_"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_good_calls(op, sizes, prefix):
    """Scales and amaxes of each group, of all, none; sides that are 0; results in the
    place of operands.
    """
    for call in cases.good_calls(op, sizes):
        for alias in ({}, IN_PLACE.get(op, {})):
            got = cases.run_target(call, prefix, input_output_aliases=alias)
            answers.assert_results(call, got, answers.answer(call))


def test_a_fault_is_an_error_of_the_call():
    """With its line of PTX: no kernel can be found in a folder without PTX."""
    library = machine.register_handlers(machine.ARCHITECTURE)
    library.ptx_use_folder(b"/nonexistent")
    try:
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError),
            match="unknown: folder /nonexistent",
        ):
            cases.run_target(targets.filled(targets.good("amax")), "ptx_90a_cuda_")
    finally:
        library.ptx_use_folder(str(machine.compiled()).encode())
        assert machine.take_fault(library).startswith("unknown: folder")
