"""quantize_pair: two matrices, such as the kernels of gate and up, quantized side by
side.
"""

import jax.numpy as jnp

from . import _checks
from ._primitive import dims
from ._quantize_transpose import Producer


def quantize_pair(x, second, scale, dtype, *, amax=None, with_amax=True):
    """Quantize `jnp.stack([x, second], -2)` in both layouts, with one read of `x` and
    `second`.

    Equivalent to `quantize_transpose(jnp.stack([x, second], -2), scale, dtype,
    cols=2)`; on a GPU nothing copies the matrices to stack them.

    Args:
        x, second: bfloat16, float16 or float32 `[..., m, n]`, both of one dtype.
        scale, dtype, amax, with_amax: see `quantize`.

    Returns:
        `(data, data_t, amax)`: data `[..., m, 2, n]` and data_t `[..., 2, n, m]` of
        `dtype`; amax as from `quantize`.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; or the op is
            differentiated.
        ValueError: scale or amax has another shape.
    """
    x = _checks.high_precision("quantize_pair", "x", x)
    return _QuantizePair.quantize(
        x, scale, (second,), amax, dtype, with_amax=with_amax, cols=2
    )


class _QuantizePair(Producer):
    name = "quantize_pair"

    def columns(self):
        return dims("whole_pair", 1) + dims("col", 1)

    def operand_parts(self, row, col):
        return [(row, col[1:])] * 2

    def sizes(self, *shapes):
        return {"whole_pair0": 2}

    def produce(self, x, second):
        return jnp.stack([x, second], -2)
