"""What the layers of Linen and NNX share: the product in the compute dtype, norms, and
checks of their arguments.
"""

import operator

import jax
import jax.numpy as jnp

from .. import ops
from ..recipes import QTensor
from ._fused_input import FusedInput, Normalized, normalized


def promoted(*operands):
    """Return the dtype that arrays or dtypes promote to by JAX's standard rules, also
    where promotion is strict.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*operands)


def not_wider(dtype, *operands):
    """Return `dtype`, or the dtype that the operands, arrays or dtypes, promote to
    where `dtype` is wider; `dtype` where there is no operand.
    """
    if not operands:
        return dtype
    widest = promoted(*operands)
    return dtype if promoted(widest, dtype) == widest else widest


def dtypes_of(*operands) -> list:
    """Return the dtypes of operands in high precision: of all but None, and but
    QTensors without a source.
    """
    dtypes = []
    for operand in operands:
        if isinstance(operand, QTensor):
            operand = operand.source
        if operand is not None:
            dtypes.append(operand.dtype)
    return dtypes


def compute_dtype(*arrays, dtype=None):
    """Return `dtype`, or the float dtype that the arrays promote to; a QTensor counts
    as its source, and codes alone as bfloat16.
    """
    if dtype is not None:
        return jnp.dtype(dtype)
    common = promoted(*(dtypes_of(*arrays) or [jnp.bfloat16]))
    if jnp.issubdtype(common, jnp.inexact):
        return common
    return promoted(common, jnp.float32)


def to_compute(x, dtype):
    """Convert `x` to the compute dtype, but do not widen it: the quantizer makes the
    same codes of narrow floats. A fused input stays as it is.
    """
    if isinstance(x, FusedInput):
        return x
    is_narrow = promoted(x.dtype, dtype) == dtype
    if is_narrow and jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(dtype)


def linear(layer, product, x, kernel, bias, out_sharding, activation):
    """Multiply x `[..., k]` by a kernel `[k, *features]`, both arrays or codes.

    Args:
        layer: has the fields `dtype`, see `compute_dtype`, and `precision`.
        product: the `dot_general` of the layer.
        x, kernel, bias, out_sharding, activation: as `jaxfp8.dot_general` takes them.
    """
    dtype = compute_dtype(x, kernel, bias, dtype=layer.dtype)
    x = to_compute(x, dtype)
    numbers = ((len(x.shape) - 1,), (0,)), ((), ())
    return product(
        x,
        kernel,
        numbers,
        precision=layer.precision,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
        bias=bias,
        activation=activation,
    )


def sizes(name: str, features) -> tuple[int, ...]:
    """Return one or several sizes as a tuple of ints; `name` names the argument in the
    message.
    """
    all_features = features if isinstance(features, (tuple, list)) else (features,)
    try:
        return tuple(map(operator.index, all_features))
    except TypeError:
        raise TypeError(
            f"{name}: expected an int or a tuple of ints, got {features!r}"
        ) from None


def norm_of_layer(layer, kind: str, x, scale, bias) -> Normalized:
    """Normalize the x of a layer, which has the fields `dtype` and `epsilon`, see
    `jaxfp8.normalized`; scale and bias are parameters.
    """
    x = to_compute(x, compute_dtype(x, scale, dtype=layer.dtype))
    return normalized(x, scale, bias, kind=kind, epsilon=layer.epsilon)


def gated_activation(
    layer: str, activation: str | ops.ClampedSwiGLU
) -> str | ops.ClampedSwiGLU:
    """Return the activation of gate and up together for that of a gated layer.

    Raises:
        ValueError: a gated layer cannot have the activation.
    """
    if isinstance(activation, ops.ClampedSwiGLU):
        return activation
    if activation not in ("silu", "gelu"):
        raise ValueError(
            f'{layer}: activation: expected "silu" or "gelu", got {activation!r}; or '
            "pass a jaxfp8.ops.ClampedSwiGLU"
        )
    return f"{activation}_gated"
