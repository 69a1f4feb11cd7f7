"""accumulate_gradients: parameters add, quantizer state combines by max."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .._jax._typing import Tree
from ..numerics import _scaling
from ..ops import _checks
from ..recipes import _state_tree


def accumulate_gradients(acc: Tree, grads: Tree, *, weight: ArrayLike | None = None) -> Tree:
    """Add the gradients of one more microbatch.

        acc = jaxfp8.accumulate_gradients(acc, grads)                # acc is None or zeros at the start
        acc = jaxfp8.accumulate_gradients(acc, grads, weight=1 / n)  # the mean of n microbatches

    Gradients of parameters add. State combines by the elementwise maximum, in which 0 is neutral. All microbatches run
    on the same old state, so the result is one step of that state, with the largest amax of all microbatches. Never
    divide the sum as a whole, which would divide the state too: `weight` multiplies the gradients of parameters alone.

    Args:
        acc: the sum so far, in the structure of `grads`; at the start None, or zeros (`jax.tree.map(jnp.zeros_like,
            ...)`) to carry through `lax.scan`. The sum keeps the dtypes of `acc`.
        grads: gradients of one microbatch: a dict with `params` and `_overwrite_with_gradient`, an NNX state, or any
            tree that mixes parameters with `DotGeneralState`. State entries that are negative or not finite count as 0.
        weight: a real number or scalar array, the factor of parameter gradients; None means 1.

    Returns:
        The sum, in the structure of `grads`.

    Raises:
        TypeError: `weight` is not a real number.
        ValueError: the structures of `acc` and `grads` differ, or `weight` has a dimension.
    """
    if weight is not None:
        weight = _checks.array("accumulate_gradients", "weight", weight)
        if not jnp.isrealobj(weight):
            raise TypeError(f"accumulate_gradients: weight: expected a real number, got {weight.dtype}")
        _checks.shape("accumulate_gradients", "weight", weight, ())
    new = _state_tree.flatten(grads)
    if acc is None:
        so_far = [jnp.zeros_like(leaf) for leaf in new.leaves]
    else:
        before = _state_tree.flatten(acc)
        if before.paths != new.paths:
            odd = sorted({"/".join(path) for path in set(before.paths) ^ set(new.paths)})
            raise ValueError(
                f"accumulate_gradients: acc: expected the structure of grads, got a tree that differs at {odd[:3]}; "
                "start with None, or with zeros like the gradients"
            )
        so_far = before.leaves
    # Uses of one state combine by max, gradients of parameters add.
    state = set(new.positions())
    pairs = enumerate(zip(so_far, new.leaves, strict=True))
    total = [maximum(a, g) if i in state else _add(a, g, weight) for i, (a, g) in pairs]
    return new.treedef.unflatten(total)


def _add(acc, grad, weight):
    if jnp.result_type(grad) == jax.dtypes.float0:
        return grad
    grad = jnp.asarray(grad)
    if weight is not None:
        grad = grad * weight.astype(grad.dtype)
    return acc + grad.astype(jnp.result_type(acc))


def maximum(acc, grad):
    """Return the elementwise max of non-negative floats, by their bits: XLA's CPU threads flush subnormal floats."""
    if not jnp.issubdtype(jnp.result_type(grad), jnp.floating):
        return jnp.maximum(acc, grad)
    dtype = jnp.result_type(acc)
    bits = (lax.bitcast_convert_type(_scaling.clean(jnp.asarray(x)), jnp.int32) for x in (acc, grad))
    return lax.bitcast_convert_type(jnp.maximum(*bits), jnp.float32).astype(dtype)
