"""Dense, whose kernel is quantized in `param_dtype`; NormDense, GatedMLP and Experts,
which keep inner values as codes.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec
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


class _DenseFields(nn.Module, kw_only=True):
    """The fields that `Dense` shares with the layers that are made of it."""

    recipe: Any = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()


class Dense(_DenseFields):
    """A linear layer over the last dimension, in FP8: `y = x @ kernel + bias`.

        jaxfp8.linen.Dense(features, recipe=recipe, dtype=jnp.bfloat16)

    Parameters, their names and their first values are those of `nn.Dense`; state is
    under `Fp8DotGeneral_0`, as in `nn.Dense(features, dot_general_cls=Fp8DotGeneral)`.
    The differences to that layer:

    - The kernel goes to the quantizer in `param_dtype`. A float32 kernel is rounded
      once, to FP8; there is no bfloat16 copy of it, and its gradient comes from the
      product in float32, or in the `wgrad_dtype` of the recipe.
    - The kernel may be a QTensor of `jaxfp8.quantize_params`, quantized once for all
      microbatches.
    - The bias is added in the product, in float32, before its only rounding; the
      gradient of the bias is summed in float32, in the pass that quantizes the gradient
      of y.
    - x may be the result of `jaxfp8.activated` or `jaxfp8.normalized`.

    Attributes:
        features: the size of the output's last dimension, or the sizes of its last
            dimensions, for which the kernel is initialized as for one dimension.
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`,
            outside of it `DelayedScaling()`.
        use_bias: whether to add a bias.
        dtype: the compute dtype, in which x arrives at the quantizer and y leaves; None
            is the dtype that x and the parameters promote to.
        param_dtype: the dtype of the parameters.
        precision: as in `jaxfp8.dot_general`.
        kernel_init, bias_init: initializers of the kernel `[k, *features]` and the bias
            `[*features]`.
    """

    of = staticmethod(dense_layers)

    features: int | tuple[int, ...]
    use_bias: bool = dataclasses.field(default=True, kw_only=True)

    @nn.compact
    def __call__(
        self,
        x: ArrayLike | Activated | Normalized,
        out_sharding: NamedSharding | PartitionSpec | None = None,
        activation: str | ClampedSwiGLU | None = None,
    ) -> jax.Array:
        """Compute y `[..., *features]` of x `[..., k]`; `out_sharding` and `activation`
        as in `jaxfp8.dot_general`.

        Raises:
            ValueError: x has no dimension.
        """
        x = x if isinstance(x, FusedInput) else jnp.asarray(x)
        if not x.shape:
            raise ValueError(f"Dense: x: expected [..., k], got {x.dtype}[]")
        features = sizes("Dense: features", self.features)

        # An initializer takes fan-in and fan-out from a matrix: the dimensions of
        # features are initialized as one.
        def kernel_init(key, shape, dtype):
            matrix = self.kernel_init(key, (shape[0], math.prod(shape[1:])), dtype)
            # a box around it names the dimensions of the kernel, not of the matrix
            return jax.tree.map(lambda value: jnp.reshape(value, shape), matrix)

        shape = (x.shape[-1], *features)
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, features, self.param_dtype)
        product = Fp8DotGeneral(recipe=self.recipe)
        return linear(self, product, x, kernel, bias, out_sharding, activation)


def _dense(
    module: "_NormFields",
    features: int | tuple[int, ...],
    kernel_init: Any,
    bias_init: Any,
    name: str,
) -> Dense:
    """Make the Dense layer `name` of a module."""
    return Dense(
        features,
        recipe=module.recipe,
        use_bias=module.use_bias,
        dtype=module.dtype,
        param_dtype=module.param_dtype,
        precision=module.precision,
        kernel_init=kernel_init,
        bias_init=bias_init,
        name=name,
    )


class _NormFields(_DenseFields, kw_only=True):
    """The fields that NormDense and GatedMLP share."""

    use_bias: bool = False
    epsilon: float = 1e-6
    scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
    norm_bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()


class NormDense(_NormFields):
    """`Dense(norm(x))` in FP8: the norm is computed in float32, in the pass that
    quantizes its result.

        # queries, keys and values
        jaxfp8.linen.NormDense((3, heads, head_dim), recipe=recipe, dtype=jnp.bfloat16)

    The parameters of the norm are `scale` `[k]` and, with `kind="layer"`, `norm_bias`
    `[k]`; the `Dense` layer `dense` holds kernel, bias and state. The backward of the
    norm keeps x, and no other array of that size.

    Attributes:
        features: the size or sizes of the output, see `Dense`.
        kind: `"rms"` (nn.RMSNorm) or `"layer"` (nn.LayerNorm).
        epsilon: the number that the norm adds to the mean square, or to the variance.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: see
            `Dense`.
        scale_init, norm_bias_init: initializers of `scale` and `norm_bias`.

    Raises:
        ValueError: `kind` is unknown.
    """

    features: int | tuple[int, ...]
    kind: str = "rms"

    @nn.compact
    def __call__(
        self, x: ArrayLike, out_sharding: NamedSharding | PartitionSpec | None = None
    ) -> jax.Array:
        """Compute y `[..., *features]` of x `[..., k]`; `out_sharding` is that of y, as
        in `jaxfp8.dot_general`.
        """
        dense = _dense(self, self.features, self.kernel_init, self.bias_init, "dense")
        return dense(_normalized_by(self, self.kind, x), out_sharding)


def _normalized_by(module: _NormFields, kind: str, x: ArrayLike) -> Normalized:
    """Normalize the x of a product by parameters of a module."""
    x = jnp.asarray(x)
    size = x.shape[-1:]
    scale = module.param("scale", module.scale_init, size, module.param_dtype)
    bias = None
    if kind == "layer":
        bias = module.param(
            "norm_bias", module.norm_bias_init, size, module.param_dtype
        )
    return norm_of_layer(module, kind, x, scale, bias)


class GatedMLP(_NormFields):
    """The gated feed-forward block of a transformer, in FP8:
    `(activation(x @ wi[:, 0]) * (x @ wi[:, 1])) @ wo`.

        # SwiGLU
        jaxfp8.linen.GatedMLP(hidden_features=14336, recipe=recipe, dtype=jnp.bfloat16)

    Gate and up projection are one product, with one state for x, one for the kernel and
    one for the gradient. The activation is computed in float32 in the pass that
    quantizes its result, and the backward keeps the activation's input. Two `Dense`
    layers, `wi` with a kernel `[k, 2, hidden_features]`, gate first, and `wo`
    `[hidden_features, features]`, hold parameters and state. With `norm`, x is
    normalized in the pass that quantizes it, as in `NormDense`; the parameters of the
    norm, `scale` `[k]` and, for `"layer"`, `norm_bias` `[k]`, belong to the GatedMLP
    itself.

    Attributes:
        hidden_features: the size between the products.
        features: the size of the output's last dimension; None is the size of the last
            dimension of x.
        activation: the activation of the gate, `"silu"` (SwiGLU) or `"gelu"` (GEGLU,
            the tanh form); or a `jaxfp8.ops.ClampedSwiGLU`, of gate and up.
        recipe, use_bias, dtype, param_dtype, precision, kernel_init, bias_init: see
            `Dense`; they hold for both layers. A `kernel_init` of
            `nn.with_partitioning` names the mesh axes of `[k, hidden_features]`; the
            dimension of 2 in the kernel of `wi` gets no axis.
        norm: the norm of x, `"rms"` (nn.RMSNorm) or `"layer"` (nn.LayerNorm); None for
            no norm.
        epsilon, scale_init, norm_bias_init: fields of the norm, see `NormDense`.

    Raises:
        ValueError: `activation` or `norm` is unknown.
    """

    of = staticmethod(gated_layers)

    hidden_features: int
    features: int | None = None
    activation: str | ClampedSwiGLU = "silu"
    norm: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(
        self, x: ArrayLike, out_sharding: NamedSharding | PartitionSpec | None = None
    ) -> jax.Array:
        """Compute y `[..., features]` of x `[..., k]`; `out_sharding` is that of y, as
        in `jaxfp8.dot_general`.
        """
        activation = gated_activation("GatedMLP", self.activation)
        x = jnp.asarray(x) if self.norm is None else _normalized_by(self, self.norm, x)
        features = x.shape[-1] if self.features is None else self.features
        inits = _with_gate(self.kernel_init, 1), _with_gate(self.bias_init, 0)
        wi = _dense(self, (2, self.hidden_features), *inits, "wi")
        wo = _dense(self, features, self.kernel_init, self.bias_init, "wo")
        return wo(wi(x, activation=activation), out_sharding)


def _with_gate(init, axis: int):
    """Return `init` for arrays with a gate dimension at `axis`; a box with mesh axis
    names gets None for it.
    """

    def with_gate(key, shape, dtype):
        value = init(key, shape, dtype)
        return meta.add_axis(value, axis, {meta.PARTITION_NAME: None})

    return with_gate


class Experts(nn.Module):
    """The experts of a mixture, in FP8: each token goes to the experts that a router
    chose for it, and gets the weighted sum of their results.

        experts = jaxfp8.linen.Experts(count=64, hidden_features=1408, recipe=recipe)
        y = experts(x, expert, weights)

    Expert e computes `activation(x @ wi[e]) @ wo[e]`. The rows of all experts are
    sorted on the device, without capacity or padding, and no token is dropped. All
    experts are one `jaxfp8.ragged_dot` for `wi` and one for `wo`, each with one state;
    the activation is computed in float32 in the pass that quantizes its result. The
    router belongs to the caller.

    The parameters are `wi/kernel` `[count, k, hidden_features]` and `wo/kernel`
    `[count, hidden_features, k]`. With a gated activation `wi/kernel` has
    `2 * hidden_features` columns, first those of the gate. State is in
    `wi/Fp8RaggedDot_0` and `wo/Fp8RaggedDot_0`.

    With `expert_axis`, inside a `shard_map`, the experts lie on the devices of a mesh
    axis. Cut both kernels by `PartitionSpec(expert_axis)` and the tokens over the
    devices, and copy the state. `init` runs outside. If the `kernel_init` is that of
    `nn.with_partitioning`, `nn.get_partition_spec` gives the specs; unbox the variables
    with `nn.meta.unbox`.

    What crosses devices: rows go to their experts as the codes that `wi` multiplies.
    Results come back in the compute dtype. The gradients of results go as the codes of
    `output_grad` of `wo`, and those of rows come back as codes with the scale of their
    own amax. With one scale a tensor results and state are those of one device; the
    gradient of x is rounded to FP8 once more. Outside of a `shard_map` over the axis
    the layer has all experts.

    By default no row is dropped: a device has room for all rows of every device, and
    sends and multiplies `devices * tokens * chosen` rows, most of them zeros. With
    `capacity` it sends at most that many rows to each device; further rows, those of
    the last experts and tokens, have no expert, and `dropped_rows` counts them.

    Attributes:
        count: the number of experts.
        hidden_features: the size between the products.
        activation: one that `jaxfp8.activated` takes; `"silu_gated"` is SwiGLU.
        recipe, dtype, param_dtype: see `Dense`; they hold for both products. In high
            precision both are `jax.lax.ragged_dot`.
        kernel_init: initializer of both kernels, whose first dimension counts experts.
        expert_axis: a mesh axis of the `shard_map` around the call; None keeps all
            experts on each device.
        capacity: how many rows a device sends to each device of `expert_axis` at most;
            None is all of its rows.

    Raises:
        ValueError: `activation` is unknown; `capacity` is below 1; the mesh has no axis
            `expert_axis`, or its size does not divide `count`; or `init` runs inside
            the `shard_map`.
    """

    count: int
    hidden_features: int
    activation: str | ClampedSwiGLU = "silu_gated"
    recipe: Any = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal(
        batch_axis=(0,)
    )
    expert_axis: str | None = None
    capacity: int | None = None

    @nn.compact
    def __call__(
        self, x: ArrayLike, expert: ArrayLike, weights: ArrayLike
    ) -> jax.Array:
        """Compute y of the shape of x: the sum of `weights` times the results of the
        experts.

        Args:
            x: the tokens `[..., k]`.
            expert: integers `[..., chosen]`, the experts of each token. A number that
                no expert has, such as -1, chooses none: it adds nothing, and neither an
                amax nor a gradient sees its row.
            weights: bfloat16, float16 or float32 `[..., chosen]`. They multiply the
                results, and the sum is taken, in float32.

        Returns:
            An array of the compute dtype.

        Raises:
            TypeError: `expert` is not of integers, or `weights` not of floats.
            ValueError: the shapes do not fit.
        """
        check_activation("Experts", self.activation)
        x = jnp.asarray(x)
        count, route = experts_over(self)
        if count < self.count and self.is_initializing():
            raise ValueError(
                "Experts: init: expected a call outside of shard_map, which makes the "
                f"kernels of all {self.count} experts, got one inside, where each "
                "device would draw the same; cut the kernels by "
                f"in_specs=PartitionSpec({self.expert_axis!r})"
            )
        product = functools.partial(
            RaggedDense,
            count,
            recipe=self.recipe,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
        )
        wi = product(columns(self.hidden_features, self.activation), name="wi")
        wo = product(x.shape[-1] if x.shape else 0, name="wo")
        return mixture(self, x, expert, weights, wi, wo, route)

    @nn.nowrap
    def dropped_rows(self, expert: jax.Array) -> jax.Array:
        """Count the rows of this device that `capacity` leaves out, int32[], for the
        `expert` of a call.
        """
        return dropped_rows(self, expert)


class RaggedDense(nn.Module):
    """A product of `Experts`: `features` columns of a kernel for each of `count`
    experts.
    """

    count: int
    features: int
    recipe: Any
    dtype: Any
    param_dtype: Any
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x, group_sizes, by) -> jax.Array:
        shape = (self.count, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        product = Fp8RaggedDot(recipe=self.recipe)
        return product(x, kernel, group_sizes, self.dtype, by)
