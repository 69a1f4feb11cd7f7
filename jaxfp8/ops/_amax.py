"""amax, the largest magnitude of an array; amax_to_scale and delayed_scales: scales
from one amax or from histories.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..numerics import _scaling, _tpu
from . import _checks, _shapes
from ._primitive import ONE, SLOTS, Op, OpOfUnits, dims, halves

MAX_QUANTIZERS = 64  # of one custom call: common/histories.h


def amax(x: ArrayLike) -> jax.Array:
    """Compute the largest magnitude, the max of `|x|`.

    Equivalent to `jnp.max(jnp.abs(x.astype(f32)), initial=0)`, with NaN counted as +inf
    before the reduction.

    Args:
        x: bfloat16, float16 or float32, any shape.

    Returns:
        f32[]; 0 for an empty array, inf where x has an Inf or a NaN.

    Raises:
        TypeError: x has another dtype; or the op is differentiated.
    """
    return _Amax()(_checks.high_precision("amax", "x", x))[0].reshape(())


class _Amax(Op):
    name = "amax"

    def names(self, x):
        return [((), dims("x", x))], [ONE]

    def reference(self, x):
        return (_shapes.abs_max(x, self.vmap_dims),)

    def tpu(self, x):
        if self.vmap_dims:
            return self.reference(x)
        return (_tpu.abs_max_by_parts(x).reshape(1),)


def amax_to_scale(amax, stored, *, fp8_max, margin=0.0):
    """Compute the scale that maps `amax` to `fp8_max / 2**margin`, and its inverse.

    Equivalent to, in f32, each division rounded correctly and the scale clamped to
    [2**-126, 2**126]:

        scale = NaN                            if amax < 0 or stored < 0
                fp8_max / amax / 2**margin     else if 0 < amax < inf
                1 / stored                     else if 0 < stored < inf
                1                              else
        scale_inv = 1 / scale

    Args:
        amax: f32[] or f32[1].
        stored: f32[] or f32[1], the last `scale_inv`; its inverse is the scale where
            `amax` is 0 or not finite.
        fp8_max: largest value of the FP8 format, 448 or 57344.
        margin: headroom in powers of two, -64 to 64.

    Returns:
        `(scale, scale_inv)`, both f32[1].

    Raises:
        TypeError: the op is differentiated.
    """
    op = _AmaxToScale(_scaling.scale_numerator(fp8_max, margin))
    return tuple(op(jnp.reshape(amax, 1), jnp.reshape(stored, 1)))


class _AmaxToScale(Op):
    """The numerator of the scale is `fp8_max / 2**margin`."""

    name = "amax_to_scale"
    numerator: np.float32

    def names(self, *ranks):
        return [ONE, ONE], [ONE, ONE]

    def reference(self, amax, stored):
        return _scaling.amax_to_scale(amax, stored, self.numerator)

    def attributes(self):
        return {"numerator": self.numerator}


def delayed_scales(histories, stored, *, fp8_max, margin=0.0, algo="max"):
    """Compute the scales of several quantizers from their amax histories.

    Equivalent to, for each quantizer:

        history = jnp.where((history > 0) & (history < inf), history, 0)
        # history[0] with "most_recent"; -1 if an entry was below zero
        amax = jnp.max(history)
        scale, scale_inv = amax_to_scale(amax, stored, fp8_max=fp8_max, margin=margin)

    `write_histories` gives the next histories. Slot 0 of a history is the newest entry,
    slot 1 the oldest.

    Args:
        histories: k arrays f32 `[H]`, k from 1 to 64; H may differ.
        stored: k arrays f32[] or f32[1]: the `scale_inv`s of the last step; their
            inverses are the scales of histories without an amax.
        fp8_max: k numbers, the largest values of the FP8 formats, 448 or 57344.
        margin: headroom in powers of two, -64 to 64.
        algo: `"max"` or `"most_recent"`.

    Returns:
        For each quantizer `(scale, scale_inv, amax)`, f32[1]: the scales as
        `amax_to_scale` gives them, and a 0, a buffer for `quantize` to raise.

    Raises:
        TypeError: the op is differentiated.
    """
    numerators = tuple([_scaling.scale_numerator(value, margin) for value in fp8_max])
    operands = *histories, *[jnp.reshape(value, 1) for value in stored]
    results = _DelayedScales(numerators, algo == "most_recent")(*operands)
    return [results[i :: len(histories)] for i in range(len(histories))]


def history_names(op, batch, i=0):
    """Name the dimensions of history i. A custom call takes a single history without a
    dimension for groups.
    """
    groups = (batch,) if batch or op.vmap_dims else ()
    return *groups, (f"{SLOTS}{i}",)


def amaxes(history):
    """Return in jnp the newest and the largest entry of a history, f32 `[*batch, 1]`;
    both are -1 where an entry is below zero.
    """
    # An entry below zero counts as infinite, so that one reduction finds it and the
    # largest entry.
    is_below_zero, history = _scaling.below_zero(history), _scaling.clean(history)
    infinity = np.full(history.shape, np.inf, np.float32)
    marked = lax.select(is_below_zero, infinity, history)
    largest = _scaling.abs_max(marked, axis=-1)[..., None]
    entries = history[..., :1], largest
    return [jnp.where(largest == jnp.inf, jnp.float32(-1), x) for x in entries]


class _DelayedScales(OpOfUnits):
    """The units have the numerators of their scales, `fp8_max / 2**margin`;
    `most_recent` says whether the newest amax counts alone.
    """

    name = "delayed_scales"
    most_recent: bool

    def owners(self, operand_count):
        units = list(range(operand_count // 2))
        return units * 2, units * 3

    def names(self, *ranks):
        count = len(ranks) // 2
        # No mesh cuts a history: the maximum of a part is no scale.
        slots = [history_names(self, (), i) for i in range(count)]
        return slots + [ONE] * count, [ONE] * (3 * count)

    def reference(self, *operands):
        results = []
        for history, stored, numerator in zip(
            *halves(operands), self.of_units, strict=True
        ):
            newest, largest = amaxes(history)
            amax = newest if self.most_recent else largest
            scales = _scaling.amax_to_scale(amax, stored, numerator)
            results.append((*scales, jnp.zeros_like(amax)))
        return [part for parts in zip(*results, strict=True) for part in parts]

    def attributes(self):
        numerators = np.array(self.of_units, np.float32)
        return {"numerators": numerators, "most_recent": self.most_recent}
