"""One kernel at one shape: what runs, on what, and what the answer is."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from _gpu_inputs import E4M3, normal

from jaxfp8 import ops

F32 = jnp.float32
# Normal numbers times SCALE stay below 448; products of two of them times PRODUCT_SCALE
# too.
SCALE, PRODUCT_SCALE = np.float32(448 / 6.3), np.float32(448 / 40)


@dataclasses.dataclass(frozen=True)
class Work:
    """One kernel at one shape.

    Attributes:
        step: function of arrays that launches the kernel.
        arguments: seed -> arrays for `step`.
        check: `(results, *arguments)`; raises for a wrong answer.
        reads: how often the first argument is read.
        operations: the number of operations of a product, for its TFLOP/s; None for
            other kernels.
        is_copied: whether a product is also timed beside a copy of its bytes, as other
            kernels are.
        chain: `(results, arguments)` -> arguments of the next launch, where a launch is
            all that a kernel costs.
    """

    step: Callable
    arguments: Callable
    check: Callable
    reads: int = 1
    operations: int | None = None
    is_copied: bool = False
    chain: Callable | None = None


def one_array(shape, dtype):
    """Arguments of a kernel that reads one array of normal numbers."""
    return lambda seed: (normal(seed, shape, dtype),)


def codes(seed, shape):
    """Random e4m3 codes of scale SCALE."""
    return ops.quantize(normal(seed, shape), SCALE, E4M3)[0]
