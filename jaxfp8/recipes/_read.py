"""read: from the state of a product to the scales of its quantizers, once; its
transpose writes the next state.

A step needs of a state of delayed scaling a scale, and records an amax. So products
take scales, and the cotangent of a scale is what its quantizer recorded. Histories are
read and written here alone, in the trace where the state is from: a state that a loop
closes over, or that several calls share, is read once and written once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir

from .. import ops
from .._jax import _compat
from .._jax._batching import batch_of, in_front, repeat_state
from .._jax._primitives import (
    compiled,
    is_differentiated,
    linear_primitive,
    refuse_derivative,
)
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
_AMAX = _compat.max_dtype("float32_max_amax", _scaling.clean)


def shared(state: Any) -> Any:
    """Return `state` as f32, such that the cotangents of all uses of its leaves meet in
    a max.
    """
    leaves, tree = jax.tree.flatten(state)
    return tree.unflatten(_compat.plain(_compat.with_max(leaves)))


def read(quantizers: Sequence[Quantizer], state: DotGeneralState) -> DotGeneralState:
    """Read the state of a product: return it with a Scale in the place of each state of
    delayed scaling. The transpose writes the next state.

    The states of users' quantizers stay as they are, and so does a state that
    `max_grad` has read before a loop.

    Args:
        quantizers: the quantizers of the product, of any kind.
        state: a state for each of them; None for a quantizer without state.
    """
    states, delayed = list(state.by_quantizer()), {}
    # A loop keeps its inputs for the backward anyway; a conversion would be a copy.
    is_read = _reading.reading_of(state) is not None
    for i, old in enumerate(states):
        is_delayed = is_read or isinstance(quantizers[i], DelayedScalingQuantizer)
        if isinstance(old, QuantizerState) and is_delayed:
            delayed[i], states[i] = old, None
    states = shared(states)
    if delayed and not is_read:
        of_delayed = tuple([quantizers[i] for i in delayed])
        scales = _scales(of_delayed, list(delayed.values()))
        delayed = dict(zip(delayed, scales, strict=True))
    for i, scale in delayed.items():
        states[i] = scale
    return DotGeneralState(*states)


def _scales(quantizers: tuple, states: list) -> list[Scale]:
    """Read states of delayed scaling, all at once."""
    leaves = _compat.with_max(jax.tree.leaves(states))
    results = _read_p.bind(*leaves, static=_Static(quantizers, selected()))
    histories = [None] * len(states)
    if _may_ask(quantizers, leaves):
        histories = _compat.plain(jax.lax.stop_gradient(leaves[::2]))
    rows = zip(results[::3], results[1::3], results[2::3], histories, strict=True)
    return [Scale(*row) for row in rows]


def _may_ask(quantizers, leaves) -> bool:
    """Tell whether a product may ask if a history is empty. It does not where it is
    sure to have a backward, unless the first step takes current scales.
    """
    is_current = any(q.first_step == "current" for q in quantizers)
    return is_current or not is_differentiated(leaves)


class _Static(NamedTuple):
    """The static part of a read.

    Attributes:
        quantizers: those of delayed scaling.
        implementation: the implementation of the ops.
        vmap_dims: how many leading dimensions of all leaves enumerate states.
    """

    quantizers: tuple
    implementation: str | None
    vmap_dims: int = 0


def _pairs(leaves) -> list[tuple]:
    return list(zip(leaves[::2], leaves[1::2], strict=True))


def _results(*leaves, static):
    def read_one(pairs):
        states = [QuantizerState(*pair) for pair in pairs]
        return jax.tree.leaves(scales_from(static.quantizers, states))

    for _ in range(static.vmap_dims):
        read_one = jax.vmap(read_one)
    with using(static.implementation):
        return read_one(_pairs(_compat.plain(leaves)))


def _types(*leaves, static):
    """Type scales like the scale of their state, in dtypes whose cotangents combine by
    max.
    """
    types = []
    for history, scale in _pairs(leaves):
        plain = scale.update(dtype=np.dtype(np.float32), weak_type=False)
        if _compat.is_max(history) or _compat.is_max(scale):
            types += plain.update(dtype=_AMAX), plain.update(dtype=_compat.MAX_DTYPE)
        else:
            types += plain, plain
        types.append(plain)
    return types


def _jvp(leaves, tangents, *, static):
    return _read_p.bind(*leaves, static=static), _tangents(leaves, tangents, static)


def _linearize(is_vjp, is_linear, *leaves, static):
    def linear(leaves, *tangents):
        return _tangents(leaves, tangents, static)

    has_tangent = [True, True, False] * len(static.quantizers)
    results = _read_p.bind(*leaves, static=static)
    return _compat.linearized(results, leaves, linear, has_tangent)


def _tangents(leaves, tangents, static):
    """Return the tangents of scales and scale_invs; those of the buffers are zero."""
    tangents = map(ad.instantiate_zeros, tangents)
    recorded = iter(_record_p.bind(*tangents, *leaves, static=static))
    types = _types(*map(jax.typeof, leaves), static=static)
    return [ad.Zero(t) if i % 3 == 2 else next(recorded) for i, t in enumerate(types)]


def _types_of_recorded(*args, static):
    types = _types(*args[len(args) // 2 :], static=static)
    return [aval for i, aval in enumerate(types) if i % 3 < 2]


def _transpose(cotangents, *args, static):
    """Write the next histories and scales from what the step recorded."""
    leaves = args[len(args) // 2 :]
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]

    def write_one(pairs, recorded):
        return ops.write_histories([pairs], [recorded])[0]

    for _ in range(static.vmap_dims):
        write_one = jax.vmap(write_one)
    with using(static.implementation):
        plain = _compat.plain([*leaves, *cotangents])
        pairs = _pairs(plain)
        written = write_one(pairs[: len(leaves) // 2], pairs[len(leaves) // 2 :])
    written = [leaf for pair in written for leaf in pair]
    dtypes = [leaf.dtype for leaf in leaves]
    return _compat.cast(written, dtypes) + [None] * len(leaves)


def _batch(args, dims, *, static):
    batch = batch_of(args, dims)
    pairs = zip(args, dims, strict=True)
    leaves = [in_front(batch, leaf, d, repeat_state) for leaf, d in pairs]
    more = static._replace(vmap_dims=static.vmap_dims + 1)
    results = _read_p.bind(*leaves, static=more)
    return results, [0] * len(results)


_read_p = _compat.OncePrimitive("fp8_read_histories")
_read_p.def_abstract_eval(_types)
_read_p.def_impl(compiled(_read_p))
mlir.register_lowering(_read_p, mlir.lower_fun(_results, multiple_results=True))
batching.primitive_batchers[_read_p] = _batch
ad.primitive_jvps[_read_p] = _jvp
_compat.linearizes_by(_read_p, _linearize)

# What a step records, as a linear function of the states: its transpose writes them.
_record_p = linear_primitive("fp8_write_histories", _types_of_recorded, _transpose)
ad.primitive_jvps[_record_p] = refuse_derivative


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
        scales[:3] = scales_of_reading(quantizers, reading, histories, has_backward)
    leaves, tree = jax.tree.flatten(scales)
    scales = tree.unflatten(_compat.plain(leaves))
    for i, scale in enumerate(scales):
        if isinstance(scale, Scale) and scale.history is not None:
            if has_backward and quantizers[i].first_step == "unit":
                scales[i] = dataclasses.replace(scale, history=None)
    return ByQuantizer(*scales)


def scales_of_reading(
    quantizers: Sequence[Quantizer],
    reading: jax.Array,
    histories: Sequence[jax.Array] | None = None,
    has_backward: bool = True,
) -> list[Scale]:
    """Return the scales that a reading has, `[6 * k]`, for the first k quantizers.

    The scales of other options than those of `DelayedScaling()` are computed here, of
    the reading's two amaxes; a function of the history takes it from `histories`.

    Raises:
        TypeError: a quantizer is not of delayed scaling.
    """
    numbers = ops.split_reading(jax.lax.stop_gradient(_compat.from_max(reading)))
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
        if quantizer.first_step == "current" or not has_backward:
            scales[i] = dataclasses.replace(scales[i], history=history)
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
    if reading is not None:
        ct = _reading.cotangent(quantized[:3], reduce, reading, amaxes)
        states[:3] = None, None, QuantizerState(None, ct)
        return DotGeneralState(*states)
    delayed, numbers = [], []
    for i, amax in enumerate(states):
        if amax is not None and isinstance(quantizers[i], DelayedScalingQuantizer):
            scale_inv = quantized[i].scale_inv
            numbers += reduce(amax, scale_inv), scale_inv
            delayed.append(i)
    dtypes = (_AMAX, _compat.MAX_DTYPE) * len(delayed)
    if delayed:
        numbers = _compat.cast(numbers, dtypes)
    for i, pair in zip(delayed, _pairs(numbers), strict=True):
        states[i] = Scale(*pair, None)
    return DotGeneralState(*states)
