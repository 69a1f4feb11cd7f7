"""The peers of the ops benchmark: each op in jnp, written in several ways, of which the
fastest in the run counts.

Every function has the signature of its op. Functions in `EXACT` give the bits of the op
on finite input. Functions in `INEXACT` round once more on the way, which gives other
codes near ties; some are faster, so the table shows them, but no ratio is taken to a
function with another answer.
"""

import jax
import jax.numpy as jnp
from jax import lax

F32 = jnp.float32


def _clip(y, dtype):
    top = jnp.asarray(jnp.finfo(dtype).max, y.dtype)
    return jnp.clip(y, -top, top)


def _quantize_f32_amax(x, scale, dtype):
    x = x.astype(F32)
    return _clip(x * scale, dtype).astype(dtype), jnp.max(jnp.abs(x))


def _quantize_input_amax(x, scale, dtype):
    return _clip(x.astype(F32) * scale, dtype).astype(dtype), jnp.max(
        jnp.abs(x)
    ).astype(F32)


def _quantize_minmax_amax(x, scale, dtype):
    amax = jnp.maximum(jnp.max(x), -jnp.min(x)).astype(F32)
    return _clip(x.astype(F32) * scale, dtype).astype(dtype), amax


def _quantize_barrier(x, scale, dtype):
    # Two loops instead of one: XLA vectorises the reduction only when the cast is not
    # in it.
    x, y = lax.optimization_barrier((x, x))
    return _clip(y.astype(F32) * scale, dtype).astype(dtype), jnp.max(
        jnp.abs(x)
    ).astype(F32)


def _quantize_through_f16(x, scale, dtype):
    return _clip(x.astype(F32) * scale, dtype).astype(jnp.float16).astype(
        dtype
    ), jnp.max(jnp.abs(x)).astype(F32)


def _quantize_in_input_dtype(x, scale, dtype):
    return _clip(x * scale.astype(x.dtype), dtype).astype(dtype), jnp.max(
        jnp.abs(x)
    ).astype(F32)


_QUANTIZE = {
    "clip, amax in f32": _quantize_f32_amax,
    "clip, amax in x.dtype": _quantize_input_amax,
    "clip, min and max": _quantize_minmax_amax,
    "clip, separate loops": _quantize_barrier,
}
_QUANTIZE_INEXACT = {
    "cast through f16": _quantize_through_f16,
    "scale in x.dtype": _quantize_in_input_dtype,
}


def _with_transpose(quantize):
    def run(x, scale, dtype):
        data, amax = quantize(x, scale, dtype)
        return data, data.T, amax

    return run


def _transpose_bits(quantize):
    def run(x, scale, dtype):
        data, amax = quantize(x, scale, dtype)
        return (
            data,
            lax.bitcast_convert_type(
                lax.bitcast_convert_type(data, jnp.uint8).T, dtype
            ),
            amax,
        )

    return run


def _transpose_input(quantize):
    def run(x, scale, dtype):
        x_t = lax.optimization_barrier(x.T)
        data, amax = quantize(x, scale, dtype)
        return data, quantize(x_t, scale, dtype)[0], amax

    return run


_WAYS_TO_TRANSPOSE = {
    "data.T": _with_transpose,
    "bytes.T": _transpose_bits,
    "of x.T": _transpose_input,
}


def _transposed(functions):
    return {
        f"{name}; {way}": transposed(quantize)
        for name, quantize in functions.items()
        for way, transposed in _WAYS_TO_TRANSPOSE.items()
    }


def _dequantize_f32(data, scale_inv, dtype):
    return (data.astype(F32) * scale_inv).astype(dtype)


def _dequantize_through_bf16(data, scale_inv, dtype):
    return (data.astype(jnp.bfloat16).astype(F32) * scale_inv).astype(dtype)


def _dequantize_through_f16(data, scale_inv, dtype):
    return (data.astype(jnp.float16).astype(F32) * scale_inv).astype(dtype)


def _dequantize_table(data, scale_inv, dtype):
    codes = lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), data.dtype)
    return _dequantize_f32(codes, scale_inv, dtype)[
        lax.bitcast_convert_type(data, jnp.uint8)
    ]


def _dequantize_in_out_dtype(data, scale_inv, dtype):
    return data.astype(dtype) * scale_inv.astype(dtype)


_DEQUANTIZE = {
    "astype f32": _dequantize_f32,
    "astype bf16, f32": _dequantize_through_bf16,
    "astype f16, f32": _dequantize_through_f16,
    "table of 256": _dequantize_table,
}


def _amax_f32(x):
    return jnp.max(jnp.abs(x.astype(F32)))


def _amax_input(x):
    return jnp.max(jnp.abs(x)).astype(F32)


def _amax_minmax(x):
    return jnp.maximum(jnp.max(x), -jnp.min(x)).astype(F32)


def _amax_bits(x):
    unsigned, mask = (
        (jnp.uint32, 0x7FFFFFFF) if x.dtype.itemsize == 4 else (jnp.uint16, 0x7FFF)
    )
    bits = lax.bitcast_convert_type(x, unsigned) & unsigned(mask)
    return lax.bitcast_convert_type(jnp.max(bits), x.dtype).astype(F32)


EXACT = {
    "amax": {
        "f32": _amax_f32,
        "x.dtype": _amax_input,
        "min and max": _amax_minmax,
        "integer max": _amax_bits,
    },
    "quantize": _QUANTIZE,
    "quantize_transpose": _transposed(_QUANTIZE),
    "dequantize": _DEQUANTIZE,
}
INEXACT = {
    "amax": {},
    "quantize": _QUANTIZE_INEXACT,
    "quantize_transpose": _transposed(_QUANTIZE_INEXACT),
    "dequantize": {"scale in out dtype": _dequantize_in_out_dtype},
}


def jitted(functions, *dtype):
    """Return a dict name -> jitted function of arrays; `dtype` is the op's static last
    argument, if it has one.
    """
    return {
        name: jax.jit(lambda *arrays, run=run: run(*arrays, *dtype))
        for name, run in functions.items()
    }
