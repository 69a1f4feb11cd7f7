"""What the Experts of Linen and NNX share: tokens become rows in the order of their
experts, and the rows of a token become its result.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..ops import ClampedSwiGLU, _checks, is_gated
from ._compute_dtype import compute_dtype, to_compute
from ._fused_input import activated
from ._ragged_dot import ragged_product


def columns(hidden_features: int, activation: str | ClampedSwiGLU) -> int:
    """Return the columns of an expert's first kernel: gate and up side by side where
    the activation is gated.
    """
    return hidden_features * (1 + is_gated(activation))


class Route:
    """The way of rows to their experts and back, where a device has all experts: the
    rows of an expert lie next to each other, those of no expert last.

    Both ways the rows of no expert are zeros, and so are their gradients: the products
    need not set them to zero.

    Attributes:
        group_sizes: int32 `[count]`, the rows of each expert of this device.
        first, second: functions like `ragged_dot` for the two products of an expert.
        dropped: how many rows have found no place.
    """

    first = second = staticmethod(
        functools.partial(ragged_product, has_zeros_beyond=True)
    )
    dropped = 0

    def __init__(self, expert: jax.Array, count: int):
        self._is_expert = is_expert(expert, count)
        self._to, self._back, self.group_sizes = sorted_by_expert(expert, count)

    def placed(self, rows: jax.Array) -> jax.Array:
        """Return rows, in the order of `expert`, as the first product takes them."""
        return taken(self._of_experts(rows), self._to, self._back)

    def restored(self, rows: jax.Array) -> jax.Array:
        """Return results of the second product in the order of `expert`."""
        return self._of_experts(taken(rows, self._back, self._to))

    def _of_experts(self, rows):
        return jnp.where(self._is_expert[:, None], rows, 0)


def mixture(
    layer,
    x: ArrayLike,
    expert: ArrayLike,
    weights: ArrayLike,
    wi: Callable[..., jax.Array],
    wo: Callable[..., jax.Array],
    route: Callable[[jax.Array, int], Route],
) -> jax.Array:
    """Add up the weighted results of the experts of each token; see `linen.Experts`.

    Args:
        layer: an `Experts` of Linen or NNX, with its fields.
        x, expert, weights: the arguments of the layer.
        wi, wo: the products of the layer, `(rows, group_sizes, by) -> rows`, where `by`
            is a function like `ragged_dot`.
        route: `(expert [m], count) -> Route`.
    """
    x, expert, weights = _checked(x, expert, weights)
    leading, chosen = x.shape[:-1], expert.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    x = to_compute(x, compute_dtype(x, dtype=layer.dtype))
    # 1. Bring each row to its expert.
    way = route(expert.reshape(-1), layer.count)
    rows = way.placed(jnp.repeat(x, chosen, axis=0))
    # 2. Multiply, with the activation on its way to FP8.
    hidden = wi(rows, way.group_sizes, way.first)
    if is_gated(layer.activation):
        hidden = hidden.reshape(hidden.shape[0], 2, hidden.shape[1] // 2)
    rows = wo(activated(hidden, layer.activation), way.group_sizes, way.second)
    # 3. Put the rows back, and add up those of a token in float32.
    y = way.restored(rows).reshape(*leading, chosen, rows.shape[-1])
    weighted = y.astype(jnp.float32) * weights.astype(jnp.float32)[..., None]
    return jnp.sum(weighted, axis=-2).astype(y.dtype)


def is_expert(expert: jax.Array, count: int) -> jax.Array:
    """Tell which of these are experts, out of `count`."""
    return (expert >= 0) & (expert < count)


def sorted_by_expert(
    expert: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the order that sorts rows by their expert, and the rows of each expert;
    rows of no expert come last.

    Returns:
        `(to, back, sizes)`: int32 `[m]`, which row comes at each place; int32 `[m]`,
        the place of each row; int32 `[count]`.
    """
    last = jnp.where(is_expert(expert, count), expert, count).astype(jnp.int32)
    to = jnp.argsort(last, stable=True).astype(jnp.int32)
    places = jnp.arange(to.size, dtype=jnp.int32)
    back = (
        jnp.zeros_like(to)
        .at[to]
        .set(
            places,
            unique_indices=True,
            mode="promise_in_bounds",
            wrap_negative_indices=False,
        )
    )
    # compared with each expert: a scatter would be two launches, and atomic
    is_of = jnp.arange(count, dtype=jnp.int32)[:, None] == last[None]
    return to, back, jnp.sum(is_of, axis=1, dtype=jnp.int32)


# The derivative of a gather would be a scatter: zeros, and writes at random places.
@jax.custom_gradient
def taken(rows: jax.Array, places: jax.Array, back: jax.Array) -> jax.Array:
    """Return the row at each of the places; `back` are the places of the inverse."""
    result = rows.at[places].get(
        unique_indices=True, mode="promise_in_bounds", wrap_negative_indices=False
    )
    return result, lambda grad: (taken(grad, back, places), None, None)


def _checked(x, expert, weights) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the arguments of the layer as arrays.

    Raises:
        TypeError: `expert` is not of integers, or `weights` not of floats.
        ValueError: the shapes do not fit.
    """
    x = jnp.asarray(x)
    expert = _checks.array("Experts", "expert", expert)
    weights = _checks.high_precision("Experts", "weights", weights)
    if not jnp.issubdtype(expert.dtype, jnp.integer):
        raise TypeError(
            f"Experts: expert: expected integers, the experts of each token, got "
            f"{expert.dtype}; the probabilities of a router are for weights"
        )
    if expert.ndim != x.ndim or expert.shape[:-1] != x.shape[:-1]:
        needed = ", ".join(map(str, (*x.shape[:-1], "chosen")))
        raise ValueError(
            f"Experts: expert: expected [{needed}] to go with x{list(x.shape)}, got "
            f"{list(expert.shape)}; where each token has one expert, add a dimension "
            "with expert[..., None]"
        )
    if weights.shape != expert.shape:
        raise ValueError(
            f"Experts: weights: expected {list(expert.shape)}, a weight for each "
            f"element of expert, got {list(weights.shape)}"
        )
    return x, expert, weights
