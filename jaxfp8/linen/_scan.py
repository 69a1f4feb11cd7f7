"""scan: Linen's scan over layers, for gradients that JAX takes: the state of the layers is read outside of the loop."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn

from ..recipes import OVERWRITE_WITH_GRADIENT, without_max
from ..train import max_grad


def scan(target: Callable[..., Any], *args: Any, methods: Any = None, **options: Any) -> Callable[..., Any]:
    """Scan over layers as `nn.scan`, whose arguments these are; parameters and state are where that has them.

        layers = jaxfp8.linen.scan(
            Block,
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=32,
        )

    With `jax.grad`, `nn.scan` slices and writes the histories of every layer in every iteration. Here the loop has a
    few numbers of each, and the histories move once, after it. `jaxfp8.grad` does the same with `nn.scan`.
    """
    scanned = nn.scan(target, *args, methods=methods, **options)
    mapped = nn.map_variables(
        scanned,
        OVERWRITE_WITH_GRADIENT,
        trans_in_fn=max_grad,
        trans_out_fn=without_max,
        mutable=True,  # as far as the scope around it is
        methods=methods,
    )
    mapped.__name__ = scanned.__name__  # after which Flax names a layer
    return mapped
