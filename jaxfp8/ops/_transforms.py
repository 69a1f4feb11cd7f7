"""How the ops behave under JAX's transformations: vmap adds groups, differentiation raises.

Every custom call takes a leading group dimension (common/README.md). A vmapped op is the same call with more groups,
so there is no second kernel and no loop.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def merge_tensor(axis_size: int, batched: bool, x):
    """`[b, g, ...]` to `[b * g, ...]`; an operand that is not batched is repeated."""
    if not batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(axis_size * x.shape[1], *x.shape[2:])


def merge_scale(axis_size: int, batched: bool, scale, groups: int):
    """`[b, 1 or g]` to `[b * g]`; one scale for everything stays `[1]`."""
    if not batched:
        if scale.shape == (1,):
            return scale
        scale = scale[None]
    return jnp.broadcast_to(scale, (axis_size, groups)).reshape(-1)


def split_groups(axis_size: int, groups: int, x):
    """`[b * g, ...]` back to `[b, g, ...]`."""
    return x.reshape(axis_size, groups, *x.shape[1:])


def grouped(function):
    """Makes `function(tensor, *scales)` over groups vmappable: batches become groups."""
    call = custom_vmap(function)

    @call.def_vmap
    def _(axis_size, in_batched, tensor, *scales):
        tensor_batched, *scales_batched = in_batched
        groups = tensor.shape[1 if tensor_batched else 0]
        merged = [
            merge_scale(axis_size, batched, scale, groups)
            for batched, scale in zip(scales_batched, scales, strict=True)
        ]
        outputs = call(merge_tensor(axis_size, tensor_batched, tensor), *merged)
        outputs = jax.tree.map(functools.partial(split_groups, axis_size, groups), outputs)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return call


def not_differentiable(op: str):
    """Decorator: autodiff through `op` raises, where a derivative of rounding would be silently wrong."""

    def decorate(function):
        function = jax.custom_jvp(function)

        @function.defjvp
        def _(primals, tangents):
            del primals, tangents
            raise TypeError(
                f"jaxfp8.ops.{op} is not differentiable. Use jaxfp8.dot_general, which has the straight-through "
                "gradient; it has first derivatives in reverse mode only."
            )

        return function

    return decorate
