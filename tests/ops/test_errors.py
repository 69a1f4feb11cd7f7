"""Bad arguments of the ops: the right exception, naming the op and the argument; differentiation raises."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

X = np.ones((4, 6), np.float32)
A, B = np.ones((4, 6), oracle.E4M3.dtype), np.ones((5, 6), oracle.E5M2.dtype)
S, H = np.float32(1), np.ones(4, np.float32)
E4M3 = oracle.E4M3.dtype
F8_OTHER = np.ones((4, 6), "float8_e4m3b11fnuz")

NOT_HIGH_PRECISION = {
    "f64": np.ones((4, 6), np.float64),
    "i32": np.ones((4, 6), np.int32),
    "u8": np.ones((4, 6), np.uint8),
    "bool": np.ones((4, 6), bool),
    "c64": np.ones((4, 6), np.complex64),
    "e4m3": A,
    "e5m2": A.astype(oracle.E5M2.dtype),
    "text": "text",
    "none": None,
}
NOT_FP8 = {
    "f32": X,
    "f64": np.ones((4, 6), np.float64),
    "bf16": X.astype(oracle.BF16),
    "i8": np.ones((4, 6), np.int8),
    "u8": np.ones((4, 6), np.uint8),
    "bool": np.ones((4, 6), bool),
    "other fp8": F8_OTHER,
    "none": None,
}
# Wrong dtype is a TypeError, wrong shape a ValueError.
SCALES_OF_WRONG_DTYPE = {
    "bf16": np.ones((), oracle.BF16),
    "f16": np.float16(1),
    "i32": np.int32(1),
    "c64": np.complex64(1),
    "e4m3": np.ones((), E4M3),
    "none": None,
}
SCALES_OF_WRONG_SHAPE = {
    "f32[2]": np.ones(2, np.float32),
    "f32[1,1]": np.ones((1, 1), np.float32),
    "f32[0]": np.ones(0, np.float32),
}
NOT_FP8_DTYPES = {"f32": np.float32, "i8": np.int8, "other fp8": "float8_e4m3b11fnuz", "text": "no such dtype"}
NOT_HIGH_PRECISION_DTYPES = {"f64": np.float64, "i32": np.int32, "e4m3": E4M3, "text": "no such dtype"}


def quantize(x=X, scale=S, dtype=E4M3, **options):
    return ops.quantize(x, scale, dtype, **options)


def quantize_transpose(x=X, scale=S, dtype=E4M3, **options):
    return ops.quantize_transpose(x, scale, dtype, **options)


def count_saturated_and_flushed(x=X, scale=S, dtype=E4M3):
    return ops.count_saturated_and_flushed(x, scale, dtype)


def delayed_scales(histories=(H, H), stored=(S, S), fp8_max=(448.0, 448.0), **options):
    return ops.delayed_scales(histories, stored, fp8_max=fp8_max, **options)


def push_amaxes(histories=(H, H), amaxes=(S, S)):
    return ops.push_amaxes(histories, amaxes)


def amax_to_scale(amax=S, stored=S):
    return ops.amax_to_scale(amax, stored, fp8_max=448.0)


def dequantize(data=A, scale_inv=S, dtype=np.float32):
    return ops.dequantize(data, scale_inv, dtype)


def scaled_matmul(a=A, b=B, a_scale_inv=S, b_scale_inv=S, **options):
    return ops.scaled_matmul(a, b, a_scale_inv, b_scale_inv, **options)


def _table():
    """(op, argument, label, value, exception) for every bad argument of every op."""

    def rows(op, argument, values, exception):
        return [(op, argument, label, value, exception) for label, value in values.items()]

    table = rows(ops.amax, "x", NOT_HIGH_PRECISION, TypeError)
    for op in (quantize, quantize_transpose, count_saturated_and_flushed):
        table += rows(op, "x", NOT_HIGH_PRECISION, TypeError)
        table += rows(op, "scale", SCALES_OF_WRONG_DTYPE, TypeError)
        table += rows(op, "scale", SCALES_OF_WRONG_SHAPE, ValueError)
        table += rows(op, "dtype", NOT_FP8_DTYPES, TypeError)
    for op in (quantize, quantize_transpose):
        table += rows(op, "amax", {k: v for k, v in SCALES_OF_WRONG_DTYPE.items() if v is not None}, TypeError)
        table += rows(op, "amax", SCALES_OF_WRONG_SHAPE, ValueError)
    table += rows(quantize_transpose, "column_sums", {"int": 1, "none": None, "array": np.ones(2, bool)}, TypeError)
    ranks = {"rank 0": S, "rank 1": X[0]}
    table += rows(quantize_transpose, "x", ranks, ValueError)
    bad_histories = {"bf16": (H, H.astype(oracle.BF16)), "i32": (H, np.ones(4, np.int32)), "none": (H, None)}
    counts = {"none at all": (), "17": (H,) * 17, "other shape": (H, H[None]), "no slot": (H, H[:0]), "scalar": (H, S)}
    for op, argument in ((delayed_scales, "stored"), (push_amaxes, "amaxes")):
        table += rows(op, "histories", bad_histories, TypeError)
        table += rows(op, "histories", counts, ValueError)
        table += rows(op, argument, {k: (S, v) for k, v in SCALES_OF_WRONG_DTYPE.items()}, TypeError)
        table += rows(op, argument, {k: (S, v) for k, v in SCALES_OF_WRONG_SHAPE.items()}, ValueError)
        table += rows(op, argument, {"one": (S,), "three": (S,) * 3}, ValueError)
    table += rows(delayed_scales, "fp8_max", {"one": (448.0,), "three": (448.0,) * 3}, ValueError)
    table += rows(delayed_scales, "algo", {"text": "mean", "function": max, "none": None}, ValueError)
    for argument in ("amax", "stored"):
        table += rows(amax_to_scale, argument, SCALES_OF_WRONG_DTYPE, TypeError)
        table += rows(amax_to_scale, argument, SCALES_OF_WRONG_SHAPE, ValueError)
    table += rows(dequantize, "data", NOT_FP8, TypeError)
    table += rows(dequantize, "scale_inv", SCALES_OF_WRONG_DTYPE, TypeError)
    table += rows(dequantize, "scale_inv", SCALES_OF_WRONG_SHAPE, ValueError)
    table += rows(dequantize, "dtype", NOT_HIGH_PRECISION_DTYPES, TypeError)
    for argument in ("a", "b"):
        table += rows(scaled_matmul, argument, NOT_FP8, TypeError)
        table += rows(scaled_matmul, argument, {"rank 1": A[0]}, ValueError)
    table += rows(scaled_matmul, "b", {"other k": B[:, :5], "rank 3 beside rank 2": B[None]}, ValueError)
    for argument in ("a_scale_inv", "b_scale_inv"):
        table += rows(scaled_matmul, argument, SCALES_OF_WRONG_DTYPE, TypeError)
        table += rows(scaled_matmul, argument, SCALES_OF_WRONG_SHAPE, ValueError)
    table += rows(scaled_matmul, "out_dtype", NOT_HIGH_PRECISION_DTYPES, TypeError)
    bad_bias = {"i32": np.ones(5, np.int32), "f64": np.ones(5, np.float64), "e4m3": np.ones(5, E4M3)}
    table += rows(scaled_matmul, "bias", bad_bias, TypeError)
    bad_bias = {"[m]": np.ones(4, np.float32), "[1, n]": np.ones((1, 5), np.float32), "[]": S}
    table += rows(scaled_matmul, "bias", bad_bias, ValueError)
    bad_sum = {"bf16": np.ones((4, 5), oracle.BF16), "i32": np.ones((4, 5), np.int32)}
    table += rows(scaled_matmul, "accumulator", bad_sum, TypeError)
    bad_sum = {"[n, m]": np.ones((5, 4), np.float32), "[n]": np.ones(5, np.float32)}
    table += rows(scaled_matmul, "accumulator", bad_sum, ValueError)
    table += rows(scaled_matmul, "precise", {"text": "yes", "int": 1, "array": np.ones(2, bool)}, TypeError)
    return table


BAD = _table()


@pytest.mark.parametrize(
    "op, argument, label, value, exception", BAD, ids=[f"{op.__name__}-{name}-{label}" for op, name, label, *_ in BAD]
)
def test_bad_argument_is_named(op, argument, label, value, exception):
    with pytest.raises(exception, match=rf"{op.__name__}: {argument}\b"):
        op(**{argument: value})


OPS = [quantize, quantize_transpose, delayed_scales, push_amaxes, dequantize, scaled_matmul]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_the_defaults_above_are_good(op):
    """Otherwise the table would test the wrong argument."""
    assert all(jnp.isfinite(out.astype(jnp.float32)).all() for out in jax.tree.leaves(op()))


def test_tracers_are_checked_like_arrays():
    jax.jit(quantize)(X, S)
    with pytest.raises(TypeError, match=r"quantize: x\b.*int32"):
        jax.jit(quantize)(np.ones(3, np.int32))
    with pytest.raises(ValueError, match=r"quantize: scale\b"):
        jax.jit(quantize)(X, np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"scaled_matmul: b\b"):
        jax.eval_shape(scaled_matmul, A, B[:, :5])


FLOAT64 = [
    (ops.amax, "x", (4, 6)),
    (quantize, "x", (4, 6)),
    (quantize, "scale", ()),
    (quantize_transpose, "x", (4, 6)),
    (quantize_transpose, "scale", (1,)),
    (dequantize, "scale_inv", ()),
    (scaled_matmul, "a_scale_inv", ()),
    (scaled_matmul, "b_scale_inv", (1,)),
    (scaled_matmul, "bias", (5,)),
    (scaled_matmul, "accumulator", (4, 5)),
]


@pytest.mark.parametrize("op, argument, shape", FLOAT64, ids=[f"{op.__name__}-{name}" for op, name, _ in FLOAT64])
def test_float64_arrays_are_refused_under_x64(op, argument, shape):
    with jax.enable_x64(True):
        value = jnp.ones(shape, jnp.float64)
        for run in (lambda v: op(**{argument: v}), jax.jit(lambda v: op(**{argument: v}))):
            with pytest.raises(TypeError, match=rf"{op.__name__}: {argument}\b.*float64"):
                run(value)


def test_float32_is_right_under_x64(implementation):
    """64-bit mode changes Python scalars and literals, never a code or an amax."""
    x = oracle.f32_corner_cases(6)
    with jax.enable_x64(True):
        for fmt in cases.FORMATS:
            cases.assert_quantized(ops.quantize(x, np.float32(3), cases.dtype_of(fmt)), x, np.float32(3), fmt, "x64")
            codes = oracle.all_codes(fmt)
            wide = oracle.dequantize(codes, np.float32(3), np.float32)
            cases.assert_bitwise(ops.dequantize(codes, np.float32(3), np.float32), wide, "x64")
        out = scaled_matmul(out_dtype=np.float32)
        cases.assert_bitwise(out, np.full((4, 5), 6, np.float32), "x64")


REVERSE = {
    "amax": lambda x: ops.amax(x),
    "quantize": lambda x: jnp.sum(quantize(x)[0].astype(jnp.float32)),
    "quantize's amax": lambda x: quantize(x)[1],
    "quantize's scale": lambda x: jnp.sum(quantize(X, x[0, 0])[0].astype(jnp.float32)),
    "quantize_transpose": lambda x: jnp.sum(quantize_transpose(x)[1].astype(jnp.float32)),
    "quantize's amax so far": lambda x: quantize(amax=x[0, 0])[1],
    "delayed_scales": lambda x: jnp.sum(delayed_scales((x[0], x[1]))[0].scale),
    "push_amaxes": lambda x: jnp.sum(push_amaxes((x[0], x[1]))[0]),
    "dequantize's scale_inv": lambda x: jnp.sum(dequantize(A, x[0, 0])),
    "scaled_matmul's a_scale_inv": lambda x: jnp.sum(scaled_matmul(a_scale_inv=x[0, 0], out_dtype=jnp.float32)),
    "scaled_matmul's bias": lambda x: jnp.sum(scaled_matmul(bias=x[0, :5], out_dtype=jnp.float32)),
    "scaled_matmul's accumulator": lambda x: jnp.sum(scaled_matmul(accumulator=x[:4, :5], out_dtype=jnp.float32)),
}


@pytest.mark.parametrize("function", REVERSE.values(), ids=REVERSE)
def test_differentiating_an_op_raises(implementation, function):
    """The derivative of a rounding is zero almost everywhere: silently wrong, so it is refused."""
    assert jnp.isfinite(function(X))
    for transform in (jax.grad(function), jax.jit(jax.grad(function)), lambda x: jax.jvp(function, (x,), (x,))):
        with pytest.raises(TypeError, match="not differentiable"):
            transform(X)
