"""One transfer of FP8 codes between devices, and of the codes of its cotangent back."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from .._jax import _mesh
from ..dot import Static, checked_quantizers, shared, vmapped_state, warn_of_state
from ..dot.checkpoint_policies import RESIDUAL_NAME
from ..ops import _checks, _implementation
from ..recipes import (
    AmaxReduction,
    DotGeneralState,
    HighPrecision,
    HighPrecisionQuantizer,
    OperandOptions,
    QTensor,
    Quantizer,
    Recipe,
    next_states,
    read_states,
    reading_of,
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of `jax.lax`, its arguments included.

    Attributes:
        name: the name of the public function, for messages.
        axis_names: the mesh axes.
        send: the function that moves an array of any dtype.
        send_back: the function that moves the cotangent of `send`'s result.
        axes: the dimensions of the result that the collective cuts or joins.
        has_one_sender: whether each device receives from one device.
        sums_back: whether `send_back` adds the arrays of several devices, so that it cannot take codes.
    """

    name: str
    axis_names: tuple[str, ...]
    send: Callable[[jax.Array], jax.Array]
    send_back: Callable[[jax.Array], jax.Array]
    axes: tuple[int, ...] = ()
    has_one_sender: bool = False
    sums_back: bool = False


def transfer(
    collective: Collective, x: jax.typing.ArrayLike, recipe: Recipe | None, state: DotGeneralState | None
) -> QTensor:
    """Quantize x, send its codes, and return the QTensor that arrives."""
    x = _checks.rank(collective.name, "x", _checks.high_precision(collective.name, "x", x), 1)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not set(collective.axis_names) <= set(manual):
        raise ValueError(
            f"{collective.name}: axis_name: expected mesh axes of the shard_map around the call, which has {manual}, "
            f"got {collective.axis_names}"
        )
    if recipe is None:
        recipe, state = HighPrecision(pipeline_axes=()), None
    quantizers, state = checked_quantizers(collective.name, recipe, state)
    if x.size == 0:  # an array without elements leaves the state as it is
        quantizers, state = HighPrecision().quantizers(), DotGeneralState(None, None, None)
    both = _Transfer(collective, quantizers[:3], AmaxReduction.for_recipe(recipe), _implementation.selected())
    # `shared` and `vmapped_state` combine the cotangents of a state's uses, and of examples that share it, by max; JAX
    # would add them up.
    source, codes = _compiled(both, x, vmapped_state(shared(state), x))
    # Codes have no derivative: the gradient goes to the source.
    return QTensor(source, None) if codes is None else dataclasses.replace(lax.stop_gradient(codes), source=source)


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """The static part of one transfer.

    Attributes:
        collective: the collective, forward and back.
        quantizers: the quantizers of x, of the kernel, which a transfer does not use, and of the cotangent.
        reduce: `(amax, state) -> amax`, over the mesh.
        implementation: the implementation of the ops, in the forward and the backward.
    """

    collective: Collective
    quantizers: tuple
    reduce: AmaxReduction
    implementation: str | None

    def move(self, send, quantizer: Quantizer, x, step, dtype) -> tuple[jax.Array, QTensor | None, QTensor]:
        """Send the codes of x by `send`; return their values in `dtype`, the codes, and the QTensor for the next state.

        In high precision, without a scale, x travels as it is, and the codes are None.
        """
        options = OperandOptions(rows=x.ndim - 1, columnwise=False, reduce=self.reduce)
        q, _ = quantizer.quantize_operand(x, step, options)
        data = _as_bytes(send, q.data)
        if q.scale_inv is None:
            return data.astype(dtype), None, q.for_next_state()
        scale_inv, block = self.send_scales(send, q, data, quantizer)
        codes = QTensor(data, scale_inv, block=block, power_2_scale=q.power_2_scale)
        return codes.dequantize(dtype), codes, q.for_next_state()

    def send_scales(self, send, q: QTensor, data, quantizer: Quantizer):
        """Return the scales of the codes `data` that arrived, and their block."""
        # 1. Send no scale where all devices have the same scale: types tell, or the reduction of amaxes tells.
        axes, agreed = set(self.collective.axis_names), self.reduce.axes
        if q.has_one_scale:
            if agreed is None:
                is_same = not axes & _mesh.varying(q.scale_inv)
            else:
                is_same = quantizer.has_one_scale and axes <= set(agreed)
            if is_same:
                return q.scale_inv, None
            if self.collective.has_one_sender:
                return send(q.scale_inv), None
        # 2. Else send the scales with their rows, as `[*rows, columns of blocks]`; one scale is repeated for each row.
        rows, is_one = q.shape[:-1], q.has_one_scale
        scales = jnp.broadcast_to(q.scale_inv, (math.prod(rows), 1)) if is_one else q.scale_inv
        if scales.shape[0] != math.prod(rows) or data.ndim - 1 in self.collective.axes:
            raise ValueError(
                f"{self.collective.name}: recipe: expected one scale for the tensor on all devices, or whole rows that "
                f"have scales of their own; the scales of x{list(q.shape)} are {list(q.scale_inv.shape)}, and the "
                f"collective moves dimensions {self.collective.axes} of {list(data.shape)}. Move others than the "
                "last dimension, or take a recipe with one scale, such as Float8CurrentScaling()"
            )
        moved = _as_bytes(send, scales.reshape(*rows, -1))
        return moved.reshape(-1, moved.shape[-1]), (1, None) if is_one else q.block


def _as_bytes(send, x):
    """Send x, with dtypes of one byte as uint8, because XLA widens float8 numbers where it cannot send them."""
    if x.dtype.itemsize > 1:
        return send(x)
    return lax.bitcast_convert_type(send(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def _forward(both, x, state: DotGeneralState, has_backward):
    """Return the results of `_transfer`, and the residuals `(q, step of the gradient, reading)`."""
    reading = reading_of(state)
    # Without a backward nothing quantizes a gradient, so the state of its quantizer is not read.
    states = state.input, None, state.output_grad if has_backward else None
    step, _, grad_step = read_states(both.quantizers, states, reading)
    source, codes, q = both.move(both.collective.send, both.quantizers[0], x, step, x.dtype)
    return (source, checkpoint_name(codes, RESIDUAL_NAME)), (q, grad_step, reading)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transfer(both, x, state):
    """Return the values that arrive, in the dtype of x, and their codes; XLA drops values that no code reads."""
    with _implementation.using(both.implementation):
        return _forward(both, x, state, False)[0]


def _transfer_fwd(both, x, state):
    # Warn of a gradient that leaves out the state: its scales would stay the same in all of training.
    warn_of_state(both.quantizers, [leaf.perturbed for leaf in jax.tree.leaves(state)])
    x, state = x.value, jax.tree.map(lambda leaf: leaf.value, state)
    with _implementation.using(both.implementation):
        results, residuals = _forward(both, x, state, True)
    return results, (checkpoint_name(residuals, RESIDUAL_NAME), Static(jax.typeof(x)))


def _transfer_bwd(both, residuals, cotangents):
    """Send the cotangent back as codes of `output_grad`; where devices add cotangents, in its own dtype."""
    (q, grad_step, reading), x = residuals
    ct, _ = cotangents
    # A cotangent of zeros is quantized all the same: x has run, so its state has a next value.
    if isinstance(ct, SymbolicZero):
        ct = jnp.zeros(ct.shape, ct.dtype)
    quantizer = HighPrecisionQuantizer() if both.collective.sums_back else both.quantizers[2]
    with _implementation.using(both.implementation):
        dx, _, grad = both.move(both.collective.send_back, quantizer, ct, grad_step, x.value.dtype)
        next_state = DotGeneralState(*next_states([q, None, grad], both.reduce, reading))
    # The cotangent of a replicated x is the sum over the devices.
    return _mesh.cotangent_of(x.value, dx), next_state


_transfer.defvjp(_transfer_fwd, _transfer_bwd, symbolic_zeros=True)
# Outside of `jit`, JAX runs no `custom_vjp` with symbolic zeros inside `shard_map`.
_compiled = jax.jit(_transfer, static_argnums=0, inline=True)
