"""read_histories and write_histories: the state of delayed scaling, read before a loop
over layers, and written.

The state may be that of many layers. Of this state a step needs only a reading, six
numbers for each quantizer, and records as many. A product that is not in a loop reads
its state by `delayed_scales`, and writes it by the same `write_histories`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..numerics import E4M3, _scaling
from . import _ffi, _shapes
from ._amax import MAX_QUANTIZERS
from ._partition import WHOLE
from ._primitive import ONE, OpOfUnits, dims, halves

READING_NUMBERS = 6  # of each quantizer, in a reading and in what a step records

Pairs = Sequence[tuple[ArrayLike, ArrayLike]]


def read_histories(products, *, fp8_max=None):
    """Read the amax histories and the scales of products, each of k quantizers.

    For each quantizer the reading has six numbers: the newest entry of its history, the
    largest entry, the scale, a 0 that kernels raise in place, and the scale and
    scale_inv that `delayed_scales` gives for the largest entry. Entries that are not
    finite count as 0. Where an entry or the scale is below zero, which no training step
    makes, both amaxes of the reading are -1, and the results of `delayed_scales` NaN.

    Products with equal batch dimensions are read by one custom call, up to 64
    quantizers.

    Args:
        products: for each product k pairs of a history, f32 `[*batch, H]`, and a scale,
            f32 `[*batch, 1]`, which is the `scale_inv` of the last step. k is 1 to 64;
            the batch dimensions, k and H may differ; slot 0 of a history is the newest
            entry.
        fp8_max: for each product k numbers, the largest values of the FP8 formats; 448
            for all by default.

    Returns:
        For each product f32 `[*batch, 6 * k]`.

    Raises:
        TypeError: the op is differentiated.
    """
    fp8_max = (
        [(E4M3.max,) * len(pairs) for pairs in products] if fp8_max is None else fp8_max
    )
    readings = {}
    for call in _calls(products):
        numerators = tuple(
            tuple(_scaling.scale_numerator(value, 0) for value in fp8_max[i])
            for i in call
        )
        readings |= zip(
            call,
            _read(*_columns(products, call), spec=_ReadSpec(numerators)),
            strict=True,
        )
    return [readings[i] for i in range(len(products))]


def write_histories(products, recorded):
    """Write the next amax histories and scales of products, from what a step recorded.

    Equivalent to, for each quantizer:

        history = jnp.where((history > 0) & (history < inf), history, 0)
        newest = jnp.where((amax > 0) & (amax < inf), amax, 0)
        next_history = jnp.roll(history, -1).at[0].set(newest)
        stayed = (history < 0) | ((history > 0) & (history < inf))
        staying = jnp.where(stayed, history, 0).at[0].set(amax)
        next_history = jnp.where(stays == 0, next_history, staying)
        next_history = jnp.where(scale_inv == 0, 0, next_history)
        next_scale = scale_inv

    Args:
        products: the same argument as for `read_histories`.
        recorded: for each product f32 `[*batch, 6 * k]`: for each quantizer the amax,
            the scale_inv, `stays` and three numbers that are not read; or, for a single
            product, its k pairs of an amax and a scale_inv, f32 `[*batch, 1]`, where
            `stays` is 0. A scale_inv of 0 marks a quantizer that was not used: its
            results are zeros. A step records a 0 for `stays`; `update_state` sets it
            where a history has no new entry.

    Returns:
        For each product its k pairs of a history and a scale, in the shapes of the
        arguments.

    Raises:
        TypeError: the op is differentiated.
    """
    if len(products) == 1 and isinstance(recorded[0], (list, tuple)):
        return [_write_by_quantizer(products[0], recorded[0])]
    written = {}
    for call in _calls(products):
        counts = tuple(len(products[i]) for i in call)
        histories, _ = halves(_columns(products, call))
        results = _write(
            *histories,
            *(recorded[i] for i in call),
            spec=_WriteSpec(counts, by_quantizer=False),
        )
        pairs = zip(*halves(results), strict=True)
        written |= {i: list(itertools.islice(pairs, len(products[i]))) for i in call}
    return [written[i] for i in range(len(products))]


def _write_by_quantizer(pairs, recorded):
    """Write the state of one product, of whose quantizers the amaxes and scales are
    arrays of their own.
    """
    numbers = [pair[side] for side in (0, 1) for pair in recorded]
    histories = [history for history, _ in pairs]
    results = _write(
        *histories, *numbers, spec=_WriteSpec((1,) * len(pairs), by_quantizer=True)
    )
    return list(zip(*halves(results), strict=True))


def _calls(products):
    """Divide the products, given by their positions, among custom calls.

    The products of one call have the same batch dimensions, so that a mesh can cut all
    of them alike.
    """
    calls = {}
    for i, pairs in enumerate(products):
        calls_of_shape = calls.setdefault(pairs[0][1].shape, [[]])
        if (
            sum(len(products[j]) for j in calls_of_shape[-1]) + len(pairs)
            > MAX_QUANTIZERS
        ):
            calls_of_shape.append([])
        calls_of_shape[-1].append(i)
    return itertools.chain.from_iterable(calls.values())


def _columns(products, call):
    """Return the histories of some products, then the scales."""
    return [pair[side] for side in (0, 1) for i in call for pair in products[i]]


def _slices(counts):
    """Return the positions of the quantizers of each product."""
    ends = itertools.accumulate(counts, initial=0)
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _names(ranks, counts):
    """Name the dimensions of the histories, the scales, and the readings of products
    (or the recorded numbers).
    """
    # A batch may be cut, by layers or experts; a window and the numbers of a product
    # stay together.
    batch = dims("batch", ranks[0] - 1)
    histories, readings = (
        [(*batch, f"{WHOLE}_{kind}{i}") for i in range(count)]
        for kind, count in (("slot", sum(counts)), ("number", len(counts)))
    )
    return histories, [(*batch, *ONE)] * len(histories), readings


def _groups(histories):
    return [_shapes.merge_groups(history, history.ndim - 1) for history in histories]


class _ReadSpec(NamedTuple):
    """The static part of `read_histories`: the numerators of the scales of each
    product's quantizers.
    """

    numerators: tuple[tuple[float, ...], ...]

    @property
    def counts(self):
        return tuple(map(len, self.numerators))

    def units(self, operand_count):
        half, products = operand_count // 2, enumerate(_slices(self.counts))
        return [
            ([*places, *(half + i for i in places)], [product])
            for product, places in products
        ]

    def chosen(self, indices):
        return _ReadSpec(tuple(self.numerators[i] for i in indices))


def _amaxes(history, scale):
    """Return the newest and the largest entry of a history, f32 `[*batch, 1]`."""
    entries = _scaling.clean(history)
    newest, largest = entries[..., :1], _scaling.abs_max(entries, axis=-1)[..., None]
    is_below_zero = jnp.any(
        _scaling.below_zero(history), axis=-1, keepdims=True
    ) | _scaling.below_zero(scale)
    return [
        jnp.where(is_below_zero, jnp.float32(-1), amax) for amax in (newest, largest)
    ]


class _WriteSpec(NamedTuple):
    """The static part of `write_histories`: the number of quantizers of each product,
    and the form of `recorded`.

    With `by_quantizer` the recorded numbers are an array for each amax and each
    scale_inv.
    """

    counts: tuple[int, ...]
    by_quantizer: bool

    def units(self, operand_count):
        total = sum(self.counts)
        if self.by_quantizer:
            return [
                ([i, total + i, 2 * total + i], [i, total + i]) for i in range(total)
            ]
        products = enumerate(_slices(self.counts))
        return [
            ([*places, total + product], [*places, *(total + i for i in places)])
            for product, places in products
        ]

    def chosen(self, indices):
        return _WriteSpec(tuple(self.counts[i] for i in indices), self.by_quantizer)


def _next_history(history, amax, scale_inv, stays=None):
    """Drop slot 1, the oldest, and record the amax in slot 0; all arrays are bits of
    f32.

    With `stays`, whether each row stays: there the amax takes slot 0 and no other slot
    moves.
    """
    moved = lax.concatenate(
        [amax, history[..., 2:], history[..., :1]], history.ndim - 1
    )[..., : history.shape[-1]]
    is_entry = moved - jnp.uint32(1) < jnp.uint32(0x7F800000 - 1)  # 0 wraps around
    if stays is not None:
        stays = stays << 1 != 0
        moved = jnp.where(
            stays, lax.concatenate([amax, history[..., 1:]], history.ndim - 1), moved
        )
        is_below_zero = moved - jnp.uint32(0x80000001) < jnp.uint32(0x7F800000)
        is_entry = moved - jnp.uint32(1) < jnp.uint32(0x7F800000 - 1)
        is_entry |= stays & is_below_zero
    return jnp.where(is_entry & (scale_inv << 1 != 0), moved, jnp.uint32(0))


class _ReadHistories(OpOfUnits):
    name = "read_histories"

    def names(self, *ranks, spec):
        histories, scales, readings = _names(ranks, spec.counts)
        return [*histories, *scales], readings

    def sizes(self, *shapes, spec):
        return {
            f"{WHOLE}_number{i}": READING_NUMBERS * count
            for i, count in enumerate(spec.counts)
        }

    def reference(self, *operands, vmap_dims, spec):
        histories, scales = halves(operands)
        # The numbers of all quantizers are vectors, so that their scales are computed
        # once.
        amaxes = map(_amaxes, histories, scales)
        newest, largest, scale = (
            jnp.concatenate(x, axis=-1) for x in (*zip(*amaxes, strict=True), scales)
        )
        numerators = np.array(sum(spec.numerators, ()), np.float32)
        next_scales = _scaling.amax_to_scale(largest, scale, numerators)
        table = jnp.stack(
            (newest, largest, scale, jnp.zeros_like(scale), *next_scales), axis=-1
        )
        parts = (
            table[..., places.start : places.stop, :] for places in _slices(spec.counts)
        )
        return [
            part.reshape(*part.shape[:-2], part.shape[-2] * READING_NUMBERS)
            for part in parts
        ]

    def cpu(self, *operands, vmap_dims, spec):
        histories, scales = halves(operands)
        batch, groups = scales[0].shape[:-1], scales[0].size
        results = [
            ((groups, READING_NUMBERS * count), jnp.float32) for count in spec.counts
        ]
        operands = *_groups(histories), *(scale.reshape(-1) for scale in scales)
        numerators = np.array(sum(spec.numerators, ()), np.float32)
        readings = _ffi.call(
            "read_histories", results, *operands, numerators=numerators
        )
        return [reading.reshape(*batch, reading.shape[-1]) for reading in readings]


_read = _ReadHistories()


class _WriteHistories(OpOfUnits):
    name = "write_histories"

    def names(self, *ranks, spec):
        histories, scales, readings = _names(ranks, spec.counts)
        return [*histories, *(scales * 2 if spec.by_quantizer else readings)], [
            *histories,
            *scales,
        ]

    def on_one_device_only(self, spec):
        # On a mesh in jnp, which XLA fuses and moves together with the reductions of
        # the amaxes.
        return spec.by_quantizer

    def reference(self, *operands, vmap_dims, spec):
        # Move bits: XLA's CPU threads treat subnormal floats as zero, also in slices
        # and concatenations.
        bits = [
            lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
            for x in operands
        ]
        histories, numbers = bits[: sum(spec.counts)], bits[sum(spec.counts) :]
        if spec.by_quantizer:
            amaxes, scales = halves(numbers)
            written = map(_next_history, histories, amaxes, scales)
        else:
            columns = [
                reading[..., i : i + 1]
                for reading in numbers
                for i in range(reading.shape[-1])
            ]
            amaxes, scales, stays = (columns[i::READING_NUMBERS] for i in range(3))
            written = map(_next_history, histories, amaxes, scales, stays)
        return [lax.bitcast_convert_type(x, jnp.float32) for x in (*written, *scales)]

    def cpu(self, *operands, vmap_dims, spec):
        histories, recorded = operands[: sum(spec.counts)], operands[sum(spec.counts) :]
        batch, groups = histories[0].shape[:-1], _groups(histories)
        scales = [((math.prod(batch),), jnp.float32)] * len(groups)
        results = [(h.shape, jnp.float32) for h in groups] + scales
        # The histories of a product that is not in a loop are mostly arguments of the
        # program: XLA would copy them.
        aliases = {} if spec.by_quantizer else {i: i for i in range(len(groups))}
        numbers = [
            x.reshape(-1) if spec.by_quantizer else _shapes.merge(x, x.ndim - 1)
            for x in recorded
        ]
        written = _ffi.call(
            "write_histories", results, *groups, *numbers, aliases=aliases
        )
        histories, scales = halves(written)
        return [
            *(h.reshape(*batch, h.shape[-1]) for h in histories),
            *(scale.reshape(*batch, 1) for scale in scales),
        ]


_write = _WriteHistories()
