"""The collectives all_to_all, all_gather and ppermute, which send FP8 codes."""

import functools
from collections.abc import Callable, Iterable

import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..recipes import DotGeneralState, QTensor, Recipe
from ._transfer import Collective, transfer


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

    where `q` quantizes and dequantizes by the quantizer `input` of the recipe. Codes travel as bytes, and scales of
    rows and blocks travel beside them. A recipe with one scale for the tensor has the same scale on all devices, which
    does not travel. NaN and Inf arrive as NaN. The gradient passes straight through `q`: the cotangent of y travels
    back as codes of the quantizer `output_grad`, with scales of its own. **The cotangent of `state` is the next
    state**: overwrite the state with it, never add it. The cotangent of `state.kernel` is zero, with which
    `jaxfp8.update_state` keeps the old value.

    Args:
        x: bfloat16, float16 or float32, with at least one dimension.
        axis_name: a mesh axis of the `shard_map`, or several.
        split_axis, concat_axis: see `jax.lax.all_to_all`; with scales of rows or blocks neither may be the last
            dimension.
        recipe: for example `Float8CurrentScaling()`. None sends x and its cotangent in high precision. A `CustomRecipe`
            without a quantizer for x, or for its cotangent, sends that tensor in high precision.
        state: `init_state(recipe)`, or the state that the last step returned; None where the recipe keeps no state.
            `DotGeneralState(None, None, None)` takes every scale from the tensor at hand. Under `vmap` each example has
            its own scales; the next values of a state that the examples share combine by max.
        tiled: see `jax.lax.all_to_all`.

    Returns:
        A QTensor of the shape of y. `dot_general` and `ragged_dot` multiply its codes; `dequantize(dtype)` gives y. Its
        `source`, which gets the gradient, is y in the dtype of x; XLA drops a `source` that no code reads. In high
        precision the QTensor has no scale, and its `data` is y.

    Raises:
        TypeError: x has another dtype; `recipe` is not a Recipe, or `state` not a DotGeneralState; or JAX takes a
            second derivative, or differentiates in forward mode.
        ValueError: the `shard_map` has no axis `axis_name`; x has no dimension `split_axis` or `concat_axis`; the state
            is missing, or has another shape or history length; or the collective cuts or joins the last dimension,
            along which elements share scales.
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

    See `all_to_all` for codes, scales and state. The gradient differs: it is a sum over devices, the
    `jax.lax.psum_scatter` of the cotangent in the dtype of x, and the cotangent of `state.output_grad` is zero.

    Args:
        x, axis_name, recipe, state, tiled: see `all_to_all`.
        axis: see `jax.lax.all_gather`; with scales of rows or blocks not the last dimension of y.

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

    See `all_to_all` for codes, scales, state and gradient. Between stages of a pipeline that have states of their own,
    one scale travels too.

    Args:
        x, axis_name, recipe, state: see `all_to_all`.
        perm: pairs of `(source, destination)`, see `jax.lax.ppermute`. A device that is no destination gets zeros.

    Returns:
        A QTensor of the shape of y; see `all_to_all`.

    Raises:
        TypeError, ValueError: see `all_to_all`.
    """
    names, perm = _names(axis_name), tuple(map(tuple, perm))
    send = _call(lax.ppermute, axis_name=names, perm=perm)
    send_back = _call(lax.ppermute, axis_name=names, perm=tuple((end, start) for start, end in perm))
    return transfer(Collective("ppermute", names, send, send_back, has_one_sender=True), x, recipe, state)


@functools.cache
def _call(function, **arguments) -> Callable:
    """Return a partial, the same object for equal arguments: JAX caches programs by it."""
    return functools.partial(function, **arguments)


def _names(axis_name) -> tuple[str, ...]:
    """Return mesh axes as a tuple."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _axis(op: str, name: str, axis: int, x: ArrayLike, more: int = 0) -> int:
    """Return a dimension of x, or of a result with `more` dimensions, counted from the front."""
    ndim = np.ndim(x) + more
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: {name}: expected a dimension out of {ndim}, got {axis}")
    return axis % ndim
