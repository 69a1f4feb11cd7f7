"""The collectives all_to_all and all_gather, which send FP8 codes, and the codes of a
cotangent back.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike
from numpy.lib.array_utils import normalize_axis_index

from .._jax import _mesh
from ..dot import (
    as_read_residual,
    as_residual,
    checked_quantizers,
    vmapped_state,
    warn_of_state,
)
from ..ops import _checks, _support
from ..recipes import (
    AmaxReduction,
    DotGeneralState,
    HighPrecision,
    HighPrecisionQuantizer,
    OperandOptions,
    QTensor,
    Recipe,
    cotangent,
    read,
    reading_of,
    scales_of,
    through_bytes,
)


def all_to_all(
    x: ArrayLike,
    axis_name: str | tuple[str, ...],
    split_axis: int,
    concat_axis: int,
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    tiled: bool = False,
) -> QTensor:
    """Compute `jax.lax.all_to_all` inside `shard_map`, with FP8 codes on the wire.

        y = jax.lax.all_to_all(q(x), axis_name, split_axis, concat_axis, tiled=tiled)

    where `q` quantizes and dequantizes by the quantizer `input` of the recipe. Codes
    travel as bytes, and scales of rows and blocks travel beside them. A recipe with one
    scale for the tensor has the same scale on all devices, which does not travel. NaN
    and Inf arrive as NaN. The gradient passes straight through `q`: the cotangent of y
    travels back as codes of the quantizer `output_grad`, with scales of its own. **The
    cotangent of `state` is the next state**: overwrite the state with it, never add it.
    The cotangent of `state.kernel` is zero, with which `jaxfp8.update_state` keeps the
    old value.

    Args:
        x: bfloat16, float16 or float32, with at least one dimension.
        axis_name: a mesh axis of the `shard_map`, or several.
        split_axis, concat_axis: see `jax.lax.all_to_all`; with scales of rows or blocks
            neither may be the last dimension.
        recipe: for example `Float8CurrentScaling()`. None sends x and its cotangent in
            high precision. A `CustomRecipe` without a quantizer for x, or for its
            cotangent, sends that tensor in high precision.
        state: `init_state(recipe)`, or the state that the last step returned; None
            where the recipe keeps no state. `DotGeneralState(None, None, None)` takes
            every scale from the tensor at hand. Under `vmap` each example has its own
            scales; the next values of a state that the examples share combine by max.
        tiled: see `jax.lax.all_to_all`.

    Returns:
        A QTensor of the shape of y. `dot_general` and `ragged_dot` multiply its codes;
        `dequantize(dtype)` gives y. Its `source`, which gets the gradient, is y in the
        dtype of x; XLA drops a `source` that no code reads. In high precision the
        QTensor has no scale, and its `data` is y.

    Raises:
        TypeError: x has another dtype; `recipe` is not a Recipe, or `state` not a
            DotGeneralState; or JAX takes a second derivative, or differentiates in
            forward mode.
        NameError: the `shard_map` has no axis `axis_name`.
        ValueError: x has no dimension `split_axis` or `concat_axis`; the state is
            missing, or has another shape or history length; or the collective cuts or
            joins the last dimension, along which elements share scales.
    """
    ndim = np.ndim(x)
    split_axis = normalize_axis_index(split_axis, ndim, "all_to_all: split_axis")
    concat_axis = normalize_axis_index(concat_axis, ndim, "all_to_all: concat_axis")
    both = AllToAll(axis_name, (split_axis, concat_axis), tiled)
    return transfer(both, x, recipe, state)


def all_gather(
    x: ArrayLike,
    axis_name: str | tuple[str, ...],
    *,
    axis: int = 0,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    tiled: bool = False,
) -> QTensor:
    """Compute `jax.lax.all_gather` inside `shard_map`, with FP8 codes on the wire.

        y = jax.lax.all_gather(q(x), axis_name, axis=axis, tiled=tiled)

    See `all_to_all` for codes, scales and state. The gradient differs: it is a sum over
    devices, the `jax.lax.psum_scatter` of the cotangent in the dtype of x, and the
    cotangent of `state.output_grad` is zero.

    Args:
        x, axis_name, recipe, state, tiled: see `all_to_all`.
        axis: see `jax.lax.all_gather`; with scales of rows or blocks not the last
            dimension of y.

    Returns:
        A QTensor of the shape of y; see `all_to_all`.

    Raises:
        NameError, TypeError, ValueError: see `all_to_all`.
    """
    ndim = np.ndim(x) + int(not tiled)
    axis = normalize_axis_index(axis, ndim, "all_gather: axis")
    return transfer(AllGather(axis_name, (axis,), tiled), x, recipe, state)


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """`jax.lax.all_to_all`, its arguments included: `send` moves an array of any dtype,
    `send_back` the cotangent of the result.

    Attributes:
        axis_name: a mesh axis, or several.
        axes: the dimensions of the result that the collective cuts or joins.
        tiled: see `jax.lax.all_to_all`.
        name: the name of the public function, for messages.
        sums_back: whether `send_back` adds the arrays of several devices, so that it
            cannot take codes.
    """

    axis_name: str | tuple[str, ...]
    axes: tuple[int, ...]
    tiled: bool
    name = "all_to_all"
    sums_back = False

    def send(self, x):
        return lax.all_to_all(x, self.axis_name, *self.axes, tiled=self.tiled)

    def send_back(self, x):
        return lax.all_to_all(x, self.axis_name, *self.axes[::-1], tiled=self.tiled)


class AllGather(AllToAll):
    """`jax.lax.all_gather`, its arguments included; see `AllToAll`."""

    name = "all_gather"
    sums_back = True

    def send(self, x):
        return lax.all_gather(x, self.axis_name, axis=self.axes[0], tiled=self.tiled)

    def send_back(self, x):
        return lax.psum_scatter(
            x, self.axis_name, scatter_dimension=self.axes[0], tiled=self.tiled
        )


def transfer(collective, x, recipe, state, part=None) -> QTensor:
    """Quantize x, send its codes, and return the QTensor that arrives.

    Args:
        collective: an `AllToAll`, which may be an `AllGather`.
        x, recipe, state: as `all_to_all` takes them.
        part: see `_Transfer`.
    """
    x = _checks.high_precision(collective.name, "x", x, 1)
    if recipe is None:
        recipe = HighPrecision(pipeline_axes=())
    quantizers, state = checked_quantizers(collective.name, recipe, state)
    if x.size == 0:  # an array without elements leaves the state as it is
        quantizers, state = checked_quantizers(collective.name, HighPrecision(), None)
    both = _Transfer(
        collective,
        jax.typeof(x),
        quantizers,
        AmaxReduction.for_recipe(recipe),
        _support.selected(),
        part,
    )
    # `read` and `vmapped_state` combine the cotangents of a state's uses, and of
    # examples that share it, by max; JAX would add them up.
    source, codes = _compiled(both, x, vmapped_state(read(quantizers, state), x))
    # Codes have no derivative: the gradient goes to the source.
    if codes is None:
        return QTensor(source, None)
    return dataclasses.replace(lax.stop_gradient(codes), source=source)


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """The static part of one transfer.

    Attributes:
        collective: the collective, forward and back.
        x_type: the type of x.
        quantizers: the quantizers of x, of the kernel, which a transfer does not use,
            and of the cotangent.
        reduce: `(amax, state) -> amax`, over the mesh.
        implementation: the implementation of the ops, in the forward and the backward.
        part: the only part of the state that belongs to this transfer, where it is that
            of a product. `"input"`: x is what the product reads, and the cotangent
            takes its scale from the tensor at hand. `"output_grad"`: x travels in high
            precision, and its cotangent is that of the product. None: both belong.
    """

    collective: AllToAll
    x_type: jax.core.ShapedArray
    quantizers: tuple
    reduce: AmaxReduction
    implementation: str | None
    part: str | None = None

    def move(self, send, quantizer, x, scale):
        """Send the codes of x by `send`; return their values in the dtype of x, the
        codes, and the QTensor for the next state.

        In high precision, without a scale, x travels as it is, and the codes are None.
        """
        options = OperandOptions(rows=x.ndim - 1, columnwise=False, reduce=self.reduce)
        q, _ = quantizer.quantize_operand(x, scale, options)
        data = through_bytes(send, q.data)
        if q.scale_inv is None:
            return data.astype(x.dtype), None, q.for_next_state()
        scale_inv, block = self.send_scales(send, q, data, quantizer)
        codes = QTensor(data, scale_inv, block=block, power_2_scale=q.power_2_scale)
        return codes.dequantize(x.dtype), codes, q.for_next_state()

    def send_scales(self, send, q, data, quantizer):
        """Return the scales of the codes `data` that arrived, and their block."""
        # 1. Send no scale where all devices have the same scale: types tell, or the
        #    reduction of amaxes tells.
        axes, agreed = set(_mesh.axes_of(self.collective.axis_name)), self.reduce.axes
        if q.has_one_scale:
            if agreed is None:
                is_same = not axes & _mesh.varying(q.scale_inv)
            else:
                is_same = quantizer.has_one_scale and axes <= set(agreed)
            if is_same:
                return q.scale_inv, None
        # 2. Else send the scales with their rows, as `[*rows, columns of blocks]`; one
        #    scale is repeated for each row.
        rows, scales, block = q.shape[:-1], q.scale_inv, q.block
        if q.has_one_scale:
            scales, block = jnp.broadcast_to(scales, (math.prod(rows), 1)), (1, None)
        if scales.shape[0] != math.prod(rows) or data.ndim - 1 in self.collective.axes:
            raise ValueError(
                f"{self.collective.name}: recipe: expected one scale for the tensor "
                "on all devices, or whole rows that have scales of their own; the "
                f"scales of x{list(q.shape)} are {list(q.scale_inv.shape)}, and the "
                f"collective moves dimensions {self.collective.axes} of "
                f"{list(data.shape)}. Move others than the last dimension, or take a "
                "recipe with one scale, such as Float8CurrentScaling()"
            )
        moved = through_bytes(send, scales.reshape(*rows, -1))
        return moved.reshape(-1, moved.shape[-1]), block


def _forward(both, x, state, has_backward):
    """Return the results of `_transfer`, and the residuals
    `(q, scale of the gradient, reading)`.
    """
    quantizer, send = both.quantizers.input, both.collective.send
    with _support.using(both.implementation):
        scales = scales_of(both.quantizers, state, has_backward)
        grad_scale = scales.output_grad
        if both.part == "input":
            grad_scale = None
        elif both.part == "output_grad":
            quantizer = HighPrecisionQuantizer()
        source, codes, q = both.move(send, quantizer, x, scales.input)
    codes = as_read_residual(codes)
    return (source, codes), (q, grad_scale, reading_of(state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transfer(both, x, state):
    """Return the values that arrive, in the dtype of x, and their codes; XLA drops
    values that no code reads.
    """
    return _forward(both, x, state, False)[0]


def _transfer_fwd(both, x, state):
    # Warn of a gradient that leaves out the state: its scales would stay the same in
    # all of training.
    warn_of_state(both.quantizers, [leaf.perturbed for leaf in jax.tree.leaves(state)])
    x, state = x.value, jax.tree.map(lambda leaf: leaf.value, state)
    results, residuals = _forward(both, x, state, True)
    return results, as_residual(residuals)


def _transfer_bwd(both, residuals, cotangents):
    """Send the cotangent back as codes of `output_grad`; where devices add cotangents,
    in its own dtype.
    """
    q, grad_scale, reading = residuals
    ct, _ = cotangents
    # A cotangent of zeros is quantized all the same: x has run, so its state has a next
    # value.
    if isinstance(ct, SymbolicZero):
        ct = jnp.zeros(ct.shape, ct.dtype)
    quantizer, send_back = both.quantizers.output_grad, both.collective.send_back
    if both.collective.sums_back:
        quantizer = HighPrecisionQuantizer()
    with _support.using(both.implementation):
        dx, _, grad = both.move(send_back, quantizer, ct, grad_scale)
        if both.part == "input":
            grad = None
        recorded = cotangent(both.quantizers, [q, None, grad], reading, both.reduce)
    # The cotangent of a replicated x is the sum over the devices.
    return _mesh.cotangent_of(both.x_type, dx), recorded


_transfer.defvjp(_transfer_fwd, _transfer_bwd, symbolic_zeros=True)
# Outside of `jit`, JAX runs no `custom_vjp` with symbolic zeros inside `shard_map`.
_compiled = jax.jit(_transfer, static_argnums=0, inline=True)
