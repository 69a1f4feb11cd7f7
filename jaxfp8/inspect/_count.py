"""count: run a step, and count the elements of every quantized tensor that saturate and
that become zero.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from .._jax._table import natural
from ..dot import FusedInput, _product
from ..recipes import TensorwiseQuantizer, scales_of
from ._backward import Runs
from ._rows import Rows

# Each tensor, in the codes of its first product and of its second.
_TENSORS = (
    "input",
    "wgrad_input",
    "kernel",
    "dgrad_kernel",
    "output_grad",
    "wgrad_output_grad",
)
_COLUMNS = ("layer", "tensor", "saturated", "flushed")


class Counts(Rows):
    """The fractions of elements that saturated and that became zero, in one step; `str`
    is a table, the worst first.

    Attributes:
        rows: a dict for each tensor that was quantized with one scale: `layer`, the
            path of the module; `tensor`, `"input"`, `"kernel"` or `"output_grad"`, and
            for codes that a `ByProduct` makes for the second product of a tensor
            `"wgrad_input"`, `"dgrad_kernel"` or `"wgrad_output_grad"`; `saturated`, the
            fraction of elements with `abs(x * scale) > FP8_MAX` (an Inf counts, a NaN
            does not); and `flushed`, the fraction of elements that are not zero but
            have the code of zero. ` (call 1)` after the path is the second call of the
            layer, `[i]` an iteration of a loop, a member of a batch, or a device of
            `shard_map`.
    """

    _table = _COLUMNS, ".2%", 2


def count(step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Counts]:
    """Run one step, and count in each FP8 product what saturates and what becomes zero.

        (train, loss), counts = jaxfp8.inspect.count(train_step, train, batch)

    The step computes what it computes otherwise, and nothing is counted in other steps.
    The first call compiles a jitted step once more. Counting reads each tensor once
    more, and on a mesh adds reductions over the devices, because the fractions are
    those of the whole tensor. The host gets two numbers for each tensor. The gradient
    of a product with an `activation` is rounded to the dtype of the product before it
    becomes FP8.

    Args:
        step: a function that takes gradients through FP8 products, such as a training
            step, or `jax.grad` of a loss; jitted or not. Products are counted in their
            backward.
        args, kwargs: the arguments of the step.

    Returns:
        `(the result of the step, the Counts)`. A kernel that is codes without a source,
        and a tensor with a scale for each block, have no row.

    Raises:
        ValueError: the step ran the backward of no FP8 product.
    """
    for products in _runs.products.values():
        for trees in products:
            trees.clear()
    with _product.replaced_by(_counted):
        result = jax.block_until_ready(step(*args, **kwargs))
    reached, rows = list(_runs.labelled()), []
    for layer, fractions in reached:
        for tensor, pair in zip(_TENSORS, fractions.tolist(), strict=True):
            row = dict(zip(_COLUMNS, (layer, tensor, *pair), strict=True))
            if not np.isnan(pair[0]):
                rows.append(row)
    if not reached:
        raise ValueError(
            "count: step: expected a function that takes gradients through FP8 "
            "products, got one without such; give it the training step, or jax.grad "
            "of a loss"
        )
    rows.sort(
        key=lambda row: (-row["saturated"], -row["flushed"], natural(row["layer"]))
    )
    return result, Counts(rows)


# What the products of the running step have counted, `[*batch, 6, 2]` each.
_runs = Runs()


def _counted(product, x, kernel, bias, state, codes, group_sizes):
    """Run the FP8 product, whose backward also counts the elements of its three
    tensors.

    This is one function for all steps, so that JAX compiles a step that is counted
    once.
    """
    # 1. Count x and the kernel, with the scales that the product will choose.
    scales = jax.lax.stop_gradient(scales_of(product.quantizers, state))
    x_codes, kernel_codes = codes
    x_values = _values(x, x_codes)
    if x_values is not None:
        x_values = product.in_groups(x_values, group_sizes)
    forward = [
        _fractions(product, 0, x_values, scales),
        _fractions(product, 1, _values(kernel, kernel_codes), scales),
    ]

    # 2. Count the gradient where it arrives, and give the counts to the host.
    def fractions(operands, grad):
        forward, scales, group_sizes = operands
        counted = product.in_groups(grad, group_sizes)
        return jnp.concatenate((*forward, _fractions(product, 2, counted, scales)))

    y = _product.multiply_fp8(product, x, kernel, bias, state, codes, group_sizes)
    return _runs.at_backward(y, (forward, scales, group_sizes), fractions)


def _fractions(product, i, values, scales) -> jax.Array:
    """Return the fractions of a tensor's elements that saturate and that become zero,
    for both its products, f32 `[2, 2]`.

    They are NaN where the tensor has no scale for the whole of it, and where the second
    product reads the codes of the first.

    Args:
        product: the static part.
        i: 0 for x, 1 for the kernel, 2 for grad.
        values: the tensor, or None.
        scales: what all quantizers take, see `recipes.scales_of`.
    """
    both = []
    quantizers = product.quantizers.of_operand(i)
    for quantizer, scale in zip(quantizers, scales.of_operand(i), strict=True):
        fractions = jnp.full(2, jnp.nan, jnp.float32)
        if values is not None and isinstance(quantizer, TensorwiseQuantizer):
            chosen = quantizer.choose_scale(
                lambda: ops.amax(values), scale, product.reduce
            )
            counts = ops.count_saturated_and_flushed(
                values, chosen.scale, quantizer.fp8_dtype
            )
            fractions = counts / np.float32(max(values.size, 1))
            fractions = product.reduce(fractions, scale, jax.lax.pmean)
        both.append(fractions)
    return jnp.stack(both)


def _values(operand, codes):
    """Return the values that a product quantizes, without gradient; None for codes
    without a source.
    """
    if isinstance(codes, FusedInput):  # in f32, as the op computes them
        return dataclasses.replace(codes, x=codes.x.astype(jnp.float32)).value
    if codes is not None and codes.is_all_of(operand):
        return None
    return jax.lax.stop_gradient(operand)
