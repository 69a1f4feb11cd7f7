"""einsum in FP8: an equation of two operands becomes one dot_general, and `x` stays the
input whatever its order.

`jnp.einsum` may swap its operands before it calls its `_dot_general` hook; then the
kernel would be quantized with the input's state. So this module reads the equation.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from opt_einsum.contract import PathInfo, contract_path

from ..ops import _checks
from ..recipes import DotGeneralState, Recipe
from ._compute_dtype import promoted
from ._dot_general import dot_general, spec_of


def einsum(
    eqn: str,
    x: ArrayLike,
    kernel: ArrayLike,
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Compute `jnp.einsum(eqn, x, kernel)` by one `dot_general` with operands and
    output gradient in FP8.

    Equations mean what they mean to `jnp.einsum`: ellipses, an implicit output, any
    order of the output, repeated labels (a diagonal) and dimensions of size 1 that
    broadcast.

    A label that only one operand has and that the output lacks is summed over before
    that operand is quantized, in f32 and without rounding the sum to the operand's
    dtype. The amax recorded is that of the sum.

    Args:
        eqn: the equation, for example `"bqd,dhk->bqhk"`; labels are letters.
        x: the `input`, bfloat16, float16 or float32: the first operand of the equation.
        kernel: bfloat16, float16 or float32: the second operand. A float32 kernel gets
            its gradient in float32.
        recipe: for example `DelayedScaling()`. None computes in high precision and does
            not touch the state.
        state: `init_state(recipe)`, or the state that the last step returned; its
            cotangent is the next state. None where the recipe keeps no state.
        precision: as for `dot_general`.
        preferred_element_type: dtype of the result: bfloat16, float16 or float32. The
            default is `jnp.result_type(x, kernel)`.
        out_sharding: PartitionSpec or NamedSharding of the result, on a mesh with
            explicit axes, as for `jnp.einsum`.

    Returns:
        The product, with its dimensions in the order of the output's labels.

    Raises:
        TypeError: `eqn` is not a string, an operand is not an array; and the cases of
            `dot_general`.
        ValueError: the equation is malformed or does not fit the shapes; and the cases
            of `dot_general`.
    """
    return einsum_by(
        functools.partial(dot_general, recipe=recipe, state=state),
        eqn,
        x,
        kernel,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def einsum_by(
    product, eqn, x, kernel, *, precision, preferred_element_type, out_sharding
):
    """Compute `einsum` by one product.

    Args:
        product: `dot_general` with a recipe and a state.
        eqn, x, kernel, precision, preferred_element_type, out_sharding: see `einsum`.
    """
    x = _checks.high_precision("einsum", "x", x)
    kernel = _checks.high_precision("einsum", "kernel", kernel)
    if preferred_element_type is None:
        preferred_element_type = promoted(x, kernel)
    out_sharding = spec_of("einsum", out_sharding)

    # 1. Read the equation: labels, one for each dimension that an ellipsis stands for
    #    too, and sizes after broadcasting.
    info = _parsed(eqn, x.shape, kernel.shape)
    x_labels, kernel_labels = info.input_subscripts.split(",")
    out_labels, sizes = info.output_subscript, info.size_dict
    # 2. Remove what `dot_general` does not have: dimensions that broadcast, diagonals,
    #    and labels that are summed alone. The label of a dimension that broadcasts then
    #    belongs to one operand.
    x, x_labels = _squeezed(x, x_labels, sizes)
    kernel, kernel_labels = _squeezed(kernel, kernel_labels, sizes)
    shared = set(x_labels).intersection(kernel_labels)
    kept = shared.union(out_labels)
    x, x_labels = _reduced(x, x_labels, kept)
    kernel, kernel_labels = _reduced(kernel, kernel_labels, kept)
    shared = [label for label in x_labels if label in shared]

    # 3. A shared label of the output is a batch dimension, any other is contracted. The
    #    product has the batch first, then what is left of x and of the kernel; the
    #    output may have another order.
    batch, contract = [], []
    for label in shared:
        (batch if label in out_labels else contract).append(label)
    free = [label for label in x_labels + kernel_labels if label not in shared]
    y_labels = batch + free
    if out_sharding is not None:
        # a short spec leaves the last dimensions uncut
        axes = dict(zip(out_labels, out_sharding, strict=False))
        out_sharding = PartitionSpec(*map(axes.get, y_labels))

    def positions(labels):
        return list(map(x_labels.index, labels)), list(map(kernel_labels.index, labels))

    y = product(
        x,
        kernel,
        (positions(contract), positions(batch)),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    return jnp.transpose(y, list(map(y_labels.index, out_labels)))


def _parsed(eqn, x_shape, kernel_shape) -> PathInfo:
    """Return what opt_einsum, which `jnp.einsum` reads equations by, says of one."""
    if not isinstance(eqn, str):
        raise TypeError(
            "einsum: eqn: expected a string such as 'bk,kn->bn', got "
            f"{type(eqn).__name__}"
        )
    try:
        return contract_path(eqn, x_shape, kernel_shape, shapes=True)[1]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"einsum: eqn: expected an equation of x{list(x_shape)} and "
            f"kernel{list(kernel_shape)}, got {eqn!r}: {error}"
        ) from error


def _squeezed(value, labels, sizes):
    """Drop the dimensions of size 1 that broadcast."""
    broadcast, left = [], ""
    for d, label in enumerate(labels):
        if value.shape[d] != sizes[label]:
            broadcast.append(d)
        else:
            left += label
    return jnp.squeeze(value, axis=tuple(broadcast)), left


def _reduced(value, labels, kept):
    """Sum `value` in f32 over the labels that are not `kept`, and take the diagonal of
    dimensions that share a label; diagonals become the last dimensions.
    """

    def order(label):
        return labels.count(label) > 1, labels.index(label)

    left = "".join(sorted(kept.intersection(labels), key=order))
    if left == labels:
        return value, left
    if not kept.issuperset(labels):
        # The sum is not rounded to the operand's dtype: quantization rounds it, once.
        value = value.astype(jnp.float32)
    return jnp.einsum(f"{labels}->{left}", value), left
