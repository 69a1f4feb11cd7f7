"""Dense: nn.Dense whose kernel is quantized as it is stored, without a copy in the compute dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype

from ..tensor import QTensor
from ._dot_general import Fp8DotGeneral


class Dense(nn.Module):
    """A linear layer over the last dimension, in FP8: `y = x @ kernel + bias`.

        jaxfp8.linen.Dense(features, recipe=recipe, dtype=jnp.bfloat16)

    Parameters, their names and their first values are those of `nn.Dense`; state is under `Fp8DotGeneral_0`, as in
    `nn.Dense(features, dot_general_cls=Fp8DotGeneral)`. The differences to that:

    - The kernel goes to the quantizer in `param_dtype`. A float32 kernel is rounded once, to FP8; there is no bfloat16
      copy of it, and its gradient comes from the product in float32.
    - The kernel may be a QTensor of `jaxfp8.quantize_params`, quantized once for all microbatches.
    - The bias is added in float32 and the sum rounded to the compute dtype; its gradient is summed in float32.

    Attributes:
        features: the size of the output's last dimension.
        recipe: how operands become FP8; without one `DelayedScaling()`.
        use_bias: whether to add a bias.
        dtype: the compute dtype, in which x arrives at the quantizer and y leaves; without one, what x and the
            parameters promote to.
        param_dtype: the dtype of the parameters.
        precision: as in `jaxfp8.dot_general`.
        kernel_init, bias_init: initializers.
    """

    features: int
    recipe: Any = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x):
        """`x` `[..., k]` to y `[..., features]`."""
        kernel = self.param("kernel", self.kernel_init, (jnp.shape(x)[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        with jax.numpy_dtype_promotion("standard"):
            stored = kernel.source if isinstance(kernel, QTensor) else kernel
            dtype = canonicalize_dtype(x, stored, bias, dtype=self.dtype)
            x = _to_compute(jnp.asarray(x), dtype)
        y = Fp8DotGeneral(recipe=self.recipe)(
            x,
            kernel,
            (((x.ndim - 1,), (0,)), ((), ())),
            precision=self.precision,
            preferred_element_type=dtype,
        )
        if bias is None:
            return y
        bias = bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
        return (y.astype(jnp.float32) + bias).astype(dtype)


def _to_compute(x, dtype):
    """`x` in the compute dtype, but not widened: the quantizer reads narrow floats as they are, to the same codes."""
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.promote_types(x.dtype, dtype) == dtype:
        return x
    return x.astype(dtype)
