"""GatedMLP and NormDense: layers whose inner values become FP8 in the pass that computes them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ..dot import activated, compute_dtype, normalized, to_compute
from ._linear import BIAS_INIT, KERNEL_INIT, SCALE_INIT, Linear


class GatedMLP(nnx.Module):
    """The gated feed-forward block of a transformer, in FP8; parameters and arithmetic of `jaxfp8.linen.GatedMLP`.

        jaxfp8.nnx.GatedMLP(4096, 14336, recipe=recipe, dtype=jnp.bfloat16, rngs=rngs)  # SwiGLU

    Two `Linear` layers, `wi` with a kernel `[in_features, 2, hidden_features]`, gate first, and `wo`.

    Args:
        in_features, hidden_features, out_features: the sizes; without `out_features` that of x.
        activation: `"silu"` (SwiGLU) or `"gelu"` (GEGLU, the tanh form), of the gate.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: as of `Linear`, for both. Names of mesh
            axes, as `nnx.with_partitioning` gives them, are those of `[in_features, hidden_features]`.
        rngs: keys, `params` among them.

    Raises:
        ValueError: `activation` is unknown.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "silu",
        recipe: Any = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        if activation not in ("silu", "gelu"):
            raise ValueError(f'GatedMLP: activation: expected "silu" or "gelu", got {activation!r}')
        self.activation = activation
        options = {
            "recipe": recipe,
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        init = {"kernel_init": _with_gate(kernel_init, 1), "bias_init": _with_gate(bias_init, 0)}
        self.wi = Linear(in_features, (2, hidden_features), **options | init)
        self.wo = Linear(hidden_features, in_features if out_features is None else out_features, **options)

    def __call__(self, x: ArrayLike, out_sharding: NamedSharding | PartitionSpec | None = None) -> jax.Array:
        """Compute y `[..., out_features]` of x `[..., in_features]`; `out_sharding` as in `jaxfp8.dot_general`."""
        return self.wo(activated(self.wi(x), f"{self.activation}_gated"), out_sharding)


def _with_gate(init, axis: int):
    """Return an initializer whose names of mesh axes, if it has any, have room for the dimension of the gate."""

    def with_gate(key, shape, dtype):
        value = init(key, shape, dtype)
        if isinstance(value, nnx.VariableMetadata) and value.metadata.get("out_sharding"):
            names = tuple(value.metadata["out_sharding"])
            value.metadata = {**value.metadata, "out_sharding": (*names[:axis], None, *names[axis:])}
        return value

    return with_gate


class NormDense(nnx.Module):
    """`Linear(norm(x))` in FP8; parameters and arithmetic of `jaxfp8.linen.NormDense`.

        jaxfp8.nnx.NormDense(4096, (3, 32, 128), recipe=recipe, dtype=jnp.bfloat16, rngs=rngs)

    Parameters: `scale` and, with `kind="layer"`, `norm_bias`; the `Linear` layer `dense` holds the others.

    Args:
        in_features, out_features: as of `Linear`.
        kind: `"rms"` (nnx.RMSNorm) or `"layer"` (nnx.LayerNorm).
        epsilon: of the norm.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: as of `Linear`.
        scale_init, norm_bias_init: initializers.
        rngs: keys, `params` among them.

    Raises:
        ValueError: `kind` is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        kind: str = "rms",
        epsilon: float = 1e-6,
        recipe: Any = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        scale_init: Initializer = SCALE_INIT,
        norm_bias_init: Initializer = BIAS_INIT,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        if kind not in ("rms", "layer"):
            raise ValueError(f'NormDense: kind: expected "rms" or "layer", got {kind!r}')
        self.kind, self.epsilon, self.dtype = kind, epsilon, dtype
        self.scale = nnx.Param(scale_init(rngs.params(), (in_features,), param_dtype))
        has_bias = kind == "layer"  # NNX wants the attribute assigned once
        self.norm_bias = nnx.Param(norm_bias_init(rngs.params(), (in_features,), param_dtype)) if has_bias else None
        self.dense = Linear(
            in_features,
            out_features,
            recipe=recipe,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )

    def __call__(self, x: ArrayLike, out_sharding: NamedSharding | PartitionSpec | None = None) -> jax.Array:
        """Compute y `[..., *out_features]` of x `[..., in_features]`; `out_sharding` as in `jaxfp8.dot_general`."""
        x, scale = jnp.asarray(x), self.scale.get_value()
        norm_bias = None if self.norm_bias is None else self.norm_bias.get_value()
        x = to_compute(x, compute_dtype(x, scale, dtype=self.dtype))
        return self.dense(normalized(x, scale, norm_bias, kind=self.kind, epsilon=self.epsilon), out_sharding)
