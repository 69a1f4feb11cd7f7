"""update_state: the next state from the old state and its cotangent, with a check that
nothing scaled the cotangent.

Only one number per quantizer is new in a step, the amax in slot 0. The rest of the
history is the old history, rolled; a factor on the cotangent (from a sum over uses, a
mean, clipping, unscaling) shows there.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops
from .._jax._trees import Tree
from ..recipes import _below_zero, _state_tree


def update_state(old: Tree, new: Any) -> Tree:
    """Return the state for the next step.

    For each quantizer, and for each row where state is stacked (layers of a scan,
    experts, ensemble members):

        h' = [amax, h[2], ..., h[H - 1], h[0]]    # roll(h, -1) of the old history; amax
                                                  # is slot 0 of `new`
        s' = the scale of `new`

    A row that was not touched (its new scale is 0, or subnormal) or whose new numbers
    are not finite keeps its old value. Where `old` already holds a gradient of the same
    step, from a second optimizer for example, the two combine: slot 0 is the larger
    amax. The returned state is clean: old history entries that are not finite become 0,
    an old scale that is 0 or not finite becomes 1. Old state below zero, which an
    optimizer that stepped on the state makes, or a factor that cannot be undone, is an
    error; in a trace it stays as it is, and its scale is NaN. The returned state is
    float32, whatever cast `old` went through.

    The old history tells what the tail of the new history must be. If the new tail is c
    times that, with c off from 1 by more than 1 %, the state was summed over c uses
    (c > 1), or averaged, clipped or unscaled (c < 1). Outside of `jit` this raises.
    Under a trace:

        c = 2**n (a loss scale)   the factor is undone: slot 0 is `amax / min(c, 1)`,
                                  the scale `s' / c`
        c = 2, 3, ... (a sum)     the same: slot 0 is no less than the true amax
        any other c               the scale becomes negative, so that the next product
                                  is NaN

    because any other factor, such as that of a clip or of a division by 3, has changed
    the gradients of the parameters too. Nobody is told the cause
    there: the next call outside of `jit`, `jaxfp8.inspect.summary` and
    `jaxfp8.convert.reset_state` name the quantizers. While a history is empty, the
    scale shows the factor. A history of length 1 has no tail and cannot be checked once
    it holds an amax.

    Changes that keep the tail are not found: clips by value and `sign` from the first
    step on, averages of microbatches that include the state. Add microbatches by
    `accumulate_gradients`, and wrap the optimizer in `jaxfp8.train.optimizer`, which
    keeps state out of all other transformations.

    Args:
        old: the state this step ran on: a state collection, a `DotGeneralState`, a
            variables dict, an NNX state, or a tree that mixes any of these with
            parameters. History f32 `(..., H)`, scale f32 `(..., 1)`.
        new: the gradient with respect to `old`, in the same structure. State that is
            absent from it is untouched.

    Returns:
        `old` with its quantizer state replaced, in float32; all other leaves are those
        of `old`.

    Raises:
        ValueError: outside of `jit`: state was summed, averaged, clipped or unscaled,
            or is below zero. Always: the shapes of `old` and `new` differ, or `new`
            holds none of the state.
    """
    before, gradient = expect_state(old, new)
    values, factors = _next_of_quantizers(before, gradient)
    values |= _next_of_users(before, gradient)
    _check_factors(before, factors)
    return before.replace(values)


def _next_of_quantizers(before, gradient) -> tuple[dict, dict]:
    """Return the next leaves of quantizers, by position; and the factors by which their
    gradients were multiplied, by names of quantizers.
    """
    # 1. Collect the quantizers whose leaves have the same types: each group is one
    #    call.
    alike = {}
    for q in before.quantizers:
        then = [gradient.get(before.paths[i]) for i in q.positions]
        if any(leaf is None for leaf in then):
            continue
        _state_tree.check_slots(f"update_state: old: {q.name}", *q.leaves)
        _check_shapes(q.name, q.leaves, then)
        leaves = (*q.leaves, *then)
        kind = tuple(map(jax.typeof, leaves))
        alike.setdefault(kind, []).append((q.name, q.positions, leaves))
    # 2. Compute the next state of each group, and its factors.
    values = {}
    factors = {}
    for group in alike.values():
        names, positions, leaves = zip(*group, strict=True)
        states, factors[names] = _next_quantizers(leaves)
        for pair, state in zip(positions, states, strict=True):
            values |= zip(pair, state, strict=True)
    return values, factors


def _next_of_users(before, gradient) -> dict:
    """Return the next state of users' own quantizers, by position.

    Raises:
        ValueError: outside of a trace: a state is below zero.
    """
    values = {}
    for i in before.unpaired:
        new = gradient.get(before.paths[i])
        if new is None or new.dtype == jax.dtypes.float0:
            continue
        _check_shapes(before.name(i), [before.leaves[i]], [new])
        old, new = (x.astype(jnp.float32) for x in (before.leaves[i], new))
        # A gradient that is all zero, negative or not finite does not overwrite it.
        is_touched = jnp.all(jnp.isfinite(new) & (new >= 0)) & jnp.any(new != 0)
        values[i] = jnp.where(is_touched, new, old)
        for name, least in _below_zero.smallest({before.name(i): [old, new]}).items():
            raise ValueError(_NEGATIVE.format(name=name, least=f"{least:.4g}"))
    return values


def expect_state(old: Tree, new: Tree) -> tuple[_state_tree.StateTree, dict]:
    """Return `old` as a flat tree, and the leaves of `new` by path.

    Raises:
        ValueError: `new` holds none of the state of `old`.
    """
    before = _state_tree.flatten(old)
    gradient = _state_tree.flatten(new).by_path()
    positions = before.positions()
    if positions and not any(before.paths[i] in gradient for i in positions):
        raise ValueError(
            f"update_state: new: expected the gradient of {before.name(positions[0])} "
            "and the other state of old, got a tree without them; take the gradient "
            "with respect to the state as well, in NNX with jaxfp8.nnx.grad or "
            "jaxfp8.nnx.value_and_grad"
        )
    return before, gradient


_PER_EXAMPLE = (
    "this is a state for each of {count} examples, as the vmap of a gradient gives; "
    "take the max over them: grads['_overwrite_with_gradient'] = jax.tree.map(lambda "
    "a: a.max(0), grads['_overwrite_with_gradient'])"
)


def _check_shapes(name, old, new):
    shapes = [leaf.shape for leaf in new]
    expected = [leaf.shape for leaf in old]
    if shapes == expected:
        return
    remedy = "pass the gradient with respect to old"
    if [shape[1:] for shape in shapes] == expected:
        remedy = _PER_EXAMPLE.format(count=shapes[0][0])
    raise ValueError(
        f"update_state: new: {name}: expected the shapes of old, "
        f"{' and '.join(map(str, expected))}, got {' and '.join(map(str, shapes))}; "
        f"{remedy}"
    )


@jax.jit
def _next_quantizers(quantizers):
    """Return the next state of quantizers whose leaves have the same types, and their
    factors.

    The quantizers are stacked, so that the arithmetic on a whole model's state takes
    the launches of one quantizer. The histories themselves are not: `write_histories`
    takes each from where it is.

    Args:
        quantizers: for each its old leaves, in the order of `QuantizerState`, then its
            new leaves.

    Returns:
        `(states, factors)`: a history and a scale for each, and f32
        `[quantizers, *batch, 1]`, the factor on the cotangent of each row; NaN where
        the row's old state is below zero.
    """
    # 1. Find the numbers to write, six of each row as `write_histories` takes them. The
    #    state's scale is the scale_inv of the last step.
    quantizers = jax.tree.map(lambda x: x.astype(jnp.float32), quantizers)
    *numbers, factors = ops.undo_factors(*map(_stacked, zip(*quantizers, strict=True)))
    recorded = jnp.concatenate(numbers, axis=-1)
    padding = [(0, 0, 0)] * recorded.ndim
    padding[-1] = (0, ops.READING_NUMBERS - len(numbers), 0)
    recorded = lax.pad(recorded, np.float32(0), padding)
    recorded = jnp.moveaxis(recorded, 0, -2)
    # 2. Write the histories and scales, as those of products that one call takes.
    pairs = [leaves[:2] for leaves in quantizers]
    calls = []
    rows = []
    for start in range(0, len(pairs), ops.MAX_QUANTIZERS):
        call = slice(start, start + ops.MAX_QUANTIZERS)
        row = recorded[..., call, :]
        calls.append(pairs[call])
        rows.append(row.reshape(*row.shape[:-2], -1))
    written = ops.write_histories(calls, rows)
    return list(itertools.chain.from_iterable(written)), factors


def _stacked(leaves):
    if leaves[0].ndim > 1:
        # a concatenation along the rows would move those that devices share out
        return jnp.stack(leaves)
    # without an operation for each leaf
    return lax.concatenate(leaves, 0).reshape(len(leaves), -1)


_FACTOR = (
    "update_state: {name}: the new state is {factor} times what a step from the old "
    "state gives: it was {cause}, or comes from the gradient of another step. "
)
_REMEDIES = (
    "Pass the gradient with respect to `old`. Uses of one state must combine by max: "
    "take the gradient with jaxfp8.value_and_grad, or cast the state with "
    "jaxfp8.max_grad at the top of the loss, and add microbatches with "
    "jaxfp8.accumulate_gradients. Keep `_overwrite_with_gradient` out of clipping, "
    "loss scaling, pmean and psum, as jaxfp8.train.optimizer and "
    "jaxfp8.linen.TrainState do: clip inside of optax, or by the norm of the "
    "parameters' gradients alone, optax.global_norm(grads['params'])"
)


def _check_factors(before, factors):
    """Outside of a trace, raise for a factor that is not 1.

    Args:
        before: the old state.
        factors: f32 `[quantizers, *batch, 1]` by the names of quantizers.
    """
    # By one transfer. What other processes alone can see is left out, because one
    # process must not raise alone.
    visible = {name: x for name, x in factors.items() if _below_zero.is_visible(x)}
    factors = jax.device_get(visible)
    if any(np.isnan(rows).any() for rows in factors.values()):
        raise ValueError(
            f"update_state: old: {_below_zero.describe(before)}{_below_zero.REPAIR}"
        )
    for names, of_group in factors.items():
        for name, factor in zip(names, of_group, strict=True):
            _check_factor(name, factor)


def _check_factor(name, factor):
    bad = ~(np.abs(factor - 1) <= ops.FACTOR_TOLERANCE)
    if not bad.any():
        return
    worst = factor[bad][0]
    if factor.size > 1:
        name += f", row {tuple(map(int, np.argwhere(bad)[0][:-1]))}"
    cause = "averaged, clipped or unscaled"
    if worst > 1:
        cause = "summed over uses or devices"
    message = _FACTOR.format(name=name, factor=f"{worst:.4g}", cause=cause)
    raise ValueError(message + _REMEDIES)


_NEGATIVE = (
    "update_state: {name}: expected a state that is not negative, as uses combine by "
    "max and 0 is unused; got {least}. Keep an offset, or the parts above and below "
    "zero; and keep the state out of code that changes gradients"
)
