"""The FFI handlers of the CUDA library, run by XLA on the CPU over emulated kernels.

Bad buffers give a clean INVALID_ARGUMENT that names op and operand; each case is followed by a good call, whose answer
a handler that wrote before it checked would have spoilt.
"""

import jax
import numpy as np
import oracle
import pytest
from ops.test_raw_targets import ANSWERS, ATTRIBUTES, GOOD as ELEMENTWISE_GOOD, ROWS as ELEMENTWISE_ROWS

F32, BF16, S32, E4M3, E5M2 = np.dtype(np.float32), oracle.BF16, np.dtype(np.int32), oracle.E4M3.dtype, oracle.E5M2.dtype
U8 = np.dtype(np.uint8)
pytestmark = pytest.mark.usefixtures("handlers")

FLAGS = {"precise": False, "has_bias": True, "has_accumulator": True}

DEFAULTS = ATTRIBUTES | {
    "scaled_matmul": FLAGS,
    "block_scaled_matmul": {"precise": True, "a_scales": "1x128", "b_scales": "128x128"},
    "ragged_matmul": {"precise": True},
    "quantize_activation": {"activation": "gelu_gated"},
    "quantize_blocks_transpose": {"block": "1x128", "scaling": "f32"},
}

# op -> (results, operands) of a good call, in the canonical form of common/README.md.
GOOD = ELEMENTWISE_GOOD | {
    "scaled_matmul": (
        [((2, 16, 32), F32), ((1024,), U8)],
        [((2, 16, 48), E4M3), ((2, 32, 48), E5M2), ((2, 4), F32), ((1,), F32), ((32,), BF16), ((2, 16, 32), F32)],
    ),
    "block_scaled_matmul": (
        [((2, 16, 32), F32), ((1024,), U8)],
        [((2, 16, 160), E4M3), ((2, 32, 160), E5M2), ((2, 2, 16), F32), ((2, 1, 4), F32)],
    ),
    "ragged_matmul": (
        [((2, 4, 5), F32)],
        [((2, 4, 6), E4M3), ((2, 4, 5, 6), E5M2), ((2,), F32), ((1,), F32), ((2, 4), S32)],
    ),
    "quantize_activation": (
        [((2, 3, 4), E4M3), ((2,), F32), ((2, 4, 3), E4M3)],
        [((2, 3, 2, 4), BF16), ((2,), F32), ((2,), F32)],
    ),
    "quantize_blocks_transpose": (
        [((2, 3, 40), E4M3), ((2, 1, 3), F32), ((2, 0), F32), ((2, 40, 3), E4M3), ((2, 1, 40), F32)],
        [((2, 3, 40), BF16)],
    ),
    "quantize_norm": (
        [((2, 3, 4), E5M2), ((2,), F32), ((2, 4, 3), E5M2)],
        [((2, 3, 4), BF16), ((1,), F32), ((2,), F32), ((2, 3, 2), F32), ((2, 4), F32), ((2, 4), F32)],
    ),
}
NONE = ((0,), F32)
# The other kind, where the groups cut the contraction.
RAGGED_CONTRACTION = (
    [((2, 3, 5, 6), BF16)],
    [((2, 5, 4), E4M3), ((2, 6, 4), E4M3), ((1,), F32), ((1,), F32), ((2, 3), S32)],
)
# Operand or result of scaled_matmul that the message names, and one bad specification.
MATMUL_ROWS = [
    ("a", "operand", 0, ((2, 16, 48), BF16)),
    ("a", "operand", 0, ((16, 48), E4M3)),
    ("b", "operand", 1, ((2, 32, 48), np.int8)),
    ("b", "operand", 1, ((2, 32, 32), E5M2)),
    ("b", "operand", 1, ((1, 32, 48), E5M2)),
    ("a_scale_inv", "operand", 2, ((2,), F32)),
    ("a_scale_inv", "operand", 2, ((3, 4), F32)),
    ("a_scale_inv", "operand", 2, ((0, 4), F32)),
    ("a_scale_inv", "operand", 2, ((2, 1), F32)),
    ("a_scale_inv", "operand", 2, ((2, 4), BF16)),
    ("b_scale_inv", "operand", 3, ((), F32)),
    ("bias", "operand", 4, ((32,), F32)),
    ("bias", "operand", 4, ((16,), BF16)),
    ("accumulator", "operand", 5, ((2, 16, 32), BF16)),
    ("accumulator", "operand", 5, ((1, 16, 32), F32)),
    ("out", "result", 0, ((2, 32, 16), F32)),
    ("out", "result", 0, ((2, 16, 32), BF16)),  # with an accumulator
    ("out", "result", 0, ((2, 16, 32), E4M3)),
    ("workspace", "result", 1, ((1024,), F32)),
    ("workspace", "result", 1, ((32, 32), U8)),
]
BLOCK_MATMUL_ROWS = [
    ("a", "operand", 0, ((2, 16, 160), BF16)),
    ("b", "operand", 1, ((2, 32, 144), E5M2)),
    ("a_scale_inv", "operand", 2, ((2, 16, 2), F32)),
    ("a_scale_inv", "operand", 2, ((1, 2, 16), F32)),
    ("a_scale_inv", "operand", 2, ((2, 2, 16), BF16)),
    ("a_scale_inv", "operand", 2, ((2, 2, 16), U8)),
    ("b_scale_inv", "operand", 3, ((2, 1, 2), F32)),
    ("b_scale_inv", "operand", 3, ((2, 4), F32)),
    ("out", "result", 0, ((2, 32, 16), F32)),
    ("out", "result", 0, ((2, 16, 32), E4M3)),
    ("workspace", "result", 1, ((1024,), F32)),
]
RAGGED_ROWS = [
    ("a", "operand", 0, ((2, 4, 6), BF16)),
    ("a", "operand", 0, ((4, 6), E4M3)),
    ("b", "operand", 1, ((2, 4, 5, 6), np.int8)),
    ("b", "operand", 1, ((2, 4, 5, 7), E5M2)),
    ("b", "operand", 1, ((2, 3, 5, 6), E5M2)),
    ("b", "operand", 1, ((1, 4, 5, 6), E5M2)),
    ("b", "operand", 1, ((5, 6), E5M2)),
    ("b", "operand", 1, ((2, 5, 7), E5M2)),
    ("a_scale_inv", "operand", 2, ((3,), F32)),
    ("b_scale_inv", "operand", 3, ((1,), BF16)),
    ("group_sizes", "operand", 4, ((2, 4), F32)),
    ("group_sizes", "operand", 4, ((2, 4), np.uint32)),
    ("group_sizes", "operand", 4, ((1, 4), S32)),
    ("group_sizes", "operand", 4, ((4,), S32)),
    ("out", "result", 0, ((2, 4, 5), E4M3)),
    ("out", "result", 0, ((2, 5, 4), F32)),
    ("out", "result", 0, ((2, 4, 4, 5), F32)),
]
# What the fused producers share; both have these shapes.
CODES_ROWS = [
    ("scale", "operand", 1, ((3,), F32)),
    ("scale", "operand", 1, ((2,), BF16)),
    ("amax_so_far", "operand", 2, ((1,), F32)),
    ("amax_so_far", "operand", 2, ((2,), np.int32)),
    ("amax_so_far", "operand", 2, ((0,), BF16)),
    ("data", "result", 0, ((2, 4, 3), E4M3)),
    ("data", "result", 0, ((2, 3, 4), np.int8)),
    ("amax", "result", 1, ((1,), F32)),
    ("amax", "result", 1, ((2,), np.int32)),
    ("amax", "result", 1, ((0, 2), F32)),
    ("data_t", "result", 2, ((2, 3, 4), E4M3)),
    ("data_t", "result", 2, ((2, 4, 3), np.uint8)),
]
ACTIVATION_ROWS = [
    ("x", "operand", 0, ((2, 3, 2, 4), E4M3)),
    ("x", "operand", 0, ((2, 3, 4), BF16)),
    ("x", "operand", 0, ((2, 3, 1, 4), BF16)),  # not gated
    ("x", "operand", 0, ((2, 3, 3, 4), BF16)),
    ("data_t", "result", 2, ((2, 4, 3), E5M2)),
]
BLOCKS_ROWS = [
    ("x", "operand", 0, ((2, 3, 40), E4M3)),
    ("x", "operand", 0, ((6, 40), BF16)),
    ("data", "result", 0, ((2, 40, 3), E4M3)),
    ("data", "result", 0, ((2, 3, 40), np.int8)),
    ("scale_inv", "result", 1, ((2, 3, 1), F32)),
    ("scale_inv", "result", 1, ((2, 1, 3), U8)),
    ("amaxes", "result", 2, ((2, 43), F32)),
    ("amaxes", "result", 2, ((2, 0), np.int32)),
    ("data_t", "result", 3, ((2, 3, 40), E4M3)),
    ("data_t", "result", 3, ((2, 40, 3), E5M2)),
    ("scale_inv_t", "result", 4, ((2, 40, 1), F32)),
    ("scale_inv_t", "result", 4, ((2, 1, 40), U8)),
]
NORM_ROWS = [
    ("x", "operand", 0, ((2, 3, 4), np.int32)),
    ("x", "operand", 0, ((6, 4), BF16)),
    ("statistics", "operand", 3, ((2, 3), F32)),
    ("statistics", "operand", 3, ((2, 3, 3), F32)),
    ("statistics", "operand", 3, ((2, 4, 2), F32)),
    ("statistics", "operand", 3, ((2, 3, 2), BF16)),
    ("gamma", "operand", 4, ((3, 4), F32)),
    ("gamma", "operand", 4, ((2, 3), F32)),
    ("gamma", "operand", 4, ((4,), F32)),
    ("gamma", "operand", 4, ((2, 4), BF16)),
    ("gamma", "operand", 4, NONE),
    ("beta", "operand", 3, ((2, 3, 1), F32)),  # there is a beta, and no mean
    ("beta", "operand", 5, ((1, 4), F32)),
    ("beta", "operand", 5, ((2, 4), BF16)),
    ("data_t", "result", 2, ((2, 4, 3), E4M3)),
]
ROWS = [
    *ELEMENTWISE_ROWS,
    *(("scaled_matmul", *row) for row in MATMUL_ROWS),
    *(("block_scaled_matmul", *row) for row in BLOCK_MATMUL_ROWS),
    *(("ragged_matmul", *row) for row in RAGGED_ROWS),
    *(("quantize_activation", *row) for row in CODES_ROWS + ACTIVATION_ROWS),
    *(("quantize_blocks_transpose", *row) for row in BLOCKS_ROWS),
    *(("quantize_norm", *row) for row in CODES_ROWS + NORM_ROWS),
]
IDS = [f"{op}-{name}-{np.dtype(spec[1]).name}{list(spec[0])}".replace(" ", "") for op, name, _, _, spec in ROWS]


def call(op, results, operands, **attributes):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    operands = [np.ones(*x) if isinstance(x, tuple) else x for x in operands]
    attributes = DEFAULTS.get(op, {}) | attributes
    attributes = {name: np.bool_(v) if isinstance(v, bool) else v for name, v in attributes.items()}
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.block_until_ready(jax.ffi.ffi_call(f"emulated_cuda_{op}", shapes)(*operands, **attributes))


# gelu(1) is 0.841, next to the code 0.8125; the amax so far is 1. A row of ones is 0 / 0 when it is centered.
CUDA_ANSWERS = ANSWERS | {
    "scaled_matmul": [np.float32(50)],
    "block_scaled_matmul": [np.float32(160)],
    "ragged_matmul": [np.float32(6)],
    "quantize_activation": np.float32([0.8125, 1, 0.8125]),
    "quantize_blocks_transpose": np.float32([448, 1 / 448, 0, 448, 1 / 448]),  # the third is empty
    "quantize_norm": np.float32([1, 1, 1]),
}


def assert_alive(op):
    """A good call of the op, checked: ones quantize to ones, 48 products of ones and two ones make 50, 160 make 160."""
    outputs = call(op, *GOOD[op])
    answers = CUDA_ANSWERS.get(op, [np.float32(1)] * len(outputs))
    for out, answer in zip(outputs, answers, strict="scaled_matmul" not in op):
        np.testing.assert_array_equal(oracle.widen(out), np.broadcast_to(answer, out.shape))


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


@pytest.mark.parametrize("m, n, k", [(8, 32, 48), (16, 31, 48), (16, 32, 40)])
def test_unaligned_matmul_is_refused(m, n, k):
    """Python pads; what arrives unaligned all the same is named."""
    specs = [((1, m, k), E4M3), ((1, n, k), E4M3), ((1,), F32), ((1,), F32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scaled_matmul: [ab]: expected .* multiples of 16"):
        call("scaled_matmul", [((1, m, n), F32), ((0,), U8)], specs, has_bias=False, has_accumulator=False)


@pytest.mark.parametrize("op", ["scaled_matmul", "block_scaled_matmul"])
def test_two_e5m2_are_refused(op):
    results, operands = GOOD[op]
    operands = [(operands[0][0], E5M2), *operands[1:]]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"\b{op}: b: expected dtype F8E4M3FN"):
        call(op, results, operands)


@pytest.mark.parametrize("m, n, k", [(8, 32, 48), (16, 31, 48), (16, 32, 40)])
def test_unaligned_block_scaled_matmul_is_refused(m, n, k):
    specs = [((1, m, k), E4M3), ((1, n, k), E4M3), ((1, m), F32), ((1, n), F32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"block_scaled_matmul: [ab]: expected .* multiples of 16"):
        call("block_scaled_matmul", [((1, m, n), F32), ((0,), U8)], specs, a_scales="rows", b_scales="rows")


@pytest.mark.parametrize("modes", [("128x128", "128x128"), ("rows", "1x128"), ("1x32", "1x128"), ("", "rows")], ids=str)
def test_unknown_scales_are_named(modes):
    """Also two that cuBLASLt does not multiply."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"block_scaled_matmul: a_scales, .* got {' by '.join(modes)}"):
        call("block_scaled_matmul", *GOOD["block_scaled_matmul"], a_scales=modes[0], b_scales=modes[1])
    assert_alive("block_scaled_matmul")


@pytest.mark.parametrize("has_bias, has_accumulator", [(False, True), (True, False), (False, False)])
def test_operand_count_follows_the_attributes(has_bias, has_accumulator):
    results, operands = GOOD["scaled_matmul"]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scaled_matmul: expected [45] operands .*, got 6"):
        call("scaled_matmul", results, operands, has_bias=has_bias, has_accumulator=has_accumulator)


@pytest.mark.parametrize("op", GOOD)
def test_unknown_attribute_is_refused(op):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        call(op, *GOOD[op], surprise=True)


@pytest.mark.parametrize("value", [0, -1, 2.0**-127, np.inf, np.nan])
def test_bad_numerator_is_named(value):
    with pytest.raises(jax.errors.JaxRuntimeError, match="amax_to_scale: numerator: expected a positive normal F32"):
        call("amax_to_scale", *GOOD["amax_to_scale"], numerator=np.float32(value))
    assert_alive("amax_to_scale")


def test_scale_arguments_arrive_in_their_places():
    amax, stored = np.float32([7, 0]), np.float32([5, 3])
    scale, scale_inv = call("amax_to_scale", GOOD["amax_to_scale"][0], [amax, stored], numerator=np.float32(448))
    oracle.assert_bitwise(scale, np.float32([64, 1 / np.float32(3)]), "scale")
    oracle.assert_bitwise(scale_inv, 1 / np.float32([64, 1 / np.float32(3)]), "scale_inv")


@pytest.mark.parametrize("name", ["tanh", "", "gelu"])
def test_bad_activation_is_named(name):
    """Also one that does not go with x."""
    what = "x" if name == "gelu" else "activation"
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"quantize_activation: {what}: expected .*got"):
        call("quantize_activation", *GOOD["quantize_activation"], activation=name)
    assert_alive("quantize_activation")


@pytest.mark.parametrize("op", ["quantize_activation", "quantize_norm"])
def test_one_layout_and_too_many(op):
    results, operands = GOOD[op]
    both = call(op, results, operands)
    one = call(op, results[:2], operands)
    for got, expected in zip(one, both[:2], strict=True):
        oracle.assert_bitwise(got, np.asarray(expected), f"{op} without data_t")
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{op}: expected 2 or 3 results, got 4"):
        call(op, [*results, ((1,), F32)], operands)


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
    results, operands = GOOD[op]
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


@pytest.mark.parametrize("attributes", [{"block": "1x64"}, {"scaling": "e8m0"}], ids=str)
def test_unknown_blocks_are_named(attributes):
    (name,) = attributes
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"quantize_blocks_transpose: {name}: expected .*got"):
        call("quantize_blocks_transpose", *GOOD["quantize_blocks_transpose"], **attributes)
    assert_alive("quantize_blocks_transpose")


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
        with pytest.raises(jax.errors.JaxRuntimeError, match="quantize_blocks_transpose: scale_inv: expected"):
            call("quantize_blocks_transpose", results, operands, block=block)


def test_one_layout_of_blocks_and_too_many():
    op, (results, operands) = "quantize_blocks_transpose", GOOD["quantize_blocks_transpose"]
    both = call(op, results, operands)
    for got, expected in zip(call(op, results[:3], operands), both[:3], strict=True):
        oracle.assert_bitwise(got, np.asarray(expected), f"{op} without data_t")
    for wrong in (results[:4], [*results, ((1,), F32)]):
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{op}: expected 3 or 5 results, got {len(wrong)}"):
            call(op, wrong, operands)


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
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"b_scale_inv: expected F32\[1\] or F32\[4,4\]"):
        call("scaled_matmul", [((4, 16, 16), F32), ((0,), U8)], specs, has_bias=False, has_accumulator=False)


@pytest.mark.parametrize(
    "name, place, index, spec",
    [
        ("b", "operand", 1, ((2, 6, 3), E4M3)),
        ("group_sizes", "operand", 4, ((3, 3), S32)),
        ("out", "result", 0, ((2, 5, 6), BF16)),
        ("out", "result", 0, ((2, 2, 5, 6), BF16)),
    ],
)
def test_bad_buffer_of_a_ragged_contraction_is_named(name, place, index, spec):
    results, operands = (list(part) for part in RAGGED_CONTRACTION)
    (operands if place == "operand" else results)[index] = spec
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"(?s)INVALID_ARGUMENT.*\bragged_matmul: {name}: expected"):
        call("ragged_matmul", results, operands)
    assert_alive("ragged_matmul")


@pytest.mark.parametrize("contraction", [False, True])
def test_ragged_arguments_arrive_in_their_places(contraction):
    rng = np.random.default_rng(0)
    results, specs = RAGGED_CONTRACTION if contraction else GOOD["ragged_matmul"]
    a, b = (oracle.quantize(rng.standard_normal(shape), 8, oracle.E4M3)[0] for shape, _ in specs[:2])
    a_scale, b_scale = np.float32([0.5, 2]), np.float32([3])
    sizes = np.int32([[1, 0, 3], [2, 1, 0]]) if contraction else np.int32([[1, 0, 2, 0], [0, 0, 0, 4]])
    (out,) = call("ragged_matmul", results, [a, b, a_scale, b_scale, sizes])
    for i in range(2):
        options = {"out_dtype": results[0][1], "accumulation": "precise", "device": "8.9"}  # what the emulator does
        oracle.ragged_matmul(a[i], b[i], a_scale[i], 3, sizes[i], **options).check(out[i], f"member {i}")


def test_initialize(handlers):
    """The stage before execution, which XLA does not have on CPUs, prepares each time and reads no buffer."""
    assert handlers.initialize_scaled_matmul() == 1
    assert handlers.initialize_scaled_matmul() == 2
