"""compare: measure the error of every FP8 product of a model, layer by layer."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from .._jax._table import natural
from .._jax._trees import split_arrays
from ..dot import _product
from ..nnx import _inspect as nnx_inspect
from ..numerics import FP8_DTYPES
from ..recipes import FP8StateWarning
from ._backward import Runs
from ._rows import Rows

_TENSORS = ("output", "input_grad", "kernel_grad")
_COLUMNS = ("layer", *_TENSORS, *(f"model_{name}" for name in _TENSORS))


class Comparison(Rows):
    """SQNR of every FP8 product of a model; `str` is a table, the worst layers first.

        SQNR = 10 log10(sum x**2 / sum (x - x_fp8)**2) dB, x in float32

    Attributes:
        rows: a dict for each product that a gradient of the loss reaches: `layer` and
            six figures in dB. inf means no error; -inf that FP8 is not finite, or that
            all of the tensor is lost; nan that float32 is not finite; None that there
            is no such gradient, as of frozen kernels. `layer` is the path of the
            module; ` (call 1)` after the path is the second call, `[i]` an iteration of
            a loop or a member of a batch.

            - `output`, `input_grad`, `kernel_grad` are figures **of the product by
              itself**: input, kernel and the gradient of the output are those of the
              float32 run, so errors of other layers do not count.
            - `model_output`, `model_input_grad`, `model_kernel_grad` are figures **of
              the whole model**, all of whose products run in FP8: errors of the layers
              before add up, and in gradients those of the layers after.
    """

    _table = _COLUMNS, ".1f", 1


def compare(
    model: Any,
    batch: Any,
    variables: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Run a model with its products in float32 and in FP8, forward and backward, and
    compare layer by layer.

        print(jaxfp8.inspect.compare(model, batch, variables))

    Both runs have the same weights, batch and FP8 state, and update nothing. Only the
    FP8 products differ between the runs. The outputs and gradients of all products go
    to the host, as float32, so take a small batch. In a frozen model (`jaxfp8.freeze`)
    the float32 kernels are the dequantized codes, so the error of quantizing kernels
    does not show.

    Args:
        model: a Linen module, an NNX module, or any function of arrays that runs FP8
            products.
        batch: the arguments of the model: a tuple, or a single argument.
        variables: the variables of a Linen model, with its FP8 state; None takes those
            of `model.init(jax.random.key(0), ...)`, whose scales are 1.
        loss: a function of the model's output that returns a scalar; None is the mean
            of squares of the output.
        kwargs: keyword arguments of the model, for a Linen model those of `apply`
            (`rngs`, `train`, ...).

    Returns:
        The `Comparison`.

    Raises:
        TypeError: the model cannot be called, or returns no floating-point array and
            there is no `loss`; or there are variables for a model that is not Linen's.
        ValueError: no gradient reaches an FP8 product.
    """
    args = batch if isinstance(batch, tuple) else (batch,)
    fn, arrays = _function(model, args, variables, kwargs)
    loss = loss or _mean_of_squares
    exact = _run(fn, arrays, loss, _product.multiply_float32, _product.multiply_fp8)
    if not exact:
        raise ValueError(
            "compare: model: expected FP8 products that the gradient of the loss "
            "reaches, got none; is autocast off, or no recipe given?"
        )
    fp8 = _run(fn, arrays, loss, _product.multiply_fp8)
    rows = []
    for (layer, tensors), (_, in_model) in zip(exact, fp8, strict=True):
        rows.append(_row(layer, *tensors, *in_model))
    return Comparison(sorted(rows, key=_worst_first))


def _function(model, args, variables, kwargs):
    """Return `(function of a tree of arrays, the tree)` for a call of the model."""
    if isinstance(model, nn.Module):
        if variables is None:
            variables = model.init(jax.random.key(0), *args, **kwargs)
        model, args = model.apply, (variables, *args)
    elif variables is not None:
        raise TypeError(
            "compare: variables: expected None for a model that is not Linen's, which "
            "holds its own arrays"
        )
    return nnx_inspect.function_of_arrays(model, args, kwargs)


def _run(fn, arrays, loss, *functions) -> list[tuple[str, Any]]:
    """Run one step forward and backward, in which the first of `functions` multiplies;
    return, with labels, the tensors that each of them gives from the same operands and
    gradient.
    """
    runs = Runs()
    arrays = jax.tree.map(jnp.asarray, arrays)
    floats, joined = split_arrays(arrays, _is_float)

    def multiply(product, *operands):
        bound = [functools.partial(function, product) for function in functions]
        dtype = jax.eval_shape(bound[-1], *operands).dtype  # that of the FP8 product
        y = bound[0](*operands).astype(dtype)

        def tensors(operands, grad):
            return [_tensors(function, operands, grad) for function in bound]

        return runs.at_backward(y, operands, tensors)

    def loss_of(floats):
        with _product.replaced_by(multiply):
            return loss(fn(joined(floats)))

    # State that the model closes over has no gradient here, and needs none.
    with warnings.catch_warnings(action="ignore", category=FP8StateWarning):
        jax.block_until_ready(jax.jit(jax.grad(loss_of))(floats))
    return list(runs.labelled())


def _is_float(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype not in FP8_DTYPES


def _mean_of_squares(output):
    arrays, _ = split_arrays(output)
    leaves = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    if not leaves:
        raise TypeError(
            "compare: model: expected a result with floating-point arrays, got none; "
            "register the class of the result as a pytree, or pass loss"
        )
    total = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves)
    return total / sum(x.size for x in leaves)


def _tensors(function, operands, grad) -> list:
    """Return the output of a product and the gradients of x and the kernel, in f32;
    None for one without a gradient.
    """
    floats, joined = split_arrays(operands, _is_float)
    y, pullback = jax.vjp(lambda floats: function(*joined(floats)), floats)
    cotangents = iter(*pullback(grad.astype(y.dtype)))
    grads = [next(cotangents) if _is_float(x) else None for x in operands[:2]]
    return jax.tree.map(lambda x: x.astype(jnp.float32), [y, *grads])


def _row(layer: str, exact, by_itself, in_model) -> dict[str, Any]:
    row = {"layer": layer}
    for prefix, got in (("", by_itself), ("model_", in_model)):
        for name, x, x_fp8 in zip(_TENSORS, exact, got, strict=True):
            row[prefix + name] = None if x is None else _sqnr(x, x_fp8)
    return row


def _sqnr(exact, got) -> float:
    exact, got = np.float64(exact), np.float64(got)
    # Infinities give the figures of tensors that are not finite.
    got = np.where(np.isnan(got), np.inf, got)
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = np.sum((exact - got) ** 2)
        sqnr = 10 * np.log10(np.sum(exact**2) / noise)
    return math.inf if noise == 0 else float(sqnr)


def _worst_first(row):
    """Return a sorting key for rows."""
    figures = [row[name] for name in _TENSORS if row[name] is not None]
    worst = min(-math.inf if math.isnan(figure) else figure for figure in figures)
    return worst, natural(row["layer"])
