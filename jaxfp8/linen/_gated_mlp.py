"""GatedMLP: two FP8 products with a gated activation between them whose result is stored only as codes."""

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

    Gate and up projection are one product, with one state for x, one for the kernel and one for the gradient. The
    activation is computed in float32 in the pass that quantizes its result, and the backward keeps the activation's
    input. Two `Dense` layers, `wi` with a kernel `[k, 2, hidden_features]`, gate first, and `wo`
    `[hidden_features, features]`, hold parameters and state. With `norm`, x is normalized in the pass that quantizes
    it, as in `NormDense`; the parameters of the norm, `scale` `[k]` and, for `"layer"`, `norm_bias` `[k]`, belong to
    the GatedMLP itself.

    Attributes:
        hidden_features: the size between the products.
        features: the size of the output's last dimension; None is the size of the last dimension of x.
        activation: the activation of the gate, `"silu"` (SwiGLU) or `"gelu"` (GEGLU, the tanh form).
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: see `Dense`; they hold for both layers.
            A `kernel_init` of `nn.with_partitioning` names the mesh axes of `[k, hidden_features]`; the dimension of 2
            in the kernel of `wi` gets no axis.
        norm: the norm of x, `"rms"` (nn.RMSNorm) or `"layer"` (nn.LayerNorm); None for no norm.
        epsilon, scale_init, norm_bias_init: fields of the norm, see `NormDense`.

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
        """Compute y `[..., features]` of x `[..., k]`; `out_sharding` is that of y, as in `jaxfp8.dot_general`."""
        if self.activation not in ("silu", "gelu"):
            raise ValueError(f'GatedMLP: activation: expected "silu" or "gelu", got {self.activation!r}')
        x = jnp.asarray(x) if self.norm is None else normalized_by(self, "norm", x)
        init = {"kernel_init": _with_gate(self.kernel_init, 1), "bias_init": _with_gate(self.bias_init, 0)}
        wi = dense_of(self, (2, *sizes("GatedMLP: hidden_features", self.hidden_features)), "wi", **init)
        hidden = wi(x, activation=f"{self.activation}_gated")
        return dense_of(self, x.shape[-1] if self.features is None else self.features, "wo")(hidden, out_sharding)


def _with_gate(init, axis: int):
    """Return `init` for arrays with a gate dimension at `axis`; a box with mesh axis names gets None for it."""

    def with_gate(key, shape, dtype):
        value = init(key, shape, dtype)
        return value.add_axis(axis, {meta.PARTITION_NAME: None}) if isinstance(value, meta.AxisMetadata) else value

    return with_gate
