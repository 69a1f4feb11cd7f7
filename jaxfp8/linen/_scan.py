"""scan: Linen's scan over layers, which reads the state of all layers before the loop, also under `jax.grad`."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn

from ..recipes import OVERWRITE_WITH_GRADIENT, without_max
from ..train import max_grad


def scan(target: Callable[..., Any], *args: Any, methods: Any = None, **options: Any) -> Callable[..., Any]:
    """Scan over layers as `nn.scan` does, with the same arguments, parameters and state.

        layers = jaxfp8.linen.scan(
            Block,
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=32,
        )

    With `jax.grad`, `nn.scan` slices and writes the history of a layer in each iteration. This loop runs over a few
    numbers of each layer, and all histories move once, after the loop. `jaxfp8.grad` does the same with `nn.scan`.
    """
    scanned = nn.scan(target, *args, methods=methods, **options)
    mapped = nn.map_variables(
        scanned,
        OVERWRITE_WITH_GRADIENT,
        trans_in_fn=max_grad,
        trans_out_fn=without_max,
        mutable=True,  # the collection is mutable where the surrounding scope has it mutable
        methods=methods,
    )
    mapped.__name__ = scanned.__name__  # Flax names a layer after this
    return mapped
