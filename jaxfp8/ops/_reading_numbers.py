"""split_reading and join_recorded: the numbers of a reading as arrays, and what a step
records as one.
"""

import itertools
import math

import jax.numpy as jnp
from jax import lax

from . import _ffi, _shapes
from ._partition import WHOLE
from ._primitive import ONE, OpOfCpus, dims, halves
from ._readings import READING_NUMBERS

# the numbers in each part of a quantizer's reading: both amaxes are one part
_PARTS = (2, 1, 1, 1, 1)


def split_reading(reading):
    """Return the parts of a reading, each an array.

    Args:
        reading: f32 `[6 * k]`, of a product in one iteration of a loop.

    Returns:
        For each quantizer a history `(2,)`, the newest and the largest entry; and
        stored, a zero, scale and scale_inv, `(1,)`. The history gives the scale and the
        emptiness of the whole.

    Raises:
        TypeError: the op is differentiated.
    """
    count = reading.shape[-1] // READING_NUMBERS
    parts = _split(reading, spec=count)
    return [parts[i::count] for i in range(count)]


def join_recorded(recorded):
    """Put together what a product recorded: f32 `[6 * k]`, with 0 for the others, so
    that no history stays.

    Args:
        recorded: for each quantizer an amax and a scale_inv, f32 `(1,)`.

    Raises:
        TypeError: the op is differentiated.
    """
    return _join(
        *(pair[side] for side in (0, 1) for pair in recorded), spec=len(recorded)
    )[0]


class _SplitReading(OpOfCpus):
    # the spec is the number of the product's quantizers
    name = "split_reading"

    def names(self, reading, spec):
        batch = dims("batch", reading - 1)
        numbers = [(*batch, *ONE)] * (spec * (len(_PARTS) - 1))
        return [(*batch, f"{WHOLE}_number")], [
            (*batch, f"{WHOLE}_pair")
        ] * spec + numbers

    def sizes(self, reading, spec):
        return {f"{WHOLE}_pair": _PARTS[0]}

    def reference(self, reading, vmap_dims, spec):
        # Columns of the parts of one quantizer, from which those of the next are six
        # numbers away.
        ends = list(itertools.pairwise(itertools.accumulate(_PARTS, initial=0)))
        firsts = range(0, READING_NUMBERS * spec, READING_NUMBERS)
        return [
            reading[..., first + start : first + end]
            for start, end in ends
            for first in firsts
        ]

    def cpu(self, reading, vmap_dims, spec):
        batch = reading.shape[:-1]
        numbers = _shapes.merge(reading, len(batch))
        groups = numbers.shape[:1]
        sizes = [size for size in _PARTS for _ in range(spec)]
        results = [
            ((*groups, size) if size > 1 else groups, jnp.float32) for size in sizes
        ]
        parts = _ffi.call("split_reading", results, numbers)
        return [
            part.reshape(*batch, size) for part, size in zip(parts, sizes, strict=True)
        ]


_split = _SplitReading()


class _JoinRecorded(OpOfCpus):
    # the spec is as above
    name = "join_recorded"

    def names(self, *ranks, spec):
        batch = dims("batch", ranks[0] - 1)
        return [(*batch, *ONE)] * len(ranks), [(*batch, f"{WHOLE}_number")]

    def sizes(self, *shapes, spec):
        return {f"{WHOLE}_number": READING_NUMBERS * spec}

    def reference(self, *operands, vmap_dims, spec):
        (*amaxes, amax), scale_invs = halves(operands)
        axis = amax.ndim - 1
        rest = jnp.zeros((*amax.shape[:-1], READING_NUMBERS - 2), jnp.float32)
        pairs = zip((*amaxes, jnp.zeros_like(amax)), scale_invs, strict=True)
        row = lax.concatenate([x for pair in pairs for x in (*pair, rest)], axis)
        # The amax of the gradient comes last: XLA moves the all-reduce of an amax out
        # of a loop where nothing but updates of slices is between it and the result of
        # the loop.
        return (
            lax.dynamic_update_slice_in_dim(
                row, amax, READING_NUMBERS * (spec - 1), axis
            ),
        )

    def cpu(self, *operands, vmap_dims, spec):
        batch = operands[0].shape[:-1]
        results = [((math.prod(batch), READING_NUMBERS * spec), jnp.float32)]
        (recorded,) = _ffi.call(
            "join_recorded", results, *(x.reshape(-1) for x in operands)
        )
        return (recorded.reshape(*batch, recorded.shape[-1]),)


_join = _JoinRecorded()
