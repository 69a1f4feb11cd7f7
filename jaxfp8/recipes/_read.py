"""read: from the state of a product to the scales of its quantizers, once; its
transpose writes the next state.

A step needs of a state of delayed scaling a scale, and records an amax. So products
take scales, and the cotangent of a scale is what its quantizer recorded. Histories are
read and written here alone, in the trace where the state is from: a state that a loop
closes over, or that several calls share, is read once and written once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from .._jax import _compat
from .._jax._primitives import is_differentiated
from ..numerics import _scaling
from ..ops._support import selected, using
from . import _reading
from ._delayed import DelayedScalingQuantizer, scales_from
from ._quantizer import Quantizer, no_reduction
from ._recipe import ByQuantizer
from ._state import DotGeneralState, QuantizerState, Scale
from ._tensor import QTensor

# The cotangents of a scale are amaxes, finite or not; those of a scale_inv need no
# cleaning.
_AMAX = _compat.MaxDtype("float32_max_amax", _scaling.clean)
_RECORDED = _AMAX, _compat.MAX_DTYPE


def shared(state: Any) -> Any:
    """Return `state` as f32, such that the cotangents of all uses of its leaves meet in
    a max.
    """
    return _compat.plain(_compat.with_max(state))


def read(quantizers: Sequence[Quantizer], state: DotGeneralState) -> DotGeneralState:
    """Read the state of a product: return it with a Scale in the place of each state of
    delayed scaling. The transpose writes the next state.

    The states of users' quantizers stay as they are, and so does a state that
    `max_grad` has read before a loop.

    Args:
        quantizers: the quantizers of the product, of any kind.
        state: a state for each of them; None for a quantizer without state.
    """
    states, of_delayed, delayed = list(state.by_quantizer()), [], {}
    is_read = _reading.reading_of(state) is not None
    for i, old in enumerate(states):
        is_delayed = is_read or isinstance(quantizers[i], DelayedScalingQuantizer)
        if isinstance(old, QuantizerState) and is_delayed:
            of_delayed.append(quantizers[i])
            delayed[i], states[i] = old, None
    states, scales = shared(states), delayed.values()
    # A loop keeps its inputs for the backward anyway; a conversion would be a copy.
    if delayed and not is_read:
        scales = _scales(tuple(of_delayed), list(scales))
    for i, scale in zip(delayed, scales, strict=True):
        states[i] = scale
    return DotGeneralState(*states)


def _scales(quantizers: tuple, states: list) -> list[Scale]:
    """Read states of delayed scaling, all at once."""
    leaves = _compat.with_max(jax.tree.leaves(states))
    results = _compat.once(_read_scales, leaves, quantizers, selected())
    histories = [None] * len(states)
    if _may_ask(quantizers, leaves):
        histories = _compat.plain(jax.lax.stop_gradient(leaves[::2]))
    rows = zip(results[::3], results[1::3], results[2::3], histories, strict=True)
    return [Scale(*row) for row in rows]


def _may_ask(quantizers, leaves) -> bool:
    """Tell whether a product may ask if a history is empty. It does not where it is
    sure to have a backward, unless the first step takes current scales.
    """
    is_current = any([q.first_step == "current" for q in quantizers])
    return is_current or not is_differentiated(leaves)


def _read_scales(leaves, quantizers, implementation) -> list[jax.Array]:
    """Return the scale and scale_inv of each state, in dtypes whose cotangents combine
    by max, and its buffer, which has no cotangent.
    """
    dtypes = (*_RECORDED, np.dtype(np.float32)) * len(quantizers)
    pairs = list(zip(leaves[::2], leaves[1::2], strict=True))

    def read(pairs):
        states = [QuantizerState(*pair) for pair in pairs]
        with using(implementation):
            results = jax.tree.leaves(scales_from(quantizers, states))
        return _compat.cast(results, dtypes)

    def write(pairs, recorded):
        recorded = list(zip(recorded[::3], recorded[1::3], strict=True))
        with using(implementation):
            return ops.write_quantizers(pairs, recorded)

    results = _reading.with_next_states(read, write, pairs)
    results[2::3] = map(jax.lax.stop_gradient, results[2::3])
    return results


def scales_of(
    quantizers: Sequence[Quantizer], state: DotGeneralState, has_backward: bool = True
) -> ByQuantizer:
    """Return what the quantizers of a product take: a Scale for delayed scaling, else
    the state. Here it is known whether a product has a backward, and so whether it may
    ask for its history.

    Args:
        quantizers: the quantizers of the product.
        state: the result of `read`, of one product.
        has_backward: whether the product is differentiated.

    Raises:
        TypeError: the state was read before a loop, and a quantizer that the reading
            covers is not of delayed scaling.
    """
    scales, reading = list(state.by_quantizer()), _reading.reading_of(state)
    if reading is not None:
        histories = [old.amax_history for old in scales[:3]]
        scales[:3] = scales_of_reading(quantizers, reading, histories)
    for i, scale in enumerate(scales):
        if has_backward and isinstance(scale, Scale) and scale.history is not None:
            if quantizers[i].first_step == "unit":
                scales[i] = scale._replace(history=None)
    return ByQuantizer(*_compat.plain(scales))


def scales_of_reading(
    quantizers: Sequence[Quantizer],
    reading: jax.Array,
    histories: Sequence[jax.Array] | None = None,
) -> list[Scale]:
    """Return the scales that a reading has, `[6 * k]`, for the first k quantizers.

    The scales of other options than those of `DelayedScaling()` are computed here, of
    the reading's two amaxes; a function of the history takes it from `histories`.
    Without `histories` the result has none.

    Raises:
        TypeError: a quantizer is not of delayed scaling.
    """
    numbers = ops.split_reading(jax.lax.stop_gradient(_compat.plain(reading)))
    quantizers = quantizers[: len(numbers)]
    if not all(isinstance(q, DelayedScalingQuantizer) for q in quantizers):
        raise TypeError(
            "max_grad: tree: expected the QuantizerStates in a DotGeneralState with a "
            "leading dimension to be of delayed scaling, got those of "
            f"{quantizers}; return another class from Quantizer.init"
        )
    scales = []
    for i, (history, old_scale, zero, scale, scale_inv) in enumerate(numbers):
        quantizer, algo = quantizers[i], quantizers[i].amax_compute_algo
        history = shared(histories[i]) if callable(algo) else history
        state = QuantizerState(history, old_scale)
        is_default = algo == "max" and quantizer.margin == 0
        if is_default and quantizer.fp8_dtype == _reading.FP8_DTYPES[i]:
            scales.append(Scale(scale, scale_inv, zero))
        else:
            scales += scales_from([quantizer], [state])
        if histories is not None:
            scales[i] = scales[i]._replace(history=history)
    return scales


def reading_suffices(quantizers: Sequence[Quantizer]) -> bool:
    """Tell whether the reading of a product suffices for its scales: no quantizer needs
    a history or the tensor.
    """
    return all(
        isinstance(q.amax_compute_algo, str) and q.first_step == "unit"
        for q in quantizers[:3]
    )


def cotangent(
    quantizers: Sequence[Quantizer],
    quantized: Sequence[QTensor | None],
    reading: jax.Array | None = None,
    reduce: Any = no_reduction,
    amaxes: jax.Array | None = None,
) -> DotGeneralState:
    """Return the cotangent of the result of `read`, from the tensors that were
    quantized.

    Args:
        quantizers: the quantizers of the product.
        quantized: a QTensor for each of them; None for a tensor that was not quantized,
            whose state stays.
        reading: the reading of the product, where its state was read before a loop.
        reduce: see `OperandOptions.reduce`.
        amaxes: see `ops.join_recorded`.
    """
    states = [None if q is None else q.recorded for q in quantized]
    if reading is None:
        for i, amax in enumerate(states):
            if amax is not None and isinstance(quantizers[i], DelayedScalingQuantizer):
                scale_inv = quantized[i].scale_inv
                pair = reduce(amax, scale_inv), scale_inv
                states[i] = Scale(*_compat.cast(pair, _RECORDED), None)
        return DotGeneralState(*states)
    zero = jnp.zeros((1,), jnp.float32)
    recorded = [(zero, zero)] * 3
    for i, amax in enumerate(states[:3]):
        if amax is not None:
            recorded[i] = amax, quantized[i].scale_inv
    in_loop = reading.dtype == _reading.READING
    ct = ops.join_recorded(recorded, amaxes if in_loop else None, in_loop=in_loop)
    ct = _compat.to_max(reduce(ct, reading), reading.dtype)
    states[:3] = None, None, QuantizerState(None, ct)
    return DotGeneralState(*states)
