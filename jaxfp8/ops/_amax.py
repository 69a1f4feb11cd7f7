"""amax, the largest magnitude of an array, and amax_to_scale, the scale of a tensor from its amax."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..numerics import _scaling, _tpu
from . import _checks, _ffi, _shapes
from ._primitive import ONE, Op, dims


def amax(x: ArrayLike) -> jax.Array:
    """Compute the largest magnitude, the max of `|x|`.

    Equivalent to `jnp.max(jnp.abs(x.astype(f32)), initial=0)`, with NaN counted as +inf before the reduction.

    Args:
        x: bfloat16, float16 or float32, any shape.

    Returns:
        f32[]; 0 for an empty array, inf where x has an Inf or a NaN.

    Raises:
        TypeError: x has another dtype; or the op is differentiated.
    """
    return _amax(_checks.high_precision("amax", "x", x))[0].reshape(())


class _Amax(Op):
    name = "amax"

    def names(self, x):
        return [dims("x", x)], [ONE]

    def reference(self, x, vmap_dims):
        return (_shapes.abs_max(x, vmap_dims),)

    def tpu(self, x, vmap_dims, devices):
        if vmap_dims:
            return super().tpu(x, vmap_dims=vmap_dims, devices=devices)
        with _tpu.devices(devices):
            return (_tpu.abs_max_by_parts(x).reshape(1),)

    def cpu(self, x, vmap_dims):
        groups = _shapes.merge(x, vmap_dims)
        (amaxes,) = _ffi.call("amax", [(groups.shape[:1], jnp.float32)], groups)
        return (_shapes.vmapped_amaxes(amaxes, x.shape[:vmap_dims]),)


_amax = _Amax()


def amax_to_scale(
    amax: ArrayLike, stored: ArrayLike, *, fp8_max: float, margin: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Compute the scale that maps `amax` to `fp8_max / 2**margin`, and its inverse.

    Equivalent to, in f32, each division rounded correctly and the scale clamped to [2**-126, 2**126]:

        scale = NaN                            if amax < 0 or stored < 0
                fp8_max / amax / 2**margin     else if 0 < amax < inf
                1 / stored                     else if 0 < stored < inf
                1                              else
        scale_inv = 1 / scale

    Args:
        amax: f32[] or f32[1].
        stored: f32[] or f32[1], the last `scale_inv`; its inverse is the scale where `amax` is 0 or not finite.
        fp8_max: largest value of the FP8 format, 448 or 57344.
        margin: headroom in powers of two, -64 to 64.

    Returns:
        `(scale, scale_inv)`, both f32[1].

    Raises:
        TypeError: amax or stored is not float32; or the op is differentiated.
        ValueError: amax or stored has another shape.
    """
    amax = _checks.scale("amax_to_scale", "amax", amax)
    stored = _checks.scale("amax_to_scale", "stored", stored)
    return tuple(_amax_to_scale(amax, stored, numerator=_scaling.scale_numerator(fp8_max, margin)))


class _AmaxToScale(Op):
    name = "amax_to_scale"

    def names(self, *ranks, numerator):
        return [ONE, ONE], [ONE, ONE]

    def reference(self, amax, stored, vmap_dims, numerator):
        return _scaling.amax_to_scale(amax, stored, numerator)

    def cpu(self, amax, stored, vmap_dims, numerator):
        flat = amax.reshape(-1), stored.reshape(-1)
        results = [(flat[0].shape, jnp.float32)] * 2
        scales = _ffi.call("amax_to_scale", results, *flat, numerator=np.float32(numerator))
        return [scale.reshape(amax.shape) for scale in scales]


_amax_to_scale = _AmaxToScale()
