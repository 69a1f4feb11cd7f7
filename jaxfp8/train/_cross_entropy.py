"""cross_entropy: the loss of a language model's head, a chunk of the vocabulary at a
time.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..dot import dot_general
from ..ops import _checks
from ..recipes import DotGeneralState, HighPrecision, Recipe
from ._sharing import grad
from ._steps import accumulate_gradients

_F32 = jnp.float32
_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


class _Head(NamedTuple):
    """What is static: the recipe of the products, and the columns of a chunk."""

    recipe: Recipe | None
    chunk_size: int
    dtype: np.dtype


def cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    recipe: Recipe | None = None,
    state: DotGeneralState | None = None,
    chunk_size: int = 8192,
) -> jax.Array:
    """Compute the cross-entropy of each token from the input of the head, without the
    logits of all tokens by the whole vocabulary.

        logits = x @ kernel + bias
        loss = logsumexp(logits) - logits[label]

    A loop runs over chunks of the vocabulary and keeps the largest logit and the sum of
    exponentials of each token (Milakov and Gimelshein, arXiv:1805.02867). The backward
    computes the logits of each chunk once more, so a step has four products of the
    head's size where the plain loss has three; its largest temporary is float32
    `[tokens, chunk_size]`.

        head = variables["params"]["head"]
        losses = jaxfp8.train.cross_entropy(x, head["kernel"], labels)
        loss = jnp.sum(losses * mask) / jnp.sum(mask)

    Logits are float32. The gradient of x is summed over chunks in float32, and rounded
    once.

    Args:
        x: bfloat16, float16 or float32 `[..., d]`, the input of the head.
        kernel: bfloat16, float16 or float32 `[d, vocabulary]`; of a tied embedding, its
            transpose. Without a recipe it is rounded to the dtype of x.
        labels: ints `[...]`. The logit of a label outside of `0 <= label < vocabulary`
            counts as 0: give such tokens the weight 0.
        bias: None, or `[vocabulary]`; it is added in float32.
        recipe: as for `jaxfp8.dot_general`: how the head's three products become FP8;
            None computes in the dtype of x. A recipe that takes scales from the tensor
            at hand takes them from each chunk of the kernel and of the gradient.
        state: as for `jaxfp8.dot_general`; its cotangent is the next state, with the
            largest amax of all chunks.
        chunk_size: columns of a chunk, at least 1. The vocabulary need not be a
            multiple of it.

    Returns:
        The loss of each token, float32 `[...]`.

    Raises:
        TypeError: an operand's dtype is not listed, `chunk_size` is not an int, or what
            `jaxfp8.dot_general` says of `recipe` and `state`; second derivatives and
            forward mode.
        ValueError: shapes do not fit, or `chunk_size` is not positive.
    """
    # 1. Check the operands.
    op = "train.cross_entropy"
    x = _checks.rank(op, "x", _checks.high_precision(op, "x", x), 1)
    kernel = _checks.high_precision(op, "kernel", kernel)
    if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: kernel: expected [{x.shape[-1]}, vocabulary] to go with x "
            f"{x.shape}, got {kernel.shape}; pass the transpose of an embedding"
        )
    labels = _checks.array(op, "labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{op}: labels: expected ints, got {labels.dtype}")
    _checks.shape(op, "labels", labels, x.shape[:-1])
    if bias is not None:
        bias = _checks.high_precision(op, "bias", bias)
        _checks.shape(op, "bias", bias, kernel.shape[1:])
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"{op}: chunk_size: expected an int, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size: expected at least 1, got {chunk_size}")
    if isinstance(recipe, HighPrecision):
        recipe = None

    # 2. Compute the loss of each row.
    head = _Head(recipe, chunk_size, x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    losses = _losses(head, rows, kernel, bias, state, labels.reshape(-1))
    return losses.reshape(labels.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(head, x, kernel, bias, state, labels):
    logits_of = functools.partial(_logits, head)
    return _online(head, logits_of, x, kernel, bias, state, labels)[0]


def _forward(head, *operands):
    # The products take the scales that those of the backward take: on an empty history
    # a product that nothing differentiates has the scale of its own tensors.
    def differentiated(*operands):
        return jax.vjp(functools.partial(_logits, head), *operands)[0]

    losses, normalizer = _online(head, differentiated, *operands)
    return losses, (*operands, normalizer)


def _online(head, logits_of, x, kernel, bias, state, labels):
    """Return the loss of each token, and the logsumexp of its logits."""

    def add_chunk(carry, start, size):
        largest, total, picked = carry
        columns = _columns(kernel, bias, start, size)
        logits = logits_of(x, *columns, state)
        new_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
        total *= jnp.exp(largest - new_largest)
        total += jnp.sum(jnp.exp(logits - new_largest[:, None]), axis=1)
        picked += _at_labels(logits, labels - start)
        return new_largest, total, picked

    zeros = jnp.zeros(labels.shape, _F32)
    start = jnp.full(labels.shape, -jnp.inf, _F32), zeros, zeros
    largest, total, picked = _over_chunks(head, kernel, start, add_chunk)
    normalizer = largest + jnp.log(total)
    return normalizer - picked, normalizer


def _backward(head, residuals, ct):
    x, kernel, bias, state, labels, normalizer = residuals

    # Its gradient with respect to the logits is that of the losses:
    # `ct * (softmax(logits) - one_hot(labels))`.
    def surrogate(x, columns, state, start):
        logits = _logits(head, x, *columns, state)
        exponentials = jnp.sum(jnp.exp(logits - normalizer[:, None]), axis=1)
        return jnp.sum(ct * (exponentials - _at_labels(logits, labels - start)))

    def add_chunk(carry, start, size):
        so_far, column_grads = carry
        columns = _columns(kernel, bias, start, size)
        x_grad, chunk_grads, state_grad = grad(surrogate, argnums=(0, 1, 2))(
            wide, columns, state, start
        )

        def put(whole, part):
            return lax.dynamic_update_slice_in_dim(whole, part, start, -1)

        column_grads = jax.tree.map(put, column_grads, chunk_grads)
        return accumulate_gradients(so_far, (x_grad, state_grad)), column_grads

    # The gradient of x has the dtype of x, so a wide x gives wide sums.
    wide = x.astype(_F32)
    start = jax.tree.map(jnp.zeros_like, ((wide, state), (kernel, bias)))
    (x_grad, state_grad), column_grads = _over_chunks(head, kernel, start, add_chunk)
    no_gradient = np.zeros(labels.shape, jax.dtypes.float0)
    return x_grad.astype(x.dtype), *column_grads, state_grad, no_gradient


_losses.defvjp(_forward, _backward)


def _over_chunks(head, kernel, carry, add_chunk):
    """Return the carry after `carry = add_chunk(carry, start, size)` for all chunks;
    the last one may be smaller.
    """
    size = head.chunk_size
    count, rest = divmod(kernel.shape[1], size)
    if count:
        starts = size * jnp.arange(count)
        carry, _ = lax.scan(
            lambda carry, start: (add_chunk(carry, start, size), None), carry, starts
        )
    return add_chunk(carry, count * size, rest) if rest else carry


def _columns(kernel, bias, start, size):
    """Return the columns of a chunk, and their bias or None."""
    return jax.tree.map(
        lambda whole: lax.dynamic_slice_in_dim(whole, start, size, -1), (kernel, bias)
    )


def _logits(head, x, kernel, bias, state):
    """Return the logits of a chunk, f32 `[tokens, size]`."""
    if head.recipe is None:
        logits = _product(head.dtype, x, kernel)
    else:
        logits = dot_general(
            x,
            kernel,
            _ROWS_BY_COLUMNS,
            recipe=head.recipe,
            state=state,
            preferred_element_type=_F32,
        )
    return logits if bias is None else logits + bias.astype(_F32)[None]


def _at_labels(logits, labels):
    """Return of each row the logit at its label, 0 for a label in another chunk."""
    columns = lax.broadcasted_iota(labels.dtype, logits.shape, 1)
    return jnp.sum(jnp.where(columns == labels[:, None], logits, _F32(0)), axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype, x, kernel):
    """Multiply in `dtype` with float32 sums; the products of the backward too, where
    JAX would multiply by a float32 gradient.
    """
    return _sums(x.astype(dtype), kernel.astype(dtype), _ROWS_BY_COLUMNS)


def _product_fwd(dtype, x, kernel):
    return _product(dtype, x, kernel), (x, kernel)


def _product_bwd(dtype, residuals, ct):
    x, kernel = residuals
    ct = ct.astype(dtype)
    x_grad = _sums(ct, kernel.astype(dtype), (((1,), (1,)), ((), ())))
    kernel_grad = _sums(x.astype(dtype), ct, (((0,), (0,)), ((), ())))
    return x_grad.astype(x.dtype), kernel_grad.astype(kernel.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def _sums(a, b, dimension_numbers):
    return lax.dot_general(a, b, dimension_numbers, preferred_element_type=_F32)
