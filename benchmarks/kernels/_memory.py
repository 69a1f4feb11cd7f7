"""Kernels whose time is their memory traffic: elementwise ones, with a transpose, fused
producers, blocks, moments.
"""

import functools

import jax
import jax.numpy as jnp
from _gpu_answers import expect, expect_amax, expect_codes, expect_transposed, stretch
from _gpu_inputs import BF16, E4M3, normal

from jaxfp8 import ops
from jaxfp8.ops import _adam_update, _encode_moment

from ._work import F32, PRODUCT_SCALE, SCALE, Work, codes, one_array

NAMES = {BF16: "bf16", F32: "f32"}
MOMENTS = "signed", "squared"
BLOCKS = {
    "1x128": (1, 128),
    "128x128": (128, 128),
    "1x32": (1, 32),
    "row-wise": (1, None),
}


def amax(m, n, dtype):
    return Work(
        ops.amax,
        one_array((m, n), dtype),
        lambda result, x: expect_amax("amax", result, x),
    )


def quantize(m, n, dtype):
    def check(results, x):
        expect_codes("quantize", results[0], 1 / SCALE, x)
        expect_amax("quantize", results[1], x)

    return Work(lambda x: ops.quantize(x, SCALE, E4M3), one_array((m, n), dtype), check)


def quantize_transpose(m, n, dtype, sums):
    name = "quantize_transpose"

    def check(results, x):
        data, data_t, amax, *column_sums = results
        expect_codes(name, data, 1 / SCALE, x)
        expect_transposed(name, data, data_t)
        expect_amax(name, amax, x)
        for result in column_sums:
            expect(f"{name}: column_sums", _are_sums(result, x))

    def step(x):
        return ops.quantize_transpose(x, SCALE, E4M3, column_sums=sums)

    return Work(step, one_array((m, n), dtype), check)


@jax.jit
def _are_sums(result, x):
    # m additions in f32 in some order, ours and XLA's: each result is off by at most
    # m * 2**-24 of the magnitudes' sum.
    x = x.astype(F32)
    return jnp.all(
        jnp.abs(result - jnp.sum(x, axis=0))
        <= len(x) * 2.0**-23 * jnp.sum(jnp.abs(x), axis=0)
    )


def dequantize(m, n, dtype):
    def check(values, data):
        expect(
            "dequantize", jnp.all(values == (data.astype(F32) * SCALE).astype(dtype))
        )

    return Work(
        lambda data: ops.dequantize(data, SCALE, dtype),
        lambda seed: (codes(seed, (m, n)),),
        check,
    )


def _check_produced(name, values):
    """Check of `(data, data_t, amax)` against `values(*arguments)` in f32."""

    def check(results, *arguments):
        data, data_t, amax = results
        expected = jax.jit(values)(*(x.astype(F32) for x in arguments))
        expect_codes(name, data, 1 / PRODUCT_SCALE, expected)
        expect_transposed(name, data, data_t)
        expect_amax(name, amax, expected)

    return check


def quantize_activation(m, n, activation):
    def step(x):
        return ops.quantize_activation(x, PRODUCT_SCALE, E4M3, activation=activation)

    shape = (m, 2, n) if ops.is_gated(activation) else (m, n)
    check = _check_produced(
        "quantize_activation", lambda x: ops.activate(x, activation)
    )
    return Work(step, one_array(shape, BF16), check)


def quantize_activation_grad(m, n, activation):
    def arguments(seed):
        return normal(seed, (m, 2, n) if ops.is_gated(activation) else (m, n)), normal(
            seed + 1, (m, n)
        )

    def values(x, grad):
        return jax.vjp(lambda x: ops.activate(x, activation), x)[1](grad)[0].reshape(
            m, -1
        )

    def check(results, x, grad):
        data, data_t, amax = results
        matrices = data.reshape(m, -1), data_t.reshape(-1, m), amax
        _check_produced("quantize_activation_grad", values)(matrices, x, grad)

    def step(x, grad):
        return ops.quantize_activation_grad(
            x, grad, PRODUCT_SCALE, E4M3, activation=activation
        )

    return Work(step, arguments, check)


def quantize_pair(m, n):
    def arguments(seed):
        return normal(seed, (m, n)), normal(seed + 1, (m, n))

    def values(x, second):
        return jnp.concatenate([x, second], axis=1)

    def check(results, x, second):
        data, data_t, amax = results
        matrices = data.reshape(m, -1), data_t.reshape(-1, m), amax
        _check_produced("quantize_pair", values)(matrices, x, second)

    def step(x, second):
        return ops.quantize_pair(x, second, PRODUCT_SCALE, E4M3)

    return Work(step, arguments, check)


def quantize_norm(m, n, kind):
    def arguments(seed):
        vectors = (
            1 + 0.1 * normal(seed + i, (n,), F32)
            for i in range(2 if kind == "layer" else 1)
        )
        return normal(seed, (m, n)), *vectors

    def values(x, gamma, beta=None):
        return ops.normalize(x, gamma, beta, kind, 1e-6)

    def step(x, gamma, beta=None):
        return ops.quantize_norm(
            x, gamma, beta, PRODUCT_SCALE, E4M3, kind=kind, epsilon=1e-6
        )

    return Work(step, arguments, _check_produced("quantize_norm", values))


def scale_kind(block) -> dict:
    """The options of `quantize_blocks` for these blocks: MX has E8M0 scales."""
    return {"scale": "e8m0"} if block == (1, 32) else {}


def quantize_blocks(m, n, block, transpose):
    op = ops.quantize_blocks_transpose if transpose else ops.quantize_blocks

    def step(x):
        return op(x, E4M3, block=block, **scale_kind(block))

    def check(results, x):
        data, scale_inv, *transposed = results
        expect_codes(op.__name__, data, stretch(scale_inv, block, data.shape), x)
        if transposed:
            data, scale_inv = transposed
            expect_codes(
                f"{op.__name__}, transposed",
                data,
                stretch(scale_inv, block, data.shape),
                x.T,
            )

    # The amaxes of whole rows come first.
    return Work(step, one_array((m, n), BF16), check, reads=2 if None in block else 1)


def transpose_codes(m, n):
    def arguments(seed):
        return ops.quantize(normal(seed, (m, n)), 1.0, E4M3)[:1]

    def check(data_t, data):
        expect_transposed("transpose_codes", data, data_t)

    return Work(lambda data: ops.transpose_codes(data), arguments, check)


def encode_moment(m, n, squared):
    """A step of a moment, in which every block changes; the answer is that of jnp, to
    the bit.
    """

    def arguments(seed):
        blocks = m, -(-n // _encode_moment.MOMENT_BLOCK)
        keys = jax.random.bits(jax.random.key(seed), blocks, jnp.uint32)
        x = normal(seed + 1, (m, n), F32)
        moment = codes(seed, (m, n)), jnp.ones(blocks), jnp.ones(blocks, jnp.int8)
        return *moment, 1 + x**2 if squared else x, keys

    def step(*operands):
        return _encode_moment.encode_moment(*operands, squared=squared, axis=1)

    def check(results, *operands):
        with ops.implementation("reference"):
            expected = jax.jit(lambda *x: step(*x))(*operands)
        for result, reference in zip(results, expected, strict=True):
            expect("encode_moment", jnp.all(result == reference))

    return Work(step, arguments, check)


def adam_update(m, n, applies):
    """A step of Adam on one leaf; moments are those of jnp to the bit, and the rest but
    for its division and root.
    """

    def arguments(seed):
        blocks = m, -(-n // _encode_moment.MOMENT_BLOCK)
        mu, nu = (
            codes(seed, (m, n)),
            jnp.abs(codes(seed + 1, (m, n)).astype(F32)).astype(E4M3),
        )
        scales = jnp.ones(blocks), jnp.ones(blocks, jnp.int8)
        keys = jax.random.bits(jax.random.key(seed), (2, *blocks), jnp.uint32)
        grads, params = (normal(seed + i, (m, n), F32) for i in (2, 3))
        numbers = jnp.float32(
            [0.9, 0.1, 0.99, 0.01, 1.6, 9, 1e-12, 1e-8, 1e-3, 0.1, 0.5]
        )
        return (
            grads,
            params if applies else None,
            (mu, *scales),
            (nu, *scales),
            keys,
            numbers,
        )

    def step(*leaf):
        out, mu, nu = _adam_update.adam_update([_adam_update.AdamLeaf(*leaf)], [1])[0]
        return out, *mu, *nu

    def check(results, *leaf):
        with ops.implementation("reference"):
            out, *moments = jax.jit(lambda *x: step(*x))(*leaf)
        # A sum of terms below 16 is off by a few units of their last place where it
        # cancels.
        expect(
            "adam_update",
            jnp.all(jnp.abs(results[0] - out) <= 1e-5 * jnp.maximum(jnp.abs(out), 0.1)),
        )
        for result, reference in zip(results[1:], moments, strict=True):
            expect("adam_update", jnp.all(result == reference))

    return Work(step, arguments, check)


KERNELS = {
    **{
        f"amax {name}": functools.partial(amax, dtype=dtype)
        for dtype, name in NAMES.items()
    },
    **{
        f"quantize {name}": functools.partial(quantize, dtype=dtype)
        for dtype, name in NAMES.items()
    },
    **{
        f"quantize_transpose {name}{' with sums' if sums else ''}": functools.partial(
            quantize_transpose, dtype=dtype, sums=sums
        )
        for dtype, name in NAMES.items()
        for sums in (False, True)
    },
    **{
        f"quantize_activation {name}": functools.partial(
            quantize_activation, activation=name
        )
        for name in ("gelu", "silu_gated")
    },
    **{
        f"quantize_activation_grad {name}": functools.partial(
            quantize_activation_grad, activation=name
        )
        for name in ("gelu", "silu_gated")
    },
    **{
        f"quantize_norm {kind}": functools.partial(quantize_norm, kind=kind)
        for kind in ("rms", "layer")
    },
    **{
        f"quantize_blocks{suffix} {name}": functools.partial(
            quantize_blocks, block=block, transpose=bool(suffix)
        )
        for suffix in ("", "_transpose")
        for name, block in BLOCKS.items()
    },
    "transpose_codes": transpose_codes,
    "quantize_pair": quantize_pair,
    **{
        f"encode_moment {name}": functools.partial(
            encode_moment, squared=name == "squared"
        )
        for name in MOMENTS
    },
    "adam_update": functools.partial(adam_update, applies=False),
    "adam_update, parameters": functools.partial(adam_update, applies=True),
    **{
        f"dequantize to {name}": functools.partial(dequantize, dtype=dtype)
        for dtype, name in NAMES.items()
    },
}
