"""Bad arguments of the public ops: the right exception, naming the op and the argument;
differentiation raises.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import BF16, E5M2, F32

import jaxfp8
from jaxfp8 import ops

from . import cases

E4M3 = oracle.E4M3.dtype
X, S, H = np.ones((4, 6), F32), F32(1), np.ones(4, F32)
A = np.ones((4, 6), E4M3)
B = np.ones((5, 6), E5M2.dtype)
BLOCKS = np.ones((4, 64), E4M3), np.ones((6, 64), E4M3)
QUANTIZER = {"x": X, "scale": S, "dtype": E4M3}
PRODUCT = {"a": A, "b": B, "a_scale_inv": S, "b_scale_inv": S}
GOOD = {
    "amax": {"x": X},
    "quantize": QUANTIZER,
    "quantize_transpose": QUANTIZER,
    "count_saturated_and_flushed": QUANTIZER,
    "quantize_blocks": {"x": X, "dtype": E4M3, "block": (1, 32)},
    "quantize_blocks_transpose": {"x": X, "dtype": E4M3, "block": (1, 32)},
    "delayed_scales": {
        "histories": (H, H),
        "stored": (S, S),
        "fp8_max": (448.0, 448.0),
    },
    "amax_to_scale": {"amax": S, "stored": S, "fp8_max": 448.0},
    "dequantize": {"data": A, "scale_inv": S, "dtype": F32},
    "scaled_matmul": PRODUCT,
    "block_scaled_matmul": {
        "a": BLOCKS[0],
        "b": BLOCKS[1],
        "a_block": (1, 32),
        "b_block": (1, 32),
    }
    | {
        "a_scale_inv": np.ones((4, 2), F32),
        "b_scale_inv": np.ones((6, 2), F32),
    },
    "ragged_matmul": PRODUCT
    | {"b": np.ones((2, 5, 6), E5M2.dtype), "group_sizes": np.int32([2, 1])},
}
# Wrong dtype is a TypeError, wrong shape a ValueError.
WIDE = [np.ones((4, 6), dtype) for dtype in (np.float64, np.int32, E4M3)]
WIDE += ["text", jnp.float32, None]
CODES = [X, np.ones((4, 6), "float8_e4m3b11fnuz"), "text", None]
SCALE_DTYPES = [F32(1).astype(BF16), np.int32(1), True, "text", None]
SCALE_SHAPES = [np.ones(shape, F32) for shape in ((2,), (1, 1), (0,))]
NOT_FP8_DTYPES = [F32, "float8_e4m3b11fnuz", "no such dtype", None]
NOT_WIDE_DTYPES = [np.float64, E4M3, "no such dtype", None]
QUANTIZERS = ("quantize", "quantize_transpose", "count_saturated_and_flushed")
IN_BLOCKS = ("quantize_blocks", "quantize_blocks_transpose")
PRODUCTS = ("scaled_matmul", "block_scaled_matmul")
ONE_SCALE = ("scaled_matmul", "ragged_matmul")
TYPE, VALUE = TypeError, ValueError
# ops, arguments, exception, values; a dict changes several arguments.
BAD = [
    (("amax", *QUANTIZERS, *IN_BLOCKS), "x", TYPE, WIDE),
    (QUANTIZERS, "x", TYPE, [X.astype(">f4")]),
    (QUANTIZERS, "scale", TYPE, SCALE_DTYPES),
    (QUANTIZERS, "scale", VALUE, SCALE_SHAPES),
    ((*QUANTIZERS, *IN_BLOCKS), "dtype", TYPE, NOT_FP8_DTYPES),
    (QUANTIZERS[:2], "amax", TYPE, SCALE_DTYPES[:-1]),
    (QUANTIZERS[:2], "amax", VALUE, SCALE_SHAPES),
    (["quantize_transpose"], "column_sums", TYPE, [1, None, np.ones(2, bool)]),
    (["quantize_transpose"], "x", VALUE, [S, X[0]]),
    (IN_BLOCKS, "x", VALUE, [{"rows": 2}]),
    (IN_BLOCKS, "block", VALUE, [32, (1, 0), (1, 2, 3), None]),
    (IN_BLOCKS, "scale", VALUE, ["bf16"]),
    (IN_BLOCKS, "rounding", VALUE, ["floor", {"scale": "e8m0", "rounding": "up"}]),
    (IN_BLOCKS, "power_2_scale", VALUE, [{"scale": "e8m0", "power_2_scale": True}]),
    (IN_BLOCKS, "power_2_scale", TYPE, [1]),
    (["dequantize"], "data", TYPE, CODES),
    (["dequantize"], "scale_inv", TYPE, SCALE_DTYPES),
    (["dequantize"], "scale_inv", VALUE, SCALE_SHAPES),
    (["dequantize"], "dtype", TYPE, NOT_WIDE_DTYPES),
    (PRODUCTS, "a b", TYPE, CODES),
    (PRODUCTS, "a", VALUE, [A[0]]),
    (PRODUCTS, "b", VALUE, [B[0], B[:, :5], B[None]]),
    (ONE_SCALE, "a_scale_inv b_scale_inv", TYPE, SCALE_DTYPES),
    (ONE_SCALE, "a_scale_inv b_scale_inv", VALUE, SCALE_SHAPES),
    (["block_scaled_matmul"], "a_block", VALUE, [32]),
    (["block_scaled_matmul"], "a_scale_inv", TYPE, [np.ones((4, 2), BF16)]),
    (["block_scaled_matmul"], "a_scale_inv", VALUE, [np.ones((4, 3), F32)]),
    (
        ["block_scaled_matmul"],
        "b_scale_inv",
        VALUE,
        [np.ones(1, F32), {"b_block": None}],
    ),
    (["block_scaled_matmul"], "power_2_scale", TYPE, [1]),
    (PRODUCTS, "out_dtype", TYPE, NOT_WIDE_DTYPES),
    (PRODUCTS, "precise", TYPE, ["yes", 1, np.ones(2, bool)]),
    (
        PRODUCTS,
        "bias",
        TYPE,
        [np.ones(5, dtype) for dtype in (np.int32, np.float64, E4M3)],
    ),
    (PRODUCTS, "bias", VALUE, [np.ones(4, F32), np.ones((1, 5), F32), S]),
]
ROWS = [
    (op, argument, exception, values)
    for names, arguments, exception, values in BAD
    for op in names
    for argument in arguments.split()
]


@pytest.mark.parametrize(
    "op, argument, exception, values",
    ROWS,
    ids=[f"{row[0]}-{row[1]}-{row[2].__name__}" for row in ROWS],
)
def test_bad_argument_is_named(op, argument, exception, values):
    getattr(ops, op)(**GOOD[op])
    for value in values:
        with pytest.raises(exception, match=rf"{op}: {argument}\b"):
            getattr(ops, op)(
                **GOOD[op] | (value if isinstance(value, dict) else {argument: value})
            )
            pytest.fail(f"{value!r} is accepted")


@pytest.mark.parametrize("codes", [A, B], ids=["e4m3", "e5m2"])
def test_codes_are_not_to_be_cast_without_their_scale(codes):
    options = {"recipe": jaxfp8.Float8CurrentScaling()}
    for call in (
        lambda: ops.amax(codes),
        lambda: ops.quantize(codes, S, E4M3),
        lambda: jaxfp8.dot_general(codes, X.T, (((1,), (0,)), ((), ())), **options),
        lambda: jaxfp8.einsum("mk,kn->mn", codes, X.T, **options),
    ):
        with pytest.raises(
            TypeError,
            match="got float8_e.m..*codes have a scale: jaxfp8.ops.dequantize",
        ) as caught:
            call()
        assert "cast it" not in str(caught.value)


@pytest.mark.parametrize(
    "op, argument, shape",
    [
        ("amax", "x", (4, 6)),
        ("dequantize", "scale_inv", ()),
        ("scaled_matmul", "bias", 5),
    ],
)
def test_float64_arrays_are_refused_under_x64(op, argument, shape):
    with jax.enable_x64(True):
        value = jnp.ones(shape, jnp.float64)
        for run in (lambda f: f, jax.jit):
            with pytest.raises(TypeError, match=rf"{op}: {argument}\b.*float64"):
                run(lambda v: getattr(ops, op)(**GOOD[op] | {argument: v}))(value)


def test_float32_is_right_under_x64(implementation):
    """64-bit mode changes Python scalars and literals, never a code or an amax."""
    x = oracle.f32_corner_cases(6)
    with jax.enable_x64(True):
        for fmt in cases.FORMATS:
            cases.assert_quantized(
                ops.quantize(x, F32(3), fmt.dtype), x, F32(3), fmt, "x64"
            )
            codes = oracle.all_codes(fmt)
            wide = oracle.dequantize(codes, F32(3), F32)
            cases.assert_bitwise(ops.dequantize(codes, F32(3), F32), wide, "x64")
        out = ops.scaled_matmul(**PRODUCT, out_dtype=F32)
        cases.assert_bitwise(out, np.full((4, 5), 6, F32), "x64")


# An op, and an argument that is made of x `[4, 6]`. All ops have one rule.
DIFFERENTIATED = [
    ("amax", "x", lambda x: x),
    ("quantize", "scale", lambda x: x[0, 0]),
    ("delayed_scales", "histories", lambda x: (x[0], x[1])),
    ("scaled_matmul", "bias", lambda x: x[0, :5]),
]


@pytest.mark.parametrize("op, argument, part", DIFFERENTIATED)
def test_differentiating_an_op_raises(op, argument, part):
    """The derivative of a rounding is zero almost everywhere: silently wrong, so it is
    refused.
    """

    def function(x):
        leaves = jax.tree.leaves(getattr(ops, op)(**GOOD[op] | {argument: part(x)}))
        return sum(leaf.astype(jnp.float32).sum() for leaf in leaves)

    function(X)
    for transform in (
        jax.grad(function),
        jax.jit(jax.grad(function)),
        lambda x: jax.jvp(function, (x,), (x,)),
    ):
        with pytest.raises(TypeError, match="not differentiable"):
            transform(X)
