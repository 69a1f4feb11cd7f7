"""Linear: nnx.Linear whose kernel is quantized as it is stored, without a copy in the compute dtype."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ..dot import Activated, FusedInput, Normalized, compute_dtype, sizes, to_compute
from ._dot_general import Fp8DotGeneral

KERNEL_INIT = nnx.initializers.lecun_normal()
BIAS_INIT = nnx.initializers.zeros_init()
SCALE_INIT = nnx.initializers.ones_init()


class Linear(nnx.Module):
    """A linear layer over the last dimension, in FP8; parameters and arithmetic of `jaxfp8.linen.Dense`.

        jaxfp8.nnx.Linear(512, 2048, recipe=recipe, dtype=jnp.bfloat16, rngs=rngs)

    Parameters are named as those of `nnx.Linear`; state is in `dot_general`, a `jaxfp8.nnx.Fp8DotGeneral`.

    Args:
        in_features: the size of x's last dimension.
        out_features: the size of the output's last dimension, or the sizes of several dimensions, whose kernel is
            initialized as if they were one.
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`, else `jaxfp8.DelayedScaling()`.
        use_bias, dtype, param_dtype, precision, kernel_init, bias_init: as of `nnx.Linear`.
        rngs: keys, `params` among them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        recipe: Any = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        in_features = sizes("Linear: in_features", (in_features,))[0]
        features = sizes("Linear: out_features", out_features)
        kernel = kernel_init(rngs.params(), (in_features, math.prod(features)), param_dtype)
        if isinstance(kernel, nnx.VariableMetadata):  # names of all dimensions of the kernel, which it is to have
            kernel.raw_value = kernel.raw_value.reshape(in_features, *features)
        else:
            kernel = kernel.reshape(in_features, *features)
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(bias_init(rngs.params(), features, param_dtype)) if use_bias else None
        self.dot_general = Fp8DotGeneral(recipe)
        self.in_features, self.out_features = in_features, features
        self.dtype, self.precision = dtype, precision

    def __call__(
        self, x: ArrayLike | Activated | Normalized, out_sharding: NamedSharding | PartitionSpec | None = None
    ) -> jax.Array:
        """Compute y `[..., *out_features]` of x `[..., in_features]`; `out_sharding` as in `jaxfp8.dot_general`."""
        x = x if isinstance(x, FusedInput) else jnp.asarray(x)
        kernel = self.kernel.get_value()
        bias = None if self.bias is None else self.bias.get_value()
        dtype = compute_dtype(x, kernel, bias, dtype=self.dtype)
        return self.dot_general(
            x if isinstance(x, FusedInput) else to_compute(x, dtype),
            kernel,
            (((len(x.shape) - 1,), (0,)), ((), ())),
            bias=bias,
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=out_sharding,
        )
