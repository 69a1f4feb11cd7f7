"""Checks of whole answers before they are timed: each costs one pass on the device, and
NaN never passes.

The checks tell a right program from a wrong program, in every element or row; only the
tests compare bits.
"""

import functools

import jax
import jax.numpy as jnp

F32 = jnp.float32
# Largest error of a product's rows, see `expect_product`. Simulated Hopper tensor cores
# (terms cut to 13 bits below the largest of 32 products and the accumulator; K = 8192,
# normal numbers) are off by 2.0e-3 of the answer in the Euclidean norm with fast
# accumulation, by 1.3e-4 where f32 takes over every 128 products. Rounding to bfloat16
# adds 2**-9 / sqrt(3) = 1.1e-3. The largest error of thousands of rows is some four
# times as much: 9e-3 and 5e-3. A wrong scale gives more than 1, a lost tile of 128
# columns of 8192 at least sqrt(1 / 64) = 0.125.
PRODUCT_LIMITS = {"fast": 5e-2, "precise": 2e-2}


def expect(name: str, answer) -> None:
    """Raise an AssertionError unless `answer`, a bool[] on a device, is true."""
    if not bool(answer):
        raise AssertionError(f"{name}: wrong answer")


def expect_close(name, got, want, bound):
    """Raise an AssertionError unless `|got - want| < bound * |want|` in the Euclidean
    norm.
    """
    error = float(_distance(got, want))
    if not error < bound:
        raise AssertionError(
            f"{name}: off by {error:.2e} of the answer, expected less than {bound:.0e}"
        )


@jax.jit
def _distance(got, want):
    got, want = got.astype(F32), want.astype(F32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def expect_product(name, got, a, b, limit, a_scale_inv=1.0, b_scale_inv=1.0):
    """Raise an AssertionError unless `got` is
    `(a * a_scale_inv) @ (b * b_scale_inv).T`, by Freivalds' check.

    Both sides are multiplied by one random vector of signs, which takes two passes over
    a and b in f32 in place of a second product. The largest error of a row has to be
    less than `limit`, in units of the root mean square of rows.
    """
    error = float(_product_error(got, a, b, a_scale_inv, b_scale_inv))
    if not error < limit:
        raise AssertionError(
            f"{name}: a row is off by {error:.2e} of the rows, expected less than "
            f"{limit:.0e}"
        )


@jax.jit
def _product_error(got, a, b, a_scale_inv, b_scale_inv):
    # Sums take the place of products, for which XLA would first try its algorithms.
    signs = jax.random.rademacher(jax.random.key(0), (got.shape[1], 1), F32)
    through_b = jnp.sum(b.astype(F32) * b_scale_inv * signs, axis=0)
    want = jnp.sum(a.astype(F32) * a_scale_inv * through_b[None, :], axis=1)
    error = jnp.sum(got.astype(F32) * signs.T, axis=1) - want
    return jnp.max(jnp.abs(error)) / jnp.sqrt(jnp.mean(want**2))


def expect_codes(name, data, scale_inv, values):
    """Raise an AssertionError unless every e4m3 code, times its `scale_inv`, is one
    rounding away from its value.
    """
    expect(f"{name}: codes", _is_rounded(data, scale_inv, values))


@jax.jit
def _is_rounded(data, scale_inv, values):
    # Half a unit of the last place is 2**-4 of a normal number, and 2**-10 of the
    # scale_inv for subnormal codes. 2**-14 covers the f32 errors of the scale, of its
    # inverse, and of the values that a fused producer computes.
    values = values.astype(F32)
    # NaN where the scale is not finite
    error = jnp.abs(data.astype(F32) * scale_inv - values) - 2.0**-10 * scale_inv
    return jnp.all(error <= (2.0**-4 + 2.0**-14) * jnp.abs(values))


def expect_transposed(name, data, data_t):
    """Raise an AssertionError unless `data_t` has the bits of the transpose of
    `data`.
    """
    expect(f"{name}: data_t", _are_transposes(data, data_t))


@jax.jit
def _are_transposes(data, data_t):
    a, b = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (data, data_t))
    return jnp.all(a.T == b)


def expect_amax(name, amax, values):
    """Raise an AssertionError unless `amax` is that of `values`, up to the error of f32
    in computing them.
    """
    expect(f"{name}: amax", _is_amax(amax, values))


@jax.jit
def _is_amax(amax, values):
    want = jnp.max(jnp.abs(values.astype(F32)))
    return jnp.abs(amax - want) <= 2.0**-14 * want


@functools.partial(jax.jit, static_argnames=("block", "shape"))
def stretch(scale_inv, block, shape):
    """Repeat the scales of blocks for each element of `[m, n]`."""
    if scale_inv.dtype == jnp.float8_e8m0fnu:
        # the exponent of an f32; 2**-127 becomes 0, as no block of these cases has
        scale_inv = (
            jax.lax.bitcast_convert_type(scale_inv, jnp.uint8).astype(jnp.uint32) << 23
        )
        scale_inv = jax.lax.bitcast_convert_type(scale_inv, F32)
    for axis, (size, whole) in enumerate(zip(block, shape, strict=True)):
        scale_inv = jnp.repeat(scale_inv, size or whole, axis=axis)
    return scale_inv[: shape[0], : shape[1]]
