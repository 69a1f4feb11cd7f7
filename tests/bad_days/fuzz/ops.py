"""The Python ops with random arguments: the answer of the oracle, or an error that names the op."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jaxfp8 import ops

from . import values
from .values import FORMAT_OF, FP8, HIGH

F32 = np.dtype(np.float32)
IMPLEMENTATIONS = ("ffi", "reference")
# What people pass by mistake.
ODD = (None, "x", 3, 2.5, True, [1, 2], (), object(), np.float64(2), jnp.float32, {"a": 1})


def _pick(rng, options):
    return options[rng.integers(len(options))]


def _operand(rng, shape, dtypes):
    """An array of one of the dtypes; sometimes of another, or something else."""
    chance = rng.random()
    if chance < 0.05:
        return _pick(rng, ODD)
    return values.array(rng, shape, _pick(rng, values.DTYPES if chance < 0.15 else dtypes))


def _scale(rng):
    chance = rng.random()
    if chance < 0.05:
        return _pick(rng, ODD)
    if chance < 0.15:
        return values.array(rng, values.dims(rng, int(rng.integers(0, 3)), 8), _pick(rng, values.DTYPES))
    return values.scales(rng, () if rng.random() < 0.5 else (1,))


def _dtype(rng, dtypes):
    chance = rng.random()
    if chance < 0.1:
        return _pick(rng, (np.dtype(np.int8), "no such dtype", None, 7, *values.DTYPES))
    return _pick(rng, dtypes)


def _shape(rng, rank=None):
    return values.dims(rng, int(rng.integers(0, 6)) if rank is None else rank, 2**12)


def _scale_of(scale):
    """f32 as the op takes it; None where it must refuse."""
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):  # np.float64 is a Python float
        return np.float32(scale)
    is_good = isinstance(scale, np.ndarray) and scale.dtype == np.float32 and scale.shape in ((), (1,))
    return scale.reshape(()) if is_good else None


def _number(x, dtypes):
    """An operand as an array; None where it must be refused. A Python float and an empty sequence are f32 to JAX."""
    if F32 in dtypes and ((isinstance(x, float) and not isinstance(x, np.generic)) or isinstance(x, tuple)):
        return np.asarray(x, np.float32)
    return x if isinstance(x, np.ndarray) and x.dtype in dtypes else None


def _format(dtype):
    return FORMAT_OF.get(dtype) if isinstance(dtype, np.dtype) else None


# Each gives (call, answer): answer is a function of the results that raises, or None where the call must be refused.


def amax(rng):
    x = _operand(rng, _shape(rng), HIGH)
    good = _number(x, HIGH)
    check = None if good is None else lambda got: oracle.assert_bitwise(got, oracle.amax(good), "amax")
    return lambda: ops.amax(x), check


def quantize(rng, op="quantize", least_rank=0, shape=_shape):
    x, scale, dtype = _operand(rng, shape(rng), HIGH), _scale(rng), _dtype(rng, FP8)
    good, factor, fmt = _number(x, HIGH), _scale_of(scale), _format(dtype)

    def check(got):
        codes, top = oracle.quantize(good, factor, fmt)
        oracle.assert_bitwise(got[0], codes, "codes")
        oracle.assert_bitwise(got[-1], top, "amax")
        if len(got) == 3:
            oracle.assert_bitwise(got[1], np.ascontiguousarray(codes.swapaxes(-1, -2)), "transposed")

    is_good = good is not None and factor is not None and fmt is not None and good.ndim >= least_rank
    return lambda: getattr(ops, op)(x, scale, dtype), check if is_good else None


def quantize_transpose(rng):
    return quantize(rng, "quantize_transpose", 2, lambda rng: _shape(rng, int(rng.integers(0, 4))))


def dequantize(rng):
    data, scale, dtype = _operand(rng, _shape(rng), FP8), _scale(rng), _dtype(rng, HIGH)
    good, factor = _number(data, FP8), _scale_of(scale)

    def check(got):
        oracle.assert_bitwise(got, oracle.dequantize(good, factor, dtype), "values")

    is_good = good is not None and factor is not None and isinstance(dtype, np.dtype) and dtype in HIGH
    return lambda: ops.dequantize(data, scale, dtype), check if is_good else None


def scaled_matmul(rng):
    m, n, k = (int(rng.integers(0, 40)) for _ in range(3))
    a, b = _operand(rng, (m, k), FP8), _operand(rng, (n, k + int(rng.random() < 0.1)), FP8)
    a_inv, b_inv, dtype = _scale(rng), _scale(rng), _dtype(rng, HIGH)
    good = _number(a, FP8) is not None and _number(b, FP8) is not None and a.shape[1] == b.shape[1]
    factors = _scale_of(a_inv), _scale_of(b_inv)
    good &= None not in factors and isinstance(dtype, np.dtype) and dtype in HIGH

    def check(got):
        assert got.shape == (m, n) and got.dtype == dtype, f"{got.dtype}{got.shape}"
        with np.errstate(all="ignore"):
            inverse = np.float32(factors[0] * factors[1])
        # Beyond, a product of scales, or of sums with it, leaves f32, which the bound does not know.
        if np.isfinite(inverse) and 2.0**-60 < abs(inverse) < 2.0**60:
            oracle.scaled_matmul(a, b, *factors, out_dtype=dtype).check(got, "product")

    return lambda: ops.scaled_matmul(a, b, a_inv, b_inv, out_dtype=dtype), check if good else None


CALLS = {f.__name__: f for f in (amax, quantize, quantize_transpose, dequantize, scaled_matmul)}


def check(seed: int) -> str:
    """Runs one random call: "right" or "refused".

    Raises:
        AssertionError: the answer is wrong, a bad call is accepted, a good one refused, or the error does not name
            the op.
    """
    rng = np.random.default_rng(seed)
    op, implementation = _pick(rng, sorted(CALLS)), _pick(rng, IMPLEMENTATIONS)
    call, answer = CALLS[op](rng)
    what = f"{op} with {implementation}"
    with ops.implementation(implementation):
        try:
            got = jax.block_until_ready(call())
        except (TypeError, ValueError) as error:
            assert answer is None, f"{what}: a good call is refused: {error}"
            assert f"{op}:" in str(error), (
                f"{what}: an error that does not name the op: {type(error).__name__}: {error}"
            )
            return "refused"
    assert answer is not None, f"{what}: a bad call is accepted"
    try:
        answer(got)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    return "right"
