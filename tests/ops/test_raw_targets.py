"""The raw CPU custom calls with bad operands: a clean INVALID_ARGUMENT that names op and operand, and a living process.

The Python layer never sends these; an exported program from another version, or a mistake of ours, may. Each case is
followed by a good call whose answer is checked: a handler that wrote before it checked would have corrupted something.
"""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

F32, BF16, E4M3, E5M2 = np.dtype(np.float32), oracle.BF16, oracle.E4M3.dtype, oracle.E5M2.dtype


@pytest.fixture(autouse=True)
def cpu_custom_calls():
    """The handlers under test are the CPU library's; fails with its message where it is not built."""
    with jax.default_device(jax.devices("cpu")[0]), ops.implementation("ffi"):
        yield


# What a good call must say beside its buffers.
ATTRIBUTES = {
    "amax_to_scale": {"numerator": np.float32(1)},
    "delayed_scales": {"numerators": np.ones(2, np.float32), "most_recent": np.bool_(False)},
}


def call(op, results, operands, **attributes):
    attributes = ATTRIBUTES.get(op, {}) | attributes
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    operands = [np.ones(shape, dtype) for shape, dtype in operands]
    return jax.block_until_ready(jax.ffi.ffi_call(cases.TARGETS[op], shapes)(*operands, **attributes))


# op -> (results, operands) of a good call, in the canonical form of common/README.md.
GOOD = {
    "amax": ([((2,), F32)], [((2, 12), BF16)]),
    "quantize": ([((2, 12), E4M3), ((2,), F32)], [((2, 12), BF16), ((2,), F32), ((2,), F32)]),
    "quantize_transpose": (
        [((2, 3, 4), E5M2), ((2, 4, 3), E5M2), ((2,), F32)],
        [((2, 3, 4), F32), ((1,), F32), ((2,), F32)],
    ),
    "dequantize": ([((2, 12), BF16)], [((2, 12), E4M3), ((1,), F32)]),
    "amax_to_scale": ([((2,), F32), ((2,), F32)], [((2,), F32), ((2,), F32)]),
    # Two quantizers with histories of their own lengths.
    "delayed_scales": (
        [((2, 4), F32), ((2, 1), F32), *[((2,), F32)] * 6],
        [((2, 4), F32), ((2, 1), F32), *[((2,), F32)] * 2],
    ),
    "push_amaxes": ([((2, 4), F32), ((2, 1), F32)], [((2, 4), F32), ((2, 1), F32), *[((2,), F32)] * 2]),
}
# What a good call of ones gives, where that is not ones.
ANSWERS = {"delayed_scales": [np.float32([0, 1, 1, 1])] + [np.float32(0)] + [np.float32(1)] * 4 + [np.float32(0)] * 2}
AMAXES_SO_FAR = [
    ("operand", 2, ((1,), F32)),
    ("operand", 2, ((3,), F32)),
    ("operand", 2, ((2, 1), F32)),
    ("operand", 2, ((), F32)),
    ("operand", 2, ((2,), BF16)),
    ("operand", 2, ((2,), np.int32)),
    ("operand", 2, ((0, 2), F32)),
    ("operand", 2, ((0,), BF16)),
]
# op -> operand or result named in the message -> (place, index, bad specification)s.
BAD = {
    "amax": {
        "x": [
            ("operand", 0, ((2, 12), np.int32)),
            ("operand", 0, ((2, 12), E4M3)),
            ("operand", 0, ((2, 12), np.complex64)),
            ("operand", 0, ((24,), BF16)),
            ("operand", 0, ((2, 3, 4), BF16)),
        ],
        "amax": [
            ("result", 0, ((3,), F32)),
            ("result", 0, ((1,), F32)),
            ("result", 0, ((2, 1), F32)),
            ("result", 0, ((), F32)),
            ("result", 0, ((2,), BF16)),
            ("result", 0, ((2,), np.int32)),
        ],
    },
    "quantize": {
        "x": [
            ("operand", 0, ((2, 12), np.int32)),
            ("operand", 0, ((2, 12), E5M2)),
            ("operand", 0, ((2, 12), bool)),
            ("operand", 0, ((24,), BF16)),
            ("operand", 0, ((), BF16)),
        ],
        "scale": [
            ("operand", 1, ((3,), F32)),
            ("operand", 1, ((0,), F32)),
            ("operand", 1, ((), F32)),
            ("operand", 1, ((2, 1), F32)),
            ("operand", 1, ((2,), BF16)),
            ("operand", 1, ((1,), np.int32)),
        ],
        "data": [
            ("result", 0, ((2, 11), E4M3)),
            ("result", 0, ((2, 13), E4M3)),
            ("result", 0, ((12, 2), E4M3)),
            ("result", 0, ((24,), E4M3)),
            ("result", 0, ((2, 12), np.int8)),
            ("result", 0, ((2, 12), F32)),
        ],
        "amax_so_far": AMAXES_SO_FAR,
        "amax": [("result", 1, ((1,), F32)), ("result", 1, ((2, 12), F32)), ("result", 1, ((0,), BF16))],
    },
    "quantize_transpose": {
        "x": [
            ("operand", 0, ((2, 3, 4), np.uint8)),
            ("operand", 0, ((2, 3, 4), E4M3)),
            ("operand", 0, ((6, 4), F32)),
            ("operand", 0, ((2, 3, 2, 2), F32)),
        ],
        "scale": [
            ("operand", 1, ((3,), F32)),
            ("operand", 1, ((), F32)),
            ("operand", 1, ((2,), np.int32)),
            ("operand", 1, ((2,), np.float16)),
        ],
        "data": [
            ("result", 0, ((2, 4, 3), E5M2)),
            ("result", 0, ((2, 12), E5M2)),
            ("result", 0, ((2, 3, 5), E5M2)),
            ("result", 0, ((2, 3, 4), np.uint8)),
        ],
        "data_t": [
            ("result", 1, ((2, 3, 4), E5M2)),
            ("result", 1, ((2, 4, 2), E5M2)),
            ("result", 1, ((2, 12), E5M2)),
            ("result", 1, ((2, 4, 3), E4M3)),
        ],
        "amax_so_far": AMAXES_SO_FAR,
        "amax": [("result", 2, ((1,), F32)), ("result", 2, ((3,), F32)), ("result", 2, ((2,), np.int32))],
    },
    "dequantize": {
        "data": [
            ("operand", 0, ((2, 12), np.uint8)),
            ("operand", 0, ((2, 12), BF16)),
            ("operand", 0, ((24,), E4M3)),
        ],
        "scale_inv": [
            ("operand", 1, ((3,), F32)),
            ("operand", 1, ((), F32)),
            ("operand", 1, ((1,), BF16)),
        ],
        "out": [
            ("result", 0, ((2, 11), BF16)),
            ("result", 0, ((2, 13), BF16)),
            ("result", 0, ((24,), BF16)),
            ("result", 0, ((2, 12), np.int32)),
            ("result", 0, ((2, 12), E4M3)),
        ],
    },
    "amax_to_scale": {
        "amax": [
            ("operand", 0, ((2,), BF16)),
            ("operand", 0, ((2,), np.int32)),
            ("operand", 0, ((), F32)),
            ("operand", 0, ((2, 1), F32)),
        ],
        "stored": [
            ("operand", 1, ((1,), F32)),
            ("operand", 1, ((3,), F32)),
            ("operand", 1, ((2, 1), F32)),
            ("operand", 1, ((2,), BF16)),
        ],
        "scale": [("result", 0, ((1,), F32)), ("result", 0, ((3,), F32)), ("result", 0, ((2,), np.int32))],
        "scale_inv": [("result", 1, ((1,), F32)), ("result", 1, ((1, 2), F32)), ("result", 1, ((2,), BF16))],
    },
    "delayed_scales": {
        "history 0": [
            ("operand", 0, ((2, 4), BF16)),
            ("operand", 0, ((2, 4), np.int32)),
            ("operand", 0, ((4,), F32)),
            ("operand", 0, ((2, 0), F32)),
            ("operand", 0, ((2, 2, 2), F32)),
        ],
        "history 1": [("operand", 1, ((3, 1), F32)), ("operand", 1, ((1,), F32)), ("operand", 1, ((2, 1), BF16))],
        "stored 0": [("operand", 2, ((3,), F32)), ("operand", 2, ((2, 1), F32)), ("operand", 2, ((2,), BF16))],
        "stored 1": [("operand", 3, ((1,), F32)), ("operand", 3, ((), F32)), ("operand", 3, ((2,), np.int32))],
        "next history 0": [
            ("result", 0, ((2, 3), F32)),
            ("result", 0, ((2, 5), F32)),
            ("result", 0, ((8,), F32)),
            ("result", 0, ((2, 4), np.int32)),
        ],
        "next history 1": [("result", 1, ((2, 4), F32)), ("result", 1, ((1, 1), F32))],
        "scale 0": [("result", 2, ((1,), F32)), ("result", 2, ((2,), BF16))],
        "scale 1": [("result", 3, ((3,), F32))],
        "scale_inv 0": [("result", 4, ((), F32)), ("result", 4, ((2,), np.int32))],
        "scale_inv 1": [("result", 5, ((1,), F32))],
        "amax 0": [("result", 6, ((2, 1), F32))],
        "amax 1": [("result", 7, ((1,), F32)), ("result", 7, ((2,), BF16))],
    },
    "push_amaxes": {
        "history 0": [
            ("operand", 0, ((2, 4), BF16)),
            ("operand", 0, ((4,), F32)),
            ("operand", 0, ((2, 0), F32)),
        ],
        "history 1": [("operand", 1, ((3, 1), F32)), ("operand", 1, ((2, 1), np.int32))],
        "amax 0": [("operand", 2, ((1,), F32)), ("operand", 2, ((2, 1), F32)), ("operand", 2, ((2,), BF16))],
        "amax 1": [("operand", 3, ((3,), F32)), ("operand", 3, ((), F32))],
        "next history 0": [("result", 0, ((2, 3), F32)), ("result", 0, ((2, 5), F32)), ("result", 0, ((2, 4), BF16))],
        "next history 1": [("result", 1, ((2, 4), F32)), ("result", 1, ((3, 1), F32))],
    },
}
ROWS = [
    (op, name, place, index, spec)
    for op, names in BAD.items()
    for name, rows in names.items()
    for place, index, spec in rows
]
IDS = [f"{op}-{name}-{np.dtype(spec[1]).name}{list(spec[0])}".replace(" ", "") for op, name, _, _, spec in ROWS]


def assert_answer(op, outputs):
    """What a good call gives, checked: ones quantize to ones, and so on."""
    for i, out in enumerate(outputs):
        answer = ANSWERS[op][i] if op in ANSWERS else np.float32(1)
        np.testing.assert_array_equal(oracle.widen(out), np.broadcast_to(answer, out.shape))


def assert_alive(op):
    assert_answer(op, call(op, *GOOD[op]))


@pytest.mark.parametrize("op", GOOD)
def test_good_call(op):
    assert_alive(op)


@pytest.mark.parametrize("op, name, place, index, spec", ROWS, ids=IDS)
def test_bad_buffer_is_named(op, name, place, index, spec):
    results, operands = (list(part) for part in GOOD[op])
    (operands if place == "operand" else results)[index] = spec
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"(?s)INVALID_ARGUMENT.*\b{op}: {name}: expected .*got"):
        call(op, results, operands)
    assert_alive(op)


@pytest.mark.parametrize("op", GOOD)
def test_wrong_number_of_operands_and_results(op):
    results, operands = GOOD[op]
    bad_calls = {
        "too many operands": (results, [*operands, ((1,), F32)]),
        "too few operands": (results, operands[:-1]),
        "too many results": ([*results, ((1,), F32)], operands),
    }
    if len(results) > 1:  # XLA removes a call without results before it can be refused
        bad_calls["too few results"] = (results[:-1], operands)
    for what, (bad_results, bad_operands) in bad_calls.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT.*\b{op}: "):
            call(op, bad_results, bad_operands)
            pytest.fail(f"{op}: accepted {what}")
        assert_alive(op)


@pytest.mark.parametrize("op", GOOD)
def test_unknown_attribute_is_refused(op):
    """A program that asks for something this handler does not know must not get something else in silence."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT.*\b{op}: "):
        call(op, *GOOD[op], surprise=np.int32(1))
    assert_alive(op)


@pytest.mark.parametrize("value", [0, -0.0, -1, 2.0**-127, np.inf, -np.inf, np.nan])
def test_bad_numerator_is_named(value):
    with pytest.raises(jax.errors.JaxRuntimeError, match="amax_to_scale: numerator: expected a positive normal F32"):
        call("amax_to_scale", *GOOD["amax_to_scale"], numerator=np.float32(value))
    assert_alive("amax_to_scale")


# Not the number of a good call: jit's cache takes 1.0 of one type for 1.0 of another.
@pytest.mark.parametrize("value", [np.float64(5), np.int32(6), np.float16(7)])
def test_numerator_of_another_type_is_refused(value):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        call("amax_to_scale", *GOOD["amax_to_scale"], numerator=value)
    assert_alive("amax_to_scale")


SUMS = ((2, 1, 4), F32)


@pytest.mark.parametrize("bad", [((2, 4), F32), ((2, 2, 4), F32), ((2, 1, 3), F32), ((2, 1, 4), BF16)], ids=str)
def test_bad_column_sums_are_named(bad):
    results, operands = GOOD["quantize_transpose"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="quantize_transpose: column_sums: expected .*got"):
        call("quantize_transpose", [*results, bad], operands)
    *others, sums = call("quantize_transpose", [*results, SUMS], operands)
    assert_answer("quantize_transpose", others)
    np.testing.assert_array_equal(sums, np.full((2, 1, 4), 3, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="quantize_transpose: expected 3 or 4 results, got 5"):
        call("quantize_transpose", [*results, SUMS, SUMS], operands)


@pytest.mark.parametrize("count", [1, 3, 17])
def test_wrong_number_of_numerators(count):
    results, operands = GOOD["delayed_scales"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="delayed_scales: expected 2 operands, 4 results and a numer"):
        call("delayed_scales", results, operands, numerators=np.ones(count, np.float32))
    assert_alive("delayed_scales")


@pytest.mark.parametrize("op", ["delayed_scales", "push_amaxes"])
def test_too_many_quantizers(op):
    """The handlers have room for 16."""
    history, scalar = ((2, 4), F32), ((2,), F32)
    for k, is_good in ((16, True), (17, False)):
        results = [history] * k + [scalar] * (3 * k if op == "delayed_scales" else 0)
        attributes = {"numerators": np.ones(k, np.float32)} if op == "delayed_scales" else {}
        if is_good:
            call(op, results, [history] * k + [scalar] * k, **attributes)
            continue
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{op}: expected .* each of 1 to 16 quantizers"):
            call(op, results, [history] * k + [scalar] * k, **attributes)
    assert_alive(op)


@pytest.mark.parametrize("value", [0, -1, 2.0**-127, np.inf, np.nan])
def test_bad_numerators_are_named(value):
    with pytest.raises(jax.errors.JaxRuntimeError, match="delayed_scales: numerator 1: expected a positive normal F32"):
        call("delayed_scales", *GOOD["delayed_scales"], numerators=np.float32([1, value]))
    assert_alive("delayed_scales")


@pytest.mark.parametrize("op", ["amax", "quantize", "quantize_transpose", "dequantize"])
def test_no_elements(op):
    """amax is 0, or what it was so far, for no groups, empty groups and (for matrices) either empty side."""
    rank = len(GOOD[op][1][0][0])
    for dims in ((0, 5), (2, 0), (0, 0)) if rank == 2 else ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        g = dims[0]
        results = [(dims, dtype) for _, dtype in GOOD[op][0]]
        if op == "quantize_transpose":
            results[1] = ((g, dims[2], dims[1]), results[1][1])
        if op != "dequantize":
            results[-1] = ((g,), F32)
        operands = [(dims, GOOD[op][1][0][1]), *(((1,), F32) for _ in GOOD[op][1][1:])]
        if op.startswith("quantize"):
            operands[2] = ((g,), F32)
        outputs = call(op, results, operands)
        if op != "dequantize":
            cases.assert_bitwise(outputs[-1], np.full(g, op != "amax", np.float32), f"{op} of {dims}: amax")
        for out, (shape, _) in zip(outputs, results, strict=True):
            assert out.shape == shape
    assert_alive(op)


def test_no_scales():
    results, operands = ([((0,), F32)] * 2, [((0,), F32)] * 2)
    assert [out.shape for out in call("amax_to_scale", results, operands)] == [(0,), (0,)]


def test_no_groups_of_histories():
    history, scalar = ((0, 4), F32), ((0,), F32)
    attributes = {"numerators": np.ones(1, np.float32)}
    call("delayed_scales", [history, scalar, scalar, scalar], [history, scalar], **attributes)
    call("push_amaxes", [history], [history, scalar])


@pytest.mark.parametrize("op", ["quantize", "quantize_transpose"])
def test_no_amax(op):
    """Without one so far it is that of x; without one as a result the codes are the same, whatever it is so far."""
    results, operands = (list(part) for part in GOOD[op])
    none = ((0,), F32)
    *_, top = call(op, results, [*operands[:2], none])
    np.testing.assert_array_equal(top, np.ones(2, np.float32))
    for so_far in (none, operands[2]):
        *codes, top = call(op, [*results[:-1], none], [*operands[:2], so_far])
        assert top.shape == (0,)
        assert_answer(op, codes)
    assert_alive(op)


@pytest.mark.parametrize("groups_of_scales", [1, 3])
def test_groups_have_their_own_amax_and_scale(groups_of_scales):
    x = cases.random_values((3, 37), oracle.BF16, 5)
    scale = np.float32([0.5, 3, 2.0**-7])[:groups_of_scales]
    shapes = [jax.ShapeDtypeStruct(x.shape, E4M3), jax.ShapeDtypeStruct((3,), F32)]
    for aliases in ({}, {2: 1}):
        quantize = jax.ffi.ffi_call(cases.TARGETS["quantize"], shapes, input_output_aliases=aliases)
        data, top = quantize(x, scale, np.zeros(3, np.float32))
        for i in range(3):
            cases.assert_quantized((data[i], top[i]), x[i], scale[i % groups_of_scales], oracle.E4M3)


def test_errors_inside_jit_next_to_good_calls():
    """One bad call of a program fails the program, not the process; the same jitted good function still works."""

    def good(x):
        return ops.quantize(x, np.float32(2), E4M3)

    def bad(x):
        data, _ = good(x)
        shapes = [jax.ShapeDtypeStruct((7,), F32)]
        return jax.ffi.ffi_call(cases.TARGETS["amax"], shapes)(data.astype(F32))[0]

    x = cases.random_values((9, 11), F32, 1)
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"amax: amax: expected"):
            jax.block_until_ready(jax.jit(bad)(x))
        cases.assert_quantized(jax.jit(good)(x), x, np.float32(2), oracle.E4M3)
