"""Checks of the ops' arguments: a message names the op and the argument, what was
needed, what came and what to do.
"""

import jax.numpy as jnp
import numpy as np

from ..numerics import FP8_DTYPES

HIGH_PRECISION = tuple(np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))


def _describe(x):
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def array(op, name, x):
    """Return `x` as an array; raise a TypeError where it is not one."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        dtype, fix = getattr(x, "dtype", None), ""
        if isinstance(dtype, np.dtype) and not dtype.isnative:
            fix = (
                ", whose bytes are swapped; convert it with "
                f".astype(np.{dtype.newbyteorder('=').name})"
            )
        got = type(x).__name__ if dtype is None else f"{type(x).__name__} of {dtype}"
        raise TypeError(f"{op}: {name}: expected an array, got {got}{fix}") from error


def high_precision(op, name, x, least=0):
    """Return an array of bfloat16, float16 or float32, of rank `least` or more."""
    fix = "cast it, for example with .astype(jnp.float32)"
    # asarray would round float64 to f32 without a word: codes must come from one
    # rounding.
    if getattr(x, "dtype", None) != np.float64:
        x = array(op, name, x)
    if x.dtype in FP8_DTYPES:
        fix = (
            "codes have a scale: jaxfp8.ops.dequantize gives their values, "
            "jaxfp8.ops.scaled_matmul their product"
        )
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{op}: {name}: expected bfloat16, float16 or float32, got "
            f"{_describe(x)}; {fix}"
        )
    return rank(op, name, x, least)


def fp8(op, name, x):
    """Return an array of float8_e4m3fn or float8_e5m2."""
    x = array(op, name, x)
    if x.dtype not in FP8_DTYPES:
        raise TypeError(
            f"{op}: {name}: expected float8_e4m3fn or float8_e5m2, got "
            f"{_describe(x)}; quantize it first"
        )
    return x


def scale(op, name, x):
    """Return a scale, f32[] or f32[1], as f32[1]. Python numbers are taken as f32."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        x = jnp.float32(x)
    x = array(op, name, x)
    if x.dtype != np.float32:
        raise TypeError(
            f"{op}: {name}: expected f32[] or f32[1], got {_describe(x)}; scales are "
            "never rounded"
        )
    if x.shape not in ((), (1,)):
        raise ValueError(f"{op}: {name}: expected f32[] or f32[1], got {_describe(x)}")
    return x.reshape(1)


def flag(op, name, value):
    """Return a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: {name}: expected a bool, got {value!r}")
    return bool(value)


def one_of(op, name, value, allowed):
    """Raise a ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{op}: {name}: expected one of {allowed}, got {value!r}")


def group_sizes(op, x):
    """Return the argument `group_sizes`, int32 `[g]`."""
    x = array(op, "group_sizes", x)
    if x.dtype != jnp.int32:
        raise TypeError(
            f"{op}: group_sizes: expected int32, got {x.dtype}; cast it with "
            ".astype(jnp.int32)"
        )
    if x.ndim != 1:
        raise ValueError(
            f"{op}: group_sizes: expected one dimension, [g], got {x.shape}"
        )
    return x


def rank(op, name, x, least):
    """Return an array of rank `least` or more."""
    if x.ndim < least:
        raise ValueError(
            f"{op}: {name}: expected rank {least} or more, got {_describe(x)}"
        )
    return x


def shape(op, name, x, expected):
    """Return an array of shape `expected`."""
    if x.shape != expected:
        raise ValueError(f"{op}: {name}: expected shape {expected}, got {_describe(x)}")
    return x


def dtype(op, name, value, allowed):
    """Return a dtype out of `allowed`."""
    try:
        result = np.dtype(jnp.dtype(value))
    except TypeError as error:
        raise TypeError(f"{op}: {name}: expected a dtype, got {value!r}") from error
    if result not in allowed:
        names = ", ".join(d.name for d in allowed)
        raise TypeError(f"{op}: {name}: expected one of {names}, got {result.name}")
    return result
