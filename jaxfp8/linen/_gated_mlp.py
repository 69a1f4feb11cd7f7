"""GatedMLP: two FP8 products with a gated activation between them that is never in memory."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ..dot import sizes
from ._dense import dense_of
from ._norm_dense import normalized_by


class GatedMLP(nn.Module):
    """The gated feed-forward block of a transformer, in FP8: `(activation(x @ wi[:, 0]) * (x @ wi[:, 1])) @ wo`.

        jaxfp8.linen.GatedMLP(hidden_features=14336, recipe=recipe, dtype=jnp.bfloat16)  # SwiGLU

    Gate and up projection are one product, with one scale for x, one for the kernel and one for the gradient. The
    activation is computed in float32 on the way to FP8, and for its gradient its input is kept. Two `Dense` layers,
    `wi` with a kernel `[k, 2, hidden_features]`, gate first, and `wo` `[hidden_features, features]`, hold parameters
    and state. With `norm` the x of gate and up is normalized on the way to FP8, as in `NormDense`; the parameters of
    the norm, `scale` `[k]` and, for `"layer"`, `norm_bias` `[k]`, are the block's.

    Attributes:
        hidden_features: the size between the products.
        features: the size of the output's last dimension; None is the size of x's.
        activation: `"silu"` (SwiGLU) or `"gelu"` (GEGLU, the tanh form), of the gate.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: as of `Dense`, for both. Names of mesh
            axes, as `nn.with_partitioning` gives them, are those of `[k, hidden_features]`: the gate has none.
        norm: `"rms"` (nn.RMSNorm) or `"layer"` (nn.LayerNorm) of x; or None.
        epsilon, scale_init, norm_bias_init: of the norm, as of `NormDense`.

    Raises:
        ValueError: `activation` or `norm` is unknown.
    """

    hidden_features: int
    features: int | None = None
    activation: str = "silu"
    recipe: Any = None
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    norm: str | None = None
    epsilon: float = 1e-6
    scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
    norm_bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: ArrayLike, out_sharding: NamedSharding | PartitionSpec | None = None) -> jax.Array:
        """Compute y `[..., features]` of x `[..., k]`; `out_sharding` of y as in `jaxfp8.dot_general`."""
        if self.activation not in ("silu", "gelu"):
            raise ValueError(f'GatedMLP: activation: expected "silu" or "gelu", got {self.activation!r}')
        x = jnp.asarray(x) if self.norm is None else normalized_by(self, "norm", x)
        init = {"kernel_init": _with_gate(self.kernel_init, 1), "bias_init": _with_gate(self.bias_init, 0)}
        wi = dense_of(self, (2, *sizes("GatedMLP: hidden_features", self.hidden_features)), "wi", **init)
        hidden = wi(x, activation=f"{self.activation}_gated")
        return dense_of(self, x.shape[-1] if self.features is None else self.features, "wo")(hidden, out_sharding)


def _with_gate(init, axis: int):
    """Return an initializer whose names of mesh axes, if it has any, have room for the dimension of the gate."""

    def with_gate(key, shape, dtype):
        value = init(key, shape, dtype)
        return value.add_axis(axis, {meta.PARTITION_NAME: None}) if isinstance(value, meta.AxisMetadata) else value

    return with_gate
