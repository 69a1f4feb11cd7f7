"""Experts on the devices of a mesh axis: rows go to the devices of their experts as
codes, and results come back.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..dot import Route, is_expert, sorted_by_expert, taken
from ._collectives import AllToAll, transfer


def experts_over(layer: Any) -> tuple[int, Callable[..., Route]]:
    """Return how many experts of a layer, an `Experts` of Linen or NNX, a device has,
    and the route to them.

    Raises:
        ValueError: the mesh around the call has no such axis, or the size of the axis
            does not divide `count`; or `capacity` is below 1.
    """
    axis, count, capacity = layer.expert_axis, layer.count, layer.capacity
    if capacity is not None and capacity < 1:
        raise ValueError(
            "Experts: capacity: expected at least 1 row, or None for all rows, got "
            f"{capacity}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and axis not in (None, *mesh.axis_names):
        raise ValueError(
            "Experts: expert_axis: expected an axis of the mesh, which has "
            f"{mesh.axis_names}, got {axis!r}; None keeps all experts on each device"
        )
    if axis not in mesh.manual_axes:
        return count, Route
    devices = mesh.shape[axis]
    if count % devices:
        raise ValueError(
            f"Experts: count: expected a multiple of {devices}, the devices along "
            f"expert_axis={axis!r}, got {count}"
        )
    route = functools.partial(ExchangedRoute, axis, devices, capacity)
    return count // devices, route


def dropped_rows(layer: Any, expert: jax.Array) -> jax.Array:
    """Count the rows of this device that the `capacity` of a layer leaves out,
    int32[].
    """
    _, route = experts_over(layer)
    return jnp.int32(route(expert.reshape(-1), layer.count).dropped)


class ExchangedRoute(Route):
    """The way of rows to experts on the devices of a mesh axis, and back.

    A device has as many slots for each device as it may send rows there: `capacity`, or
    all of its `m` rows, so that any choice of experts fits. `[devices * slots, k]`
    arrives, zeros where no row was. The rows that a device gets are sorted by its own
    experts, in the order of the devices that they come from.

    Attributes:
        dropped: int32[], how many rows of this device have found no slot.
    """

    def __init__(
        self,
        axis: str,
        devices: int,
        capacity: int | None,
        expert: jax.Array,
        count: int,
    ):
        rows, local = expert.size, count // devices
        slots = rows if capacity is None else min(capacity, rows)
        self._count = devices * slots
        self._exchange = AllToAll(axis, (0, 0), tiled=True)
        # 1. Give each row a slot, in the order of experts. Rows of no expert come
        #    behind all slots, with those that are too many for their device.
        _, place, sizes = sorted_by_expert(expert, count)
        sizes = sizes.reshape(devices, local)
        of_device = jnp.sum(sizes, axis=1, dtype=jnp.int32)
        device = (expert // local).astype(jnp.int32)
        slot = place - (jnp.cumsum(of_device) - of_device)[device]
        has_expert = is_expert(expert, count)
        fits = has_expert & (slot < slots)
        self._slot = jnp.where(fits, device * slots + slot, self._count + place)
        self.dropped = jnp.sum(has_expert & ~fits, dtype=jnp.int32)
        # 2. Find the expert of each slot that arrives: those of a device come in the
        #    order of experts, and zeros behind them.
        ends = self._exchange.send(jnp.cumsum(sizes, axis=1))
        at = jnp.arange(slots, dtype=jnp.int32)[None, None]
        arrived = jnp.sum(ends[:, :, None] <= at, axis=1, dtype=jnp.int32)
        self._to, self._back, self.group_sizes = sorted_by_expert(
            arrived.reshape(-1), local
        )

    def placed(self, rows: jax.Array) -> jax.Array:
        """Return rows in their slots, `[devices * slots, k]`."""
        slots = jnp.zeros((self._count, rows.shape[-1]), rows.dtype)
        return slots.at[self._slot].set(rows, unique_indices=True, mode="drop")

    def restored(self, rows: jax.Array) -> jax.Array:
        """Return the rows of the slots; zeros for those without a slot."""
        return rows.at[self._slot].get(unique_indices=True, mode="fill", fill_value=0)

    def first(self, rows, *rest, recipe, state, preferred_element_type):
        """Send rows as the codes that the product multiplies."""

        def move(rows):
            return taken(rows, self._to, self._back)

        q = transfer(self._exchange, rows, recipe, state, "input")
        if q.scale_inv is None:
            rows = move(q.data)
        else:
            rows = q.moved(move)
        return Route.first(
            rows,
            *rest,
            recipe=recipe,
            state=state,
            preferred_element_type=preferred_element_type,
        )

    def second(self, *operands, recipe, state, preferred_element_type):
        """Send results back; their gradients come as the codes that the product
        multiplies, whose amax the transfer records.
        """
        y = Route.second(
            *operands,
            recipe=recipe,
            state=state,
            preferred_element_type=preferred_element_type,
            records_grad=False,
        )
        y = taken(y, self._back, self._to)
        return transfer(self._exchange, y, recipe, state, "output_grad").data
