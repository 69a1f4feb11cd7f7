"""NormDense: a norm and a Dense layer, in FP8, whose normalized x is stored only as codes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..dot import Normalized, compute_dtype, normalized, to_compute
from ._dense import dense_of


class NormDense(nn.Module):
    """`Dense(norm(x))` in FP8: the norm is computed in float32, in the pass that quantizes its result.

        jaxfp8.linen.NormDense((3, heads, head_dim), recipe=recipe, dtype=jnp.bfloat16)  # queries, keys and values

    The parameters of the norm are `scale` `[k]` and, with `kind="layer"`, `norm_bias` `[k]`; the `Dense` layer `dense`
    holds kernel, bias and state. The backward of the norm keeps x, and no other array of that size.

    Attributes:
        features: the size or sizes of the output, see `Dense`.
        kind: `"rms"` (nn.RMSNorm) or `"layer"` (nn.LayerNorm).
        epsilon: the number that the norm adds to the mean square, or to the variance.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: see `Dense`.
        scale_init, norm_bias_init: initializers of `scale` and `norm_bias`.

    Raises:
        ValueError: `kind` is unknown.
    """

    features: int | tuple[int, ...]
    kind: str = "rms"
    epsilon: float = 1e-6
    recipe: Any = None
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
    norm_bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: jax.typing.ArrayLike, out_sharding: jax.NamedSharding | jax.P | None = None) -> jax.Array:
        """Compute y `[..., *features]` of x `[..., k]`; `out_sharding` is that of y, as in `jaxfp8.dot_general`."""
        return dense_of(self, self.features, "dense")(normalized_by(self, "kind", x), out_sharding)


def normalized_by(module: nn.Module, field: str, x: jax.typing.ArrayLike) -> Normalized:
    """Normalize the x of a product; `module` has the fields of NormDense, and the kind in its field `field`."""
    kind = getattr(module, field)
    if kind not in ("rms", "layer"):
        raise ValueError(f'{type(module).__name__}: {field}: expected "rms" or "layer", got {kind!r}')
    x = jnp.asarray(x)
    size = x.shape[-1:]
    scale = module.param("scale", module.scale_init, size, module.param_dtype)
    bias = None
    if kind == "layer":
        bias = module.param("norm_bias", module.norm_bias_init, size, module.param_dtype)
    x = to_compute(x, compute_dtype(x, scale, dtype=module.dtype))
    return normalized(x, scale, bias, kind=kind, epsilon=module.epsilon)
