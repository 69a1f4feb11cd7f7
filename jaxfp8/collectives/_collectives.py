"""all_to_all, all_gather and ppermute of FP8 codes."""

from collections.abc import Iterable

import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..recipes import DotGeneralState, QTensor, Recipe
from ._transfer import Call, Collective, transfer


def all_to_all(
    x: ArrayLike,
    axis_name: str | tuple[str, ...],
    split_axis: int,
    concat_axis: int,
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    tiled: bool = False,
) -> QTensor:
    """Compute `jax.lax.all_to_all` inside `shard_map`, with FP8 codes on the wire.

        y = jax.lax.all_to_all(q(x), axis_name, split_axis, concat_axis, tiled=tiled)

    where `q` quantizes and dequantizes by the quantizer `input` of the recipe. Codes travel as bytes. Scales of rows
    and blocks travel beside them. One scale is that of the whole tensor, on all devices, and does not travel. NaN and
    Inf arrive as NaN. The gradient passes straight through `q`: the cotangent of y travels back as codes of the
    quantizer `output_grad`, with scales of its own. **The cotangent of `state` is the next state**: overwrite with it,
    never add it. That of `state.kernel` is zero, and `jaxfp8.update_state` then keeps it.

    Args:
        x: bfloat16, float16 or float32, with at least one dimension.
        axis_name: a mesh axis of the `shard_map`, or several.
        split_axis, concat_axis: see `jax.lax.all_to_all`; not the last dimension where that shares scales of rows or
            blocks.
        recipe: for example `Float8CurrentScaling()`. None sends x and its cotangent in high precision. A `CustomRecipe`
            that has no quantizer for one of them sends that one in high precision.
        state: `init_state(recipe)`, or the state that the last step returned; None where the recipe keeps no state.
            `DotGeneralState(None, None, None)` takes every scale from the tensor at hand. Under `vmap` each member of a
            batch has its own scales; a state that they share combines by max.
        tiled: see `jax.lax.all_to_all`.

    Returns:
        A QTensor of the shape of y. `dot_general` and `ragged_dot` multiply its codes; `dequantize(dtype)` gives y. Its
        `source`, which gets the gradient, is y in the dtype of x, and is not computed where nothing reads it. In high
        precision the QTensor has no scale, and its `data` is y.

    Raises:
        TypeError: x has another dtype; the recipe or the state is not one; second derivatives and forward mode.
        ValueError: the `shard_map` has no such axis; x has no such dimension; the state is missing or of another shape
            or history length; the collective cuts or joins the dimension that shares scales.
    """
    op = "all_to_all"
    split_axis, concat_axis = _axis(op, "split_axis", split_axis, x), _axis(op, "concat_axis", concat_axis, x)
    names = _names(axis_name)
    send, send_back = (
        _call(lax.all_to_all, axis_name=names, split_axis=first, concat_axis=second, tiled=tiled)
        for first, second in ((split_axis, concat_axis), (concat_axis, split_axis))
    )
    return transfer(Collective(op, names, send, send_back, (split_axis, concat_axis)), x, recipe, state)


def all_gather(
    x: ArrayLike,
    axis_name: str | tuple[str, ...],
    *,
    axis: int = 0,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    tiled: bool = False,
) -> QTensor:
    """Compute `jax.lax.all_gather` inside `shard_map`, with FP8 codes on the wire.

        y = jax.lax.all_gather(q(x), axis_name, axis=axis, tiled=tiled)

    The rest is that of `all_to_all`, but for the gradient: it is a sum over devices, `jax.lax.psum_scatter` of the
    cotangent in the dtype of x, and the cotangent of `state.output_grad` is zero.

    Args:
        x, axis_name, recipe, state, tiled: see `all_to_all`.
        axis: see `jax.lax.all_gather`; not the last dimension of y where that shares scales of rows or blocks.

    Returns:
        A QTensor of the shape of y; see `all_to_all`.

    Raises:
        TypeError, ValueError: see `all_to_all`.
    """
    axis = _axis("all_gather", "axis", axis, x, more=0 if tiled else 1)
    names = _names(axis_name)
    send = _call(lax.all_gather, axis_name=names, axis=axis, tiled=tiled)
    send_back = _call(lax.psum_scatter, axis_name=names, scatter_dimension=axis, tiled=tiled)
    return transfer(Collective("all_gather", names, send, send_back, (axis,), sums_back=True), x, recipe, state)


def ppermute(
    x: ArrayLike,
    axis_name: str | tuple[str, ...],
    perm: Iterable[tuple[int, int]],
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
) -> QTensor:
    """Compute `jax.lax.ppermute` inside `shard_map`, with FP8 codes on the wire.

        y = jax.lax.ppermute(q(x), axis_name, perm)

    The rest is that of `all_to_all`. Between stages of a pipeline that have states of their own, the scale travels too.

    Args:
        x, axis_name, recipe, state: see `all_to_all`.
        perm: pairs of `(source, destination)`, see `jax.lax.ppermute`. Other devices get zeros.

    Returns:
        A QTensor of the shape of y; see `all_to_all`.

    Raises:
        TypeError, ValueError: see `all_to_all`.
    """
    names, perm = _names(axis_name), tuple(map(tuple, perm))
    send = _call(lax.ppermute, axis_name=names, perm=perm)
    send_back = _call(lax.ppermute, axis_name=names, perm=tuple((end, start) for start, end in perm))
    return transfer(Collective("ppermute", names, send, send_back, has_one_sender=True), x, recipe, state)


def _call(function, **arguments) -> Call:
    return Call(function, tuple(arguments.items()))


def _names(axis_name) -> tuple[str, ...]:
    """Return mesh axes as a tuple."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _axis(op: str, name: str, axis: int, x: ArrayLike, more: int = 0) -> int:
    """Return a dimension of x, or of a result with `more` dimensions, counted from the front."""
    ndim = np.ndim(x) + more
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: {name}: expected a dimension out of {ndim}, got {axis}")
    return axis % ndim
