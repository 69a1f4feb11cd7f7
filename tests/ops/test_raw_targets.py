"""Custom calls with bad buffers: a clean INVALID_ARGUMENT that names op and buffer, and
a living process.

Those of the CPU, and those of CUDA over emulated kernels. The Python layer never sends
these; an exported program from another version, or a mistake of ours, may. Each case is
followed by a good call whose answer is checked: a handler that wrote before it checked
would have spoilt something.
"""

import contextlib
import dataclasses

import jax
import pytest
from cuda.ptx import machine
from oracle import F32

from cuda import emulated
from jaxfp8 import ops

from . import answers, bad_calls, cases, targets

CUDA, PTX = "emulated_cuda_", "ptx_90a_cuda_"
EVERYWHERE = pytest.mark.parametrize(
    "op, prefix",
    [(op, "") for op in targets.SPECS] + [(op, CUDA) for op in targets.CUDA_SPECS],
)


@pytest.fixture(autouse=True)
def custom_calls(request):
    """The handlers under test are the CPU library's, and CUDA's; fails with a message
    where the former is not built.
    """
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with contextlib.ExitStack() as stack:
        if params.get("prefix") == PTX:
            stack.enter_context(machine.without_faults())
        elif params.get("prefix"):
            library = emulated.register_handlers()
            # no other GPU has ragged products with scales of blocks
            if "blocks" in params.get("op", ""):
                stack.enter_context(emulated.hopper(library))
        stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
        stack.enter_context(ops.implementation("ffi"))
        yield


def assert_right(call: targets.Call, prefix="", **options) -> None:
    got = cases.run_target(call, prefix, **options)
    answers.assert_results(call, got, answers.answer(call))


def assert_alive(prefix="") -> None:
    assert_right(targets.filled(targets.good("quantize")), prefix)


def assert_refused(call: targets.Call, message: str, prefix: str = "") -> None:
    if prefix:  # XLA's own errors have no name of a CUDA handler
        message = message.removesuffix(rf"\b{call.target}: ")
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=rf"(?s)INVALID_ARGUMENT.*{message}"
    ):
        cases.run_target(call, prefix)
        pytest.fail(f"{call} is accepted")


SIZES = ({}, {"g": 0}, {"g": 1}, {"g": 3}, *targets.EMPTY)
# Those of CUDA of which the oracle has the bits.
WITH_ANSWER = [
    op
    for op in targets.CUDA_SPECS
    if op.split(",")[0] in answers.ANSWERS and not op.startswith("quantize_blocks")
]
GOOD = [(op, "") for op in targets.SPECS]
GOOD += [(op, prefix) for op in WITH_ANSWER for prefix in (CUDA, PTX)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("op, prefix", GOOD)
def test_good_calls(op, prefix, sizes):
    """Scales and amaxes of each group, of all, none; one group without a side; sides
    that are 0; results in the place of operands.
    """
    for call in cases.good_calls(op, sizes):
        for aliases in ({}, targets.in_place(call)):
            assert_right(call, prefix, input_output_aliases=aliases)


# CI runs a part of the bad calls of each op, and the next part of those of the next op.
@pytest.mark.parametrize("part", range(4))
@EVERYWHERE
def test_bad_buffer_is_named(op, prefix, part):
    for name in targets.names(op):
        calls = list(bad_calls.bad_buffers(op, name))
        assert len(calls) >= 8, "the table has its ways to be bad"
        for call in calls[part::4]:
            assert_refused(call, rf"\b{call.target}: {name}: expected .*got", prefix)
    assert_alive(prefix)


@EVERYWHERE
def test_wrong_number_of_operands_and_results(op, prefix):
    for call in bad_calls.bad_counts(op):
        assert_refused(call, rf"\b{call.target}: ", prefix)
    assert_alive(prefix)


@EVERYWHERE
def test_bad_attribute_is_refused(op, prefix):
    """A program that asks for something this handler does not know must not get
    something else in silence.
    """
    for call, message in bad_calls.bad_attributes(op):
        assert_refused(call, message, prefix)
    assert_alive(prefix)


@pytest.mark.parametrize("op", targets.LARGEST_K)
def test_too_many_quantizers(op):
    """The handlers have room for 64."""
    most = targets.LARGEST_K[op]
    assert_right(targets.filled(targets.with_quantizers(op, most)))
    one_more = targets.with_quantizers(op, most + 1)
    assert_refused(
        one_more, f"{one_more.target}: expected .* each of 1 to {most} quantizers"
    )
    assert_alive()


# Sides that are not those of three quantizers, and what the error names.
SIDES = {
    (6, 6): "6 numbers",
    (6, 6, 6, 6): "{} 3",
    (18, 6): "{} 1",
    (12, 12): "{} 1",
    (9, 9): "{} 0",
    (0, 18): "{} 0",
}


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize(
    "prefix", ["", pytest.param(CUDA, marks=pytest.mark.ci)], ids=["cpu", "emulated"]
)
def test_numbers_of_other_products(sides, prefix):
    """The sides deal out the quantizers to products; no number is read or written
    twice, or outside.
    """
    sizes = targets.SIZES | {"H0": 3, "H1": 1, "H2": 5}
    for op, place, name in (
        ("read_histories", "results", "reading"),
        ("write_histories", "operands", "recorded"),
    ):
        call = targets.build(op, sizes, 3)
        *others, _ = getattr(call, place)
        numbers = [((2, side), F32) for side in sides]
        call = dataclasses.replace(call, **{place: others + numbers})
        assert_refused(call, f"{op}: .*{SIDES[sides].format(name)}", prefix)
    assert_alive(prefix)
