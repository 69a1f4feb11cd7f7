"""FP8 formats, and the codec in jnp: encode and decode FP8 by integer arithmetic.

The results are right on every platform, whatever its casts and flush-to-zero modes do.
XLA's casts to FP8 go through float16 on some platforms (two roundings), and XLA's CPU
threads read and write subnormal floats as zero.
"""

import enum

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _tpu
from ._scaling import from_bits, to_bits

_ABS_MASK = 0x7FFFFFFF
_INF_BITS = 0x7F800000
_MIN_NORMAL_BITS = 0x00800000
_QUIET_NAN_BITS = 0x7FC00000
_SIGN_BIT = -0x80000000


_E4M3_DTYPE = np.dtype(jnp.float8_e4m3fn)
_E5M2_DTYPE = np.dtype(jnp.float8_e5m2)
FP8_DTYPES = (_E4M3_DTYPE, _E5M2_DTYPE)


class Format(enum.Enum):
    """An FP8 format, or a pair of them.

    Attributes:
        name: the name of the format in TransformerEngine.
        dtype: the FP8 dtype of the operands `x` and `kernel`.
        backward_dtype: the FP8 dtype of `grad`, the gradient of the output.

    | format | `x` and `kernel` | `grad` |
    |---|---|---|
    | `Format.E4M3` | float8_e4m3fn: 3 bits of fraction, largest value 448 | the same |
    | `Format.E5M2` | float8_e5m2: 2 bits of fraction, largest value 57344 | the same |
    | `Format.HYBRID` | float8_e4m3fn | float8_e5m2: gradients span a wider range |

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """

    E4M3 = _E4M3_DTYPE, _E4M3_DTYPE
    E5M2 = _E5M2_DTYPE, _E5M2_DTYPE
    HYBRID = _E4M3_DTYPE, _E5M2_DTYPE

    def __init__(self, dtype: np.dtype, backward_dtype: np.dtype) -> None:
        self.dtype = dtype
        self.backward_dtype = backward_dtype

    @property
    def max(self) -> float:
        """Return the largest finite value of `dtype`: 448 for float8_e4m3fn, 57344 for
        float8_e5m2.
        """
        return fp8_max(self.dtype)

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


E4M3, E5M2, HYBRID = Format


def fp8_max(dtype):
    """Return the largest finite value of an FP8 dtype."""
    return float(jnp.finfo(dtype).max)


# The codec ----------------------------------------------------------------------------


def _normalize(magnitude_bits):
    """Return `(m, e)` with `|v| == m * 2**e`, where m is not subnormal, so that
    flush-to-zero does not change it.

    A subnormal v is an integer below 2**23 times 2**-149. m is that integer times
    2**-64, so that a product with any other m overflows only where the true product
    does.
    """
    is_subnormal = magnitude_bits < _MIN_NORMAL_BITS
    integer = magnitude_bits.astype(jnp.float32) * jnp.float32(2.0**-64)
    # int32, also with `jax_enable_x64`
    exponent = jnp.where(is_subnormal, jnp.int32(-85), jnp.int32(0))
    return jnp.where(is_subnormal, integer, from_bits(magnitude_bits)), exponent


def _round_shift(x, shift):
    """Round `x / 2**shift` to the nearest integer, ties to even, for 0 <= x < 2**30 and
    0 <= shift <= 31.
    """
    rest = x & ((1 << shift) - 1)
    half = jnp.where(shift > 0, 1 << (shift - 1), 1)
    quotient = x >> shift
    return quotient + ((rest > half) | ((rest == half) & (quotient & 1 == 1))).astype(
        jnp.int32
    )


def _abs_product(x_bits, scale_bits):
    """Compute `|x * scale|` in f32; the platform may flush a subnormal result to 0."""
    x_magnitude, x_exponent = _normalize(x_bits & _ABS_MASK)
    scale_magnitude, scale_exponent = _normalize(scale_bits & _ABS_MASK)
    x_power, scale_power = (
        from_bits((127 + exponent) << 23) for exponent in (x_exponent, scale_exponent)
    )
    return x_magnitude * scale_magnitude * x_power * scale_power


def is_saturated_or_flushed(x, scale, dtype):
    """Return `(saturated, flushed)`, bool arrays of the shape of x.

    An element is saturated where `|x * scale|` is above the largest number of `dtype`,
    and flushed where x is not zero and the code of `x * scale` is. NaN is neither.
    """
    info = jnp.finfo(dtype)
    x_bits = to_bits(x.astype(jnp.float32))
    product = _abs_product(x_bits, to_bits(scale))
    # Half of the smallest subnormal number is a tie, which rounds to 0, the even
    # neighbour. NaN compares as false.
    is_small = product <= jnp.float32(float(info.smallest_subnormal) / 2)
    return product > jnp.float32(info.max), is_small & (x_bits & _ABS_MASK != 0)


def encode(x, scale, dtype):
    """Compute the FP8 codes of `x * scale`; NaN, without sign, where the product is NaN
    or x is Inf.
    """
    if _tpu.is_target():
        return _tpu.encode(x, scale, dtype)
    info = jnp.finfo(dtype)

    # 1. Multiply in f32. The codes of values that are not finite are NaN.
    x_bits, scale_bits = to_bits(x.astype(jnp.float32)), to_bits(scale)
    product = _abs_product(x_bits, scale_bits)
    is_nan = jnp.isnan(product) | (x_bits & _ABS_MASK >= _INF_BITS)

    # 2. Saturate, and round to the format.
    code = rounded(jnp.minimum(product, jnp.float32(info.max)), dtype)

    # 3. Put the sign on, and the NaNs in.
    code = code | jnp.where((x_bits < 0) ^ (scale_bits < 0), 0x80, 0)
    nan_code = 0x7F if info.nmant == 3 else 0x7E
    return lax.bitcast_convert_type(
        jnp.where(is_nan, nan_code, code).astype(jnp.uint8), dtype
    )


def rounded(magnitude, dtype):
    """Return the code, int32, of the number of `dtype` that is nearest to a magnitude;
    ties to even.

    The magnitude is f32, from 0 to the largest number of `dtype`.
    """
    info, bits = jnp.finfo(dtype), to_bits(magnitude)
    shift = 23 - info.nmant
    # between the exponent biases of f32 and the format
    bias_shift = 126 + int(info.minexp)
    # Normal codes: round the float's bits to nearest even, then move the exponent's
    # bias.
    odd = (bits >> shift) & 1
    normal = ((bits + ((1 << (shift - 1)) - 1) + odd) >> shift) - (
        bias_shift << info.nmant
    )
    # Subnormal codes: one ulp of `magic` is the smallest subnormal, so the addition
    # rounds to a multiple of it.
    magic = jnp.float32(float(info.smallest_subnormal) * 2.0**23)
    subnormal = to_bits(magnitude + magic) - to_bits(magic)
    return jnp.where(magnitude < jnp.float32(info.smallest_normal), subnormal, normal)


def decode(data, scale_inv, dtype):
    """Compute `data * scale_inv`, rounded once to f32 and once to `dtype`; NaN is the
    quiet NaN without sign.
    """
    if _tpu.is_target():
        return _tpu.decode(data, scale_inv, dtype)
    # 1. Multiply in f32, which is exact but for one rounding; a cast from FP8 is exact.
    value_bits, scale_bits = to_bits(data.astype(jnp.float32)), to_bits(scale_inv)
    product = _abs_product(value_bits, scale_bits)
    is_nan, bits = jnp.isnan(product), to_bits(product)

    # 2. Platforms may flush results around the smallest normal float. Compute those as
    #    integers: the exact product (4
    # by 24 significant bits), rounded to a multiple of 2**-149. Up to 2**-125 that
    # integer is also the float's bits.
    scale_magnitude, scale_exponent = _normalize(scale_bits & _ABS_MASK)
    significand = ((value_bits & 0x007FFFFF) | _MIN_NORMAL_BITS) >> 20
    significand = significand * (
        (to_bits(scale_magnitude) & 0x007FFFFF) | _MIN_NORMAL_BITS
    )
    shift = (
        131
        - ((value_bits & _ABS_MASK) >> 23)
        - ((to_bits(scale_magnitude) >> 23) + scale_exponent)
    )
    multiple = _round_shift(significand, jnp.clip(shift, 0, 31))
    is_zero = (value_bits & _ABS_MASK == 0) | (scale_bits & _ABS_MASK == 0)
    is_tiny = (shift >= 0) & (multiple <= 2 * _MIN_NORMAL_BITS)
    bits = jnp.where(is_zero, 0, jnp.where(is_tiny, multiple, bits))

    # 3. Put the sign on and the NaNs in, and round to the dtype.
    bits = bits | jnp.where((value_bits < 0) ^ (scale_bits < 0), _SIGN_BIT, 0)
    bits = jnp.where(is_nan, _QUIET_NAN_BITS, bits)
    if dtype == jnp.bfloat16:
        odd = (bits >> 16) & 1
        rounded = jnp.where(is_nan, _QUIET_NAN_BITS, bits + 0x7FFF + odd) >> 16
        return rounded.astype(jnp.int16).view(dtype)
    return from_bits(bits).astype(dtype)
