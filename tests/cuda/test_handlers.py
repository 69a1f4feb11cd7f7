"""The FFI handlers of the CUDA library, run by XLA on the CPU over emulated kernels.

Bad buffers give a clean INVALID_ARGUMENT that names op and operand; each case is followed by a good call, whose answer
a handler that wrote before it checked would have spoilt.
"""

import jax
import numpy as np
import oracle
import pytest
from ops import cases
from ops.test_raw_targets import ANSWERS, ATTRIBUTES, GOOD as ELEMENTWISE_GOOD, ROWS as ELEMENTWISE_ROWS

from . import emulated

F32, BF16, E4M3, E5M2 = np.dtype(np.float32), oracle.BF16, oracle.E4M3.dtype, oracle.E5M2.dtype
U8 = np.dtype(np.uint8)
FLAGS = {"precise": False, "has_bias": True, "has_accumulator": True}

DEFAULTS = ATTRIBUTES | {"scaled_matmul": FLAGS}

# op -> (results, operands) of a good call, in the canonical form of common/README.md.
GOOD = ELEMENTWISE_GOOD | {
    "scaled_matmul": (
        [((2, 16, 32), F32), ((1024,), U8)],
        [((2, 16, 48), E4M3), ((2, 32, 48), E5M2), ((2,), F32), ((1,), F32), ((32,), BF16), ((2, 16, 32), F32)],
    )
}
# Operand or result of scaled_matmul that the message names, and one bad specification.
MATMUL_ROWS = [
    ("a", "operand", 0, ((2, 16, 48), BF16)),
    ("a", "operand", 0, ((16, 48), E4M3)),
    ("b", "operand", 1, ((2, 32, 48), np.int8)),
    ("b", "operand", 1, ((2, 32, 32), E5M2)),
    ("b", "operand", 1, ((1, 32, 48), E5M2)),
    ("a_scale_inv", "operand", 2, ((3,), F32)),
    ("a_scale_inv", "operand", 2, ((2,), BF16)),
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
ROWS = [*ELEMENTWISE_ROWS, *(("scaled_matmul", *row) for row in MATMUL_ROWS)]
IDS = [f"{op}-{name}-{np.dtype(spec[1]).name}{list(spec[0])}".replace(" ", "") for op, name, _, _, spec in ROWS]


@pytest.fixture(scope="module", autouse=True)
def handlers(tmp_path_factory):
    """Registers the handlers as custom calls `emulated_cuda_<op>` of the CPU."""
    if emulated.compiler() is None:
        pytest.skip("needs a C++ compiler with _Float16 to emulate the CUDA kernels")
    library = emulated.build_handlers(tmp_path_factory.mktemp("handlers"), jax.ffi.include_dir())
    for op in GOOD:
        handler = jax.ffi.pycapsule(library[cases.TARGETS.get(op, "jaxfp8_scaled_matmul_v1")])
        jax.ffi.register_ffi_target(f"emulated_cuda_{op}", handler, platform="cpu")


def call(op, results, operands, **attributes):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    operands = [np.ones(*x) if isinstance(x, tuple) else x for x in operands]
    attributes = DEFAULTS.get(op, {}) | attributes
    attributes = {name: np.bool_(v) if isinstance(v, bool) else v for name, v in attributes.items()}
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.block_until_ready(jax.ffi.ffi_call(f"emulated_cuda_{op}", shapes)(*operands, **attributes))


def assert_alive(op):
    """A good call of the op, checked: ones quantize to ones, and 48 products of ones and two ones make 50."""
    answers = ANSWERS | {"scaled_matmul": [np.float32(50)]}
    outputs = call(op, *GOOD[op])
    for out, answer in zip(outputs, answers.get(op, [np.float32(1)] * len(outputs)), strict=op != "scaled_matmul"):
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


def test_two_e5m2_are_refused():
    results, operands = GOOD["scaled_matmul"]
    operands = [((2, 16, 48), E5M2), *operands[1:]]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"scaled_matmul: b: expected dtype F8E4M3FN"):
        call("scaled_matmul", results, operands)


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


@pytest.mark.parametrize("own_scales", [False, True])
def test_matmul_arguments_arrive_in_their_places(own_scales):
    rng = np.random.default_rng(0)
    g, m, n, k = 2, 16, 32, 48
    a, b = (oracle.quantize(rng.standard_normal((g, r, k)), 8, oracle.E4M3)[0] for r in (m, n))
    a_scale, b_scale = np.float32([0.5, 2])[: 2 if own_scales else 1], np.float32([3])
    bias = rng.standard_normal(n).astype(BF16)
    accumulator = rng.standard_normal((g, m, n)).astype(F32)
    out, _ = call("scaled_matmul", GOOD["scaled_matmul"][0], [a, b, a_scale, b_scale, bias, accumulator])
    for i in range(g):
        scale = a_scale[i % a_scale.size]
        product = oracle.scaled_matmul(a[i], b[i], scale, b_scale[0], bias=bias, accumulator=accumulator[i])
        product.check(out[i])
