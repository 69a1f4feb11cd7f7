"""einsum in FP8: an equation of two operands becomes one dot_general, and `x` stays the
input whatever its order.

`jnp.einsum` may swap its operands before it calls its `_dot_general` hook; then the
kernel would be quantized with the input's state. So this module reads the equation.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from opt_einsum.parser import parse_einsum_input

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
        lambda *operands: functools.partial(dot_general, recipe=recipe, state=state),
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
        product: `(x, kernel, dimension_numbers) -> multiply`: gives `dot_general` with
            the recipe and the state of a product of these operands.
        eqn, x, kernel, precision, preferred_element_type, out_sharding: see `einsum`.
    """
    x = _checks.high_precision("einsum", "x", x)
    kernel = _checks.high_precision("einsum", "kernel", kernel)
    if preferred_element_type is None:
        preferred_element_type = promoted(x, kernel)
    x_labels, kernel_labels, out_labels = _parse(eqn, x, kernel)

    # 1. Take diagonals, so that an operand has each label once, and find the sizes
    #    after broadcasting.
    x, x_labels = _diagonals(eqn, x, x_labels)
    kernel, kernel_labels = _diagonals(eqn, kernel, kernel_labels)
    x_sizes = dict(zip(x_labels, x.shape, strict=True))
    kernel_sizes = dict(zip(kernel_labels, kernel.shape, strict=True))
    sizes = _broadcast_sizes(eqn, x_sizes, kernel_sizes)
    out_sharding = spec_of("einsum", out_sharding)
    # A sum over no element would be zeros, whose amax counts: return first, so that the
    # state stays.
    if 0 in (*x.shape, *kernel.shape):
        dtype = _checks.dtype(
            "einsum",
            "preferred_element_type",
            preferred_element_type,
            _checks.HIGH_PRECISION,
        )
        shape = list(map(sizes.get, out_labels))
        return jnp.zeros(shape, dtype, out_sharding=out_sharding)
    # 2. Remove what `dot_general` does not have: dimensions that broadcast, and labels
    #    that are summed alone. A dimension of size 1 that broadcasts is dropped: its
    #    label then belongs to one operand.
    shared = [label for label in x_labels if x_sizes[label] == kernel_sizes.get(label)]
    kept = {*shared, *out_labels}
    x, x_labels = _reduce(x, x_labels, sizes, kept)
    kernel, kernel_labels = _reduce(kernel, kernel_labels, sizes, kept)

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

    operands = x, kernel, (positions(contract), positions(batch))
    y = product(*operands)(
        *operands,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    return jnp.transpose(y, list(map(y_labels.index, out_labels)))


def _error(eqn, message):
    return ValueError(f"einsum: eqn: {message}, got {eqn!r}")


# An operand or the output, and an equation.
_TERM = r"[^\W\d_]*(?:\.\.\.)?[^\W\d_]*"
_EQUATION = re.compile(f"({_TERM}),({_TERM})(?:->{_TERM})?")


def _parse(eqn, x, kernel) -> list[str]:
    """Return the labels of x, kernel and the output, each a letter; an ellipsis has
    letters that the equation lacks, which count from its end.
    """
    if not isinstance(eqn, str):
        raise TypeError(
            "einsum: eqn: expected a string such as 'bk,kn->bn', got "
            f"{type(eqn).__name__}"
        )
    text = eqn.replace(" ", "")
    terms = _EQUATION.fullmatch(text)
    if terms is None:
        raise _error(
            eqn,
            "expected two operands, separated by one comma, and one output, each of "
            "letters and at most one '...'",
        )
    operands = zip(("x", "kernel"), terms.groups(), (x, kernel), strict=True)
    for name, term, operand in operands:
        letters = len(term.replace("...", ""))
        if letters > operand.ndim or (letters < operand.ndim and "..." not in term):
            raise _error(
                eqn,
                f"expected a label for each of the {operand.ndim} dimensions of "
                f"{name}, {term!r} has {letters}",
            )
    try:
        inputs, output, _ = parse_einsum_input((text, x, kernel))
    except ValueError as error:
        needed = "expected labels of the operands in the output, each once"
        raise _error(eqn, f"{needed} ({error})") from error
    return [*inputs.split(","), output]


def _diagonals(eqn, value, labels):
    """Take the diagonal of `value` over dimensions that share a label; diagonals become
    the last dimensions.
    """

    def order(label):
        return labels.count(label) > 1, labels.index(label)

    left = "".join(sorted(set(labels), key=order))
    if left == labels:
        return value, left
    try:
        return jnp.einsum(f"{labels}->{left}", value), left
    except ValueError as error:
        raise _error(eqn, f"expected a label to have one size ({error})") from error


def _broadcast_sizes(
    eqn, x_sizes: dict[str, int], kernel_sizes: dict[str, int]
) -> dict[str, int]:
    """Return the size of each label, after broadcasting."""
    sizes = {**x_sizes, **kernel_sizes}
    for label in x_sizes.keys() & kernel_sizes.keys():
        x_size, kernel_size = x_sizes[label], kernel_sizes[label]
        if x_size != kernel_size and 1 not in (x_size, kernel_size):
            raise _error(
                eqn,
                f"expected one size (or 1) for {label!r}, x has {x_size} and kernel "
                f"{kernel_size}",
            )
        sizes[label] = kernel_size if x_size == 1 else x_size
    return sizes


def _reduce(value, labels, sizes, kept):
    """Remove the dimensions that broadcast, and sum `value` in f32 over the labels that
    are not `kept`.
    """
    broadcast, summed, left = [], [], ""
    for d, label in enumerate(labels):
        if value.shape[d] < sizes[label]:
            broadcast.append(d)
        elif label in kept:
            left += label
        else:
            summed.append(d - len(broadcast))
    value = jnp.squeeze(value, axis=tuple(broadcast))
    if summed:
        # The sum is not rounded to the operand's dtype: quantization rounds it, once.
        value = jnp.sum(value.astype(jnp.float32), axis=tuple(summed))
    return value, left
