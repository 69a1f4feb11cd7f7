"""Linear, whose kernel is quantized in `param_dtype`; GatedMLP, NormDense and Experts,
which keep inner values as codes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import ArrayLike

from ..collectives import dropped_rows, experts_over
from ..dot import (
    Activated,
    FusedInput,
    Normalized,
    columns,
    dense_layers,
    gated_activation,
    gated_layers,
    linear,
    mixture,
    norm_of_layer,
    sizes,
)
from ..ops import ClampedSwiGLU, check_activation
from ._dot_general import Fp8DotGeneral, Fp8RaggedDot

_KERNEL_INIT = nnx.initializers.lecun_normal()
_EXPERTS_INIT = nnx.initializers.lecun_normal(batch_axis=(0,))
_BIAS_INIT = nnx.initializers.zeros_init()
_SCALE_INIT = nnx.initializers.ones_init()


class Linear(nnx.LinearGeneral):
    """A linear layer over the last dimension, in FP8; parameters and arithmetic of
    `jaxfp8.linen.Dense`.

        jaxfp8.nnx.Linear(512, 2048, recipe=recipe, dtype=jnp.bfloat16, rngs=rngs)

    Parameters are named as those of `nnx.Linear`; state is in `dot_general`, a
    `jaxfp8.nnx.Fp8DotGeneral`.

    Args:
        in_features: the size of the last dimension of x.
        out_features: the size of the output's last dimension, or the sizes of its last
            dimensions, for which the kernel is initialized as for one dimension.
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`,
            outside of it `jaxfp8.DelayedScaling()`.
        use_bias, dtype, param_dtype, precision, kernel_init, bias_init: see
            `nnx.Linear`.
        rngs: keys; the stream `params` initializes kernel and bias.
    """

    of = staticmethod(dense_layers)

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
        kernel_init: Initializer = _KERNEL_INIT,
        bias_init: Initializer = _BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            sizes("Linear: out_features", out_features),
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            precision=precision,
            dot_general=Fp8DotGeneral(recipe),
            rngs=rngs,
        )

    def __call__(
        self,
        x: ArrayLike | Activated | Normalized,
        out_sharding: jax.NamedSharding | jax.P | None = None,
        activation: str | ClampedSwiGLU | None = None,
    ) -> jax.Array:
        """Compute y `[..., *out_features]` of x `[..., in_features]`; other arguments
        as in `jaxfp8.dot_general`.
        """
        x = x if isinstance(x, FusedInput) else jnp.asarray(x)
        kernel, bias = self.kernel.get_value(), _value(self.bias)
        product = self.dot_general
        return linear(self, product, x, kernel, bias, out_sharding, activation)


def _value(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter.get_value()


def _norm_parameters(kind, size, param_dtype, scale_init, norm_bias_init, rngs):
    """Make scale and bias `[size]` of a norm; None for those that the kind lacks."""
    norm = nnx.LayerNorm(
        size,
        param_dtype=param_dtype,
        use_bias=kind == "layer",
        use_scale=kind is not None,
        bias_init=norm_bias_init,
        scale_init=scale_init,
        rngs=rngs,
    )
    return norm.scale, norm.bias


def _normalized(layer: nnx.Module, kind: str | None, x: ArrayLike):
    """Return the input of the first product of a layer with the parameters of a norm:
    x `[..., in_features]`, normalized where there is a kind.
    """
    x = jnp.asarray(x)
    if kind is None:
        return x
    return norm_of_layer(layer, kind, x, _value(layer.scale), _value(layer.norm_bias))


class GatedMLP(nnx.Module):
    """The gated feed-forward block of a transformer, in FP8; parameters and arithmetic
    of `jaxfp8.linen.GatedMLP`.

        # SwiGLU
        jaxfp8.nnx.GatedMLP(4096, 14336, recipe=recipe, dtype=jnp.bfloat16, rngs=rngs)

    Two `Linear` layers, `wi` with a kernel `[in_features, 2, hidden_features]`, gate
    first, and `wo` `[hidden_features, out_features]`, hold parameters and state. A
    layer with a norm also has the parameter `scale` `[in_features]` and, for `"layer"`,
    `norm_bias` `[in_features]`.

    Args:
        in_features, hidden_features, out_features: the sizes of x, of the activation
            and of y; `out_features=None` is `in_features`.
        activation, norm, epsilon, scale_init, norm_bias_init: the fields of
            `jaxfp8.linen.GatedMLP`.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: the
            fields of `jaxfp8.linen.GatedMLP`.
        rngs: keys; the stream `params` initializes the parameters.

    Raises:
        ValueError: `activation` or `norm` is unknown.
    """

    of = staticmethod(gated_layers)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str | ClampedSwiGLU = "silu",
        norm: str | None = None,
        epsilon: float = 1e-6,
        scale_init: Initializer = _SCALE_INIT,
        norm_bias_init: Initializer = _BIAS_INIT,
        recipe: Any = None,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = _KERNEL_INIT,
        bias_init: Initializer = _BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        gated_activation("GatedMLP", activation)
        self.activation, self.norm = activation, norm
        self.epsilon, self.dtype = epsilon, dtype
        self.scale, self.norm_bias = _norm_parameters(
            norm, in_features, param_dtype, scale_init, norm_bias_init, rngs
        )
        linear_layer = functools.partial(
            Linear,
            recipe=recipe,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        self.wi = linear_layer(
            in_features,
            (2, hidden_features),
            kernel_init=_with_gate(kernel_init, 1),
            bias_init=_with_gate(bias_init, 0),
        )
        self.wo = linear_layer(
            hidden_features,
            in_features if out_features is None else out_features,
            kernel_init=kernel_init,
            bias_init=bias_init,
        )

    def __call__(
        self, x: ArrayLike, out_sharding: jax.NamedSharding | jax.P | None = None
    ) -> jax.Array:
        """Compute y `[..., out_features]` of x `[..., in_features]`; `out_sharding` as
        in `jaxfp8.dot_general`.
        """
        activation = gated_activation("GatedMLP", self.activation)
        h = self.wi(_normalized(self, self.norm, x), activation=activation)
        return self.wo(h, out_sharding)


def _with_gate(init, axis: int):
    """Return `init` for arrays with a gate dimension at `axis`; a box with mesh axis
    names gets None for it.
    """

    def with_gate(key, shape, dtype):
        value = init(key, shape, dtype)
        metadata = getattr(value, "metadata", {})
        if names := metadata.get("out_sharding"):
            names = (*names[:axis], None, *names[axis:])
            value.metadata = {**metadata, "out_sharding": names}
        return value

    return with_gate


class NormDense(nnx.Module):
    """`Linear(norm(x))` in FP8; parameters and arithmetic of `jaxfp8.linen.NormDense`.

        jaxfp8.nnx.NormDense(
            4096, (3, 32, 128), recipe=recipe, dtype=jnp.bfloat16, rngs=rngs
        )

    The parameters of the norm are `scale` `[in_features]` and, with `kind="layer"`,
    `norm_bias` `[in_features]`; the `Linear` layer `dense` holds kernel, bias and
    state.

    Args:
        in_features, out_features, rngs: see `Linear`.
        kind, epsilon, scale_init, norm_bias_init: the fields of
            `jaxfp8.linen.NormDense`.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: see
            `Linear`.

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
        scale_init: Initializer = _SCALE_INIT,
        norm_bias_init: Initializer = _BIAS_INIT,
        kernel_init: Initializer = _KERNEL_INIT,
        bias_init: Initializer = _BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        self.kind, self.epsilon, self.dtype = kind, epsilon, dtype
        self.scale, self.norm_bias = _norm_parameters(
            kind, in_features, param_dtype, scale_init, norm_bias_init, rngs
        )
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

    def __call__(
        self, x: ArrayLike, out_sharding: jax.NamedSharding | jax.P | None = None
    ) -> jax.Array:
        """Compute y `[..., *out_features]` of x `[..., in_features]`; `out_sharding` as
        in `jaxfp8.dot_general`.
        """
        return self.dense(_normalized(self, self.kind, x), out_sharding)


class Experts(nnx.Module):
    """The experts of a mixture, in FP8; parameters and arithmetic of
    `jaxfp8.linen.Experts`.

        experts = jaxfp8.nnx.Experts(64, 2048, 1408, recipe=recipe, rngs=rngs)
        y = experts(x, expert, weights)

    The parameters are `wi/kernel` `[count, in_features, hidden_features]` and
    `wo/kernel` `[count, hidden_features, in_features]`. With a gated activation
    `wi/kernel` has `2 * hidden_features` columns, first those of the gate. State is in
    `wi/ragged_dot` and `wo/ragged_dot`, a `jaxfp8.nnx.Fp8RaggedDot` each.

    Args:
        count: the number of experts.
        in_features, hidden_features: the sizes of x, and between the products.
        activation, recipe, dtype, param_dtype, kernel_init, expert_axis, capacity: the
            fields of `jaxfp8.linen.Experts`. With `expert_axis` make the layer outside
            of the `shard_map`.
        rngs: keys; the stream `params` initializes the kernels.

    Raises:
        ValueError: `activation` is unknown; when called, `expert_axis` does not fit the
            mesh, or `capacity` is below 1.
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        hidden_features: int,
        *,
        activation: str | ClampedSwiGLU = "silu_gated",
        recipe: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = _EXPERTS_INIT,
        expert_axis: str | None = None,
        capacity: int | None = None,
        rngs: nnx.Rngs,
    ):
        check_activation("Experts", activation)
        self.count, self.activation, self.dtype = count, activation, dtype
        self.expert_axis, self.capacity = expert_axis, capacity

        def product(in_features, out_features):
            shape = count, in_features, out_features
            return RaggedLinear(
                shape, recipe, dtype, kernel_init(rngs.params(), shape, param_dtype)
            )

        self.wi = product(in_features, columns(hidden_features, activation))
        self.wo = product(hidden_features, in_features)

    def __call__(
        self, x: ArrayLike, expert: ArrayLike, weights: ArrayLike
    ) -> jax.Array:
        """Compute y of the shape of x `[..., in_features]`; `expert` and `weights`
        `[..., chosen]`, errors and the result are those of `jaxfp8.linen.Experts`.
        """
        _, route = experts_over(self)
        return mixture(self, x, expert, weights, self.wi, self.wo, route)

    def dropped_rows(self, expert: jax.Array) -> jax.Array:
        """Count the rows that `capacity` leaves out; see `jaxfp8.linen.Experts`."""
        return dropped_rows(self, expert)


class RaggedLinear(nnx.Module):
    """A product of `Experts`: its kernel `[count, in_features, out_features]`, and the
    `Fp8RaggedDot` that multiplies by it.
    """

    def __init__(
        self, shape: tuple[int, int, int], recipe: Any, dtype: Any, kernel: jax.Array
    ):
        self.kernel = nnx.Param(kernel)
        self.ragged_dot = Fp8RaggedDot(recipe)
        self.kernel_shape, self.dtype = shape, dtype

    def __call__(
        self, x: ArrayLike | FusedInput, group_sizes: jax.Array, by: Any
    ) -> jax.Array:
        kernel = self.kernel.get_value()
        return self.ragged_dot(x, kernel, group_sizes, self.dtype, by)
