"""The FFI handlers of the CUDA library, run by XLA on the CPU over emulated kernels.

Bad buffers give a clean INVALID_ARGUMENT that names op and operand; each case is followed by a good call, whose answer
a handler that wrote before it checked would have spoilt.
"""

import jax
import numpy as np
import oracle
import pytest
from ops import answers, targets
from ops.cases import run_target as run
from ops.targets import BF16, E4M3, E5M2, F32, U8
from ops.test_raw_targets import assert_refused

pytestmark = pytest.mark.usefixtures("handlers")

PREFIX = "emulated_cuda_"
NONE = ((0,), F32)
OPS = pytest.mark.parametrize("op", targets.CUDA_SPECS)
# What ones give: 48 products of ones and two ones, 160 and 6 products; gelu(1) is 0.841, next to the code 0.8125, and
# the amax so far is 1; a row of ones is 0 / 0 when it is centered.
ANSWERS = {
    "scaled_matmul": [50],
    "block_scaled_matmul": [160],
    "ragged_matmul": [6],
    "ragged_matmul, contraction": [1],
    "quantize_activation": [0.8125, 1, 0.8125],
    "quantize_blocks_transpose": [448, np.float32(1 / 448), 0, 448, np.float32(1 / 448)],  # the third is empty
    "quantize_norm": [1, 1, 1],
}


def call(op, results, operands, **attributes):
    attributes = targets.ATTRIBUTES.get(op, {}) | attributes
    attributes = {name: np.bool_(v) if isinstance(v, bool) else v for name, v in attributes.items()}
    return run(targets.Call(op, operands, results, attributes), PREFIX)


def parts(op):
    """`(op, results, operands)` of a good call."""
    good = targets.good(op)
    return op, good.results, good.operands


def assert_alive(op):
    """A good call of the op, checked."""
    good = targets.filled(targets.good(op))
    if op not in ANSWERS:
        answers.assert_results(good, run(good, PREFIX), answers.answer(good))
        return
    for out, answer in zip(run(good, PREFIX), ANSWERS[op], strict=False):  # a workspace has no answer
        np.testing.assert_array_equal(oracle.widen(out), np.full(out.shape, answer, F32))


@OPS
def test_good_call(op):
    assert_alive(op)


BUFFERS = [(op, name) for op in targets.CUDA_SPECS for name in targets.names(op)]


@pytest.mark.parametrize("op, name", BUFFERS, ids=map("-".join, BUFFERS))
def test_bad_buffer_is_named(op, name):
    calls = list(targets.bad_buffers(op, name))
    assert len(calls) >= 8, "the table has its ways to be bad"
    for bad in calls:
        assert_refused(bad, rf"\b{bad.target}: {name}: expected .*got", PREFIX)
    assert_alive(op)


@OPS
def test_wrong_number_of_operands_and_results(op):
    for bad in targets.bad_counts(op):
        assert_refused(bad, "", PREFIX)
    assert_alive(op)


@OPS
def test_bad_attribute_is_refused(op):
    for bad, message in targets.bad_attributes(op):
        assert_refused(bad, message.removesuffix(rf"\b{bad.target}: "), PREFIX)  # XLA's own errors have no name
    assert_alive(op)


def assert_named(op, results, operands, message, **attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(op, results, operands, **attributes)


@pytest.mark.parametrize("m, n, k", [(8, 32, 48), (16, 31, 48), (16, 32, 40)])
def test_unaligned_matmul_is_refused(m, n, k):
    """Python pads; what arrives unaligned all the same is named."""
    codes, results = [((1, m, k), E4M3), ((1, n, k), E4M3)], [((1, m, n), F32), ((0,), U8)]
    for op, scales, attributes in (
        ("scaled_matmul", [((1,), F32)] * 2, {"has_bias": False, "has_accumulator": False}),
        ("block_scaled_matmul", [((1, m), F32), ((1, n), F32)], {"a_scales": "rows", "b_scales": "rows"}),
    ):
        assert_named(op, results, codes + scales, rf"\b{op}: [ab]: expected .* multiples of 16", **attributes)


@pytest.mark.parametrize("op", ["scaled_matmul", "block_scaled_matmul"])
def test_two_e5m2_are_refused(op):
    op, results, (a, b, *scales) = parts(op)
    operands = [(a[0], E5M2), (b[0], E5M2), *scales]
    assert_named(op, results, operands, rf"\b{op}: b: expected dtype F8E4M3FN")


def test_scale_arguments_arrive_in_their_places():
    op, results, _ = parts("amax_to_scale")
    scale, scale_inv = call(op, results, [np.float32([7, 0]), np.float32([5, 3])], numerator=np.float32(448))
    oracle.assert_bitwise(scale, np.float32([64, 1 / np.float32(3)]), "scale")
    oracle.assert_bitwise(scale_inv, 1 / np.float32([64, 1 / np.float32(3)]), "scale_inv")


@pytest.mark.parametrize(
    "op, fewer",
    [("quantize_activation", [2]), ("quantize_norm", [2]), ("quantize_blocks_transpose", [3, 4])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_layout_and_too_many(op, fewer):
    op, results, operands = parts(op)
    both = call(op, results, operands)
    for got, expected in zip(call(op, results[: fewer[0]], operands), both[: fewer[0]], strict=True):
        oracle.assert_bitwise(got, np.asarray(expected), f"{op} without data_t")
    for wrong in ([*results, ((1,), F32)], *(results[:n] for n in fewer[1:])):
        message = rf"{op}: expected {fewer[0]} or {len(results)} results, got {len(wrong)}"
        assert_named(op, wrong, operands, message)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "silu_gated", "gelu_gated"])
def test_activation_arguments_arrive_in_their_places(name, own):
    rng = np.random.default_rng(0)
    pair = 2 if name.endswith("_gated") else 1
    x = rng.standard_normal((2, 7, pair, 9)).astype(F32)
    scale, start = np.float32([0.5, 2])[: 2 if own else 1], np.float32([0, 77])
    data, top, data_t = call(
        "quantize_activation", [((2, 7, 9), E4M3), ((2,), F32), ((2, 9, 7), E4M3)], [x, scale, start], activation=name
    )
    for i in range(2):
        values = oracle.activation(x[i] if pair == 2 else x[i, :, 0], name)
        values.check(data[i], data_t[i], top[i], scale[i % scale.size], oracle.E4M3, start=start[i], what=f"group {i}")


@pytest.mark.parametrize("op", ["quantize_activation", "quantize_norm"])
def test_no_amax(op):
    """None so far is zero; without one as a result the codes are the same, whatever it is so far."""
    op, results, operands = parts(op)
    expected = call(op, results, operands)
    for so_far in (NONE, operands[2]):
        data, top, data_t = call(op, [results[0], NONE, results[2]], [*operands[:2], so_far, *operands[3:]])
        assert top.shape == (0,)
        oracle.assert_bitwise(data, np.asarray(expected[0]), "data")
        oracle.assert_bitwise(data_t, np.asarray(expected[2]), "data_t")
    zeros, none = (call(op, results, [*operands[:2], so_far, *operands[3:]]) for so_far in (np.zeros(2, F32), NONE))
    oracle.assert_bitwise(none[1], np.asarray(zeros[1]), "amax")
    assert_alive(op)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("has_mean, has_beta", [(False, False), (True, False), (True, True)])
def test_norm_arguments_arrive_in_their_places(has_mean, has_beta, own):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 7, 9)).astype(F32) + 1
    scale, start = np.float32([0.5, 2])[: 2 if own else 1], np.float32([0, 77])
    statistics = rng.standard_normal((2, 7, 1 + has_mean)).astype(F32)
    gamma, beta = rng.standard_normal((2, 2 if own else 1, 9)).astype(F32)
    operands = [x, scale, start, statistics, gamma, beta if has_beta else NONE]
    data, top, data_t = call("quantize_norm", [((2, 7, 9), E4M3), ((2,), F32), ((2, 9, 7), E4M3)], operands)
    for i in range(2):
        j = i % scale.size
        values = oracle.affine(x[i], statistics[i], gamma[j], beta[j] if has_beta else None)
        codes, codes_t, of_group = oracle.quantize_transpose(values, scale[j], oracle.E4M3)
        for got, expected in ((data, codes), (data_t, codes_t), (top, np.maximum(of_group, start[i]))):
            oracle.assert_bitwise(got[i], expected, f"group {i}")


@pytest.mark.parametrize(
    "block, shape, wrong",
    [("rows", (130, 1), (130,)), ("1x32", (2, 5, 512), (130, 20)), ("1x128", (5, 130), (130, 5)),
     ("128x128", (2, 8), (2, 5))],
)  # fmt: skip
def test_scales_lie_where_products_read_them(block, shape, wrong):
    amaxes = (1, 130 if block == "rows" else 0)
    for scales in (shape, wrong):
        results = [((1, 130, 640), E4M3), ((1, *scales), F32), (amaxes, F32)]
        operands = [np.ones((1, 130, 640), BF16)]
        if scales == shape:
            call("quantize_blocks_transpose", results, operands, block=block)
            continue
        assert_named("quantize_blocks_transpose", results, operands, "scale_inv: expected", block=block)


@pytest.mark.parametrize("counts", [(1, 1), (4, 1), (1, 2), (2, 2)], ids=str)
def test_matmul_arguments_arrive_in_their_places(counts):
    """Scales of all groups, of each, and of two in a row; of four numbers the first is the scale."""
    rng = np.random.default_rng(0)
    g, m, n, k = 4, 16, 32, 48
    a, b = (oracle.quantize(rng.standard_normal((g, r, k)), 8, oracle.E4M3)[0] for r in (m, n))
    a_scale, b_scale = (rng.uniform(0.5, 2, count).astype(F32) for count in counts)
    spaced = [x if x.size == 1 else np.stack([x, *[np.full_like(x, np.nan)] * 3], axis=1) for x in (a_scale, b_scale)]
    bias = rng.standard_normal(n).astype(BF16)
    accumulator = rng.standard_normal((g, m, n)).astype(F32)
    results = [((g, m, n), F32), ((1024,), U8)]
    out, _ = call("scaled_matmul", results, [a, b, *spaced, bias, accumulator])
    for i in range(g):
        scales = (x[i * x.size // g] for x in (a_scale, b_scale))
        oracle.scaled_matmul(a[i], b[i], *scales, bias=bias, accumulator=accumulator[i]).check(out[i], f"group {i}")


def test_matmul_scales_of_other_groups_are_named():
    specs = [((4, 16, 32), E4M3), ((4, 16, 32), E4M3), ((4, 4), F32), ((2, 4), F32)]
    message, terms = r"b_scale_inv: expected F32\[1\] or F32\[4,4\]", {"has_bias": False, "has_accumulator": False}
    assert_named("scaled_matmul", [((4, 16, 16), F32), ((0,), U8)], specs, message, **terms)


@pytest.mark.parametrize("contraction", [False, True])
def test_ragged_arguments_arrive_in_their_places(contraction):
    rng = np.random.default_rng(0)
    op, results, specs = parts("ragged_matmul, contraction" if contraction else "ragged_matmul")
    a, b = (oracle.quantize(rng.standard_normal(shape), 8, oracle.E4M3)[0] for shape, _ in specs[:2])
    a_scale, b_scale = np.float32([0.5, 2]), np.float32([3])
    sizes = np.int32([[1, 0, 3], [2, 1, 0]]) if contraction else np.int32([[1, 0, 2, 0], [0, 0, 0, 4]])
    (out,) = call(op, results, [a, b, a_scale, b_scale, sizes])
    for i in range(2):
        options = {"out_dtype": results[0][1], "accumulation": "precise", "device": "8.9"}  # what the emulator does
        oracle.ragged_matmul(a[i], b[i], a_scale[i], 3, sizes[i], **options).check(out[i], f"member {i}")


def test_initialize(handlers):
    """The stage before execution, which XLA does not have on CPUs, prepares each time and reads no buffer."""
    assert handlers.initialize_scaled_matmul() == 1
    assert handlers.initialize_scaled_matmul() == 2
