"""Dense: nn.Dense in FP8, whose kernel is quantized in `param_dtype`, without a copy in the compute dtype."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ..dot import Activated, FusedInput, Normalized, compute_dtype, sizes, to_compute
from ._dot_general import Fp8DotGeneral

_SHARED_FIELDS = ("recipe", "use_bias", "dtype", "param_dtype", "precision", "kernel_init", "bias_init")


class Dense(nn.Module):
    """A linear layer over the last dimension, in FP8: `y = x @ kernel + bias`.

        jaxfp8.linen.Dense(features, recipe=recipe, dtype=jnp.bfloat16)

    Parameters, their names and their first values are those of `nn.Dense`; state is under `Fp8DotGeneral_0`, as in
    `nn.Dense(features, dot_general_cls=Fp8DotGeneral)`. The differences to that layer:

    - The kernel goes to the quantizer in `param_dtype`. A float32 kernel is rounded once, to FP8; there is no bfloat16
      copy of it, and its gradient comes from the product in float32.
    - The kernel may be a QTensor of `jaxfp8.quantize_params`, quantized once for all microbatches.
    - The bias is added in the product, in float32, before its only rounding; the gradient of the bias is summed in
      float32, in the pass that quantizes the gradient of y.
    - x may be the result of `jaxfp8.activated` or `jaxfp8.normalized`.

    Attributes:
        features: the size of the output's last dimension, or the sizes of its last dimensions, for which the kernel is
            initialized as for one dimension.
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`, outside of it `DelayedScaling()`.
        use_bias: whether to add a bias.
        dtype: the compute dtype, in which x arrives at the quantizer and y leaves; None is the dtype that x and the
            parameters promote to.
        param_dtype: the dtype of the parameters.
        precision: as in `jaxfp8.dot_general`.
        kernel_init, bias_init: initializers of the kernel `[k, *features]` and the bias `[*features]`.
    """

    features: int | tuple[int, ...]
    recipe: Any = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(
        self,
        x: ArrayLike | Activated | Normalized,
        out_sharding: NamedSharding | PartitionSpec | None = None,
        activation: str | None = None,
    ) -> jax.Array:
        """Compute y `[..., *features]` of x `[..., k]`; `out_sharding` and `activation` as in `jaxfp8.dot_general`.

        Raises:
            ValueError: x has no dimension.
        """
        x = x if isinstance(x, FusedInput) else jnp.asarray(x)
        if not x.shape:
            raise ValueError(f"Dense: x: expected [..., k], got {x.dtype}[]")
        features = sizes("Dense: features", self.features)

        def kernel_init(key, shape, dtype):
            kernel = self.kernel_init(key, (shape[0], math.prod(shape[1:])), dtype)
            if isinstance(kernel, meta.AxisMetadata):  # the box names the dimensions of the kernel, not of the matrix
                (value,) = jax.tree.leaves(kernel)
                return kernel.replace_boxed(jnp.reshape(value, shape))
            return jnp.reshape(kernel, shape)

        # An initializer takes fan-in and fan-out from a matrix: the dimensions of features are initialized as one.
        init = self.kernel_init if len(features) == 1 else kernel_init
        kernel = self.param("kernel", init, (x.shape[-1], *features), self.param_dtype)
        bias = self.param("bias", self.bias_init, features, self.param_dtype) if self.use_bias else None
        dtype = compute_dtype(x, kernel, bias, dtype=self.dtype)
        return Fp8DotGeneral(recipe=self.recipe)(
            x if isinstance(x, FusedInput) else to_compute(x, dtype),
            kernel,
            (((len(x.shape) - 1,), (0,)), ((), ())),
            bias=bias,
            precision=self.precision,
            preferred_element_type=dtype,
            out_sharding=out_sharding,
            activation=activation,
        )


def dense_of(module: nn.Module, features: int | tuple[int, ...], name: str, **fields: Any) -> Dense:
    """Make the Dense layer `name` with the fields of a module that has Dense's fields; `fields` override them."""
    return Dense(features, name=name, **{field: getattr(module, field) for field in _SHARED_FIELDS} | fields)
