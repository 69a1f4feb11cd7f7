"""Ops under jit, vmap, remat and donation: the same bits as the plain call, which other
tests compare with the oracle.

All numbers are integers or powers of two, so that every product and sum is exact and
the comparison bitwise.
"""

import concurrent.futures
import contextvars
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from jax.experimental.layout import Format, Layout
from oracle import BF16, F32, blocks as oracle_blocks

from jaxfp8 import ops

from . import cases
from .conftest import EMULATED

IMPLEMENTATIONS = (
    "cpu",
    "reference",
    EMULATED,
    pytest.param("gpu", marks=pytest.mark.gpu),
)
E4M3, E5M2 = oracle.E4M3.dtype, oracle.E5M2.dtype
OUTER, INNER = 2, 3


def integers(*shape, dtype=F32, largest=8):
    """Of each member, some of them as large as others are in total."""
    rng = np.random.default_rng(len(shape) + sum(shape))
    return rng.integers(-largest, largest + 1, (OUTER, INNER, *shape)).astype(dtype)


def powers(*shape, dtype=F32):
    exponents = np.random.default_rng(sum(shape)).integers(
        -3, 4, (OUTER, INNER, *shape)
    )
    return (
        np.uint8(exponents + 127).view(dtype)
        if dtype == oracle_blocks.E8M0
        else np.ldexp(F32(1), exponents)
    )


def gated(*shape):
    """Arguments of silu where its value and its derivative are exact: far from zero."""
    return 128 * integers(*shape, largest=1)


AMAX = F32([[0, 1e6, 1], [3, 0, 2]])
PRODUCT = functools.partial(ops.scaled_matmul, out_dtype=jnp.float32, precise=True)
RAGGED = functools.partial(ops.ragged_matmul, out_dtype=jnp.float32, precise=True)
BLOCKS = functools.partial(ops.block_scaled_matmul, out_dtype=jnp.float32, precise=True)
X, S = cases.random_values((6, 10), BF16, 1), F32(3.3)


def amaxes(*shape):
    """Histories, and what else is not below zero; all of some members is zero, so that
    the stored scale counts.
    """
    return np.abs(integers(*shape)) * F32([[1, 0, 1], [0, 1, 1]]).reshape(
        OUTER, INNER, *(1,) * len(shape)
    )


def as_products(*leaves):
    """Histories and scales as two products, of two quantizers and one."""
    pairs = list(zip(leaves[::2], leaves[1::2], strict=True))
    return [pairs[:2], pairs[2:]]


PRODUCTS = amaxes(4), powers(1), amaxes(7), 2 * powers(1), amaxes(3), 4 * powers(1)
GROUP_SIZES = np.int32([[[4, 5], [0, 3], [9, 0]], [[1, 1], [0, 0], [2, 7]]])
# Operands of a product, and their scales.
OPERANDS = integers(6, 33, dtype=E4M3), integers(7, 33, dtype=E5M2), powers(), powers()
# The op as a function of what may be batched; each array has a value for every member
# of a batch of batches.
CALLS = {
    "amax": (ops.amax, integers(6, 10)),
    "quantize": (
        lambda x, s, a: ops.quantize(x, s, E4M3, amax=a),
        integers(6, 10, dtype=BF16),
        powers(),
        AMAX,
    ),
    "quantize_transpose": (
        lambda x, s, a: ops.quantize_transpose(x, s, E4M3, amax=a, column_sums=True),
        integers(6, 10, dtype=BF16),
        powers(),
        AMAX,
    ),
    "dequantize": (
        lambda x, s: ops.dequantize(x, s, F32),
        integers(6, 10, dtype=E4M3),
        powers(),
    ),
    "amax_to_scale": (
        lambda a, s: ops.amax_to_scale(a, s, fp8_max=448.0),
        AMAX,
        powers(),
    ),
    "delayed_scales": (
        lambda h, k, s, t: ops.delayed_scales([h, k], [s, t], fp8_max=[448.0, 57344.0]),
        amaxes(4),
        amaxes(7),
        powers(),
        2 * powers(),
    ),
    "read_histories": (
        lambda *leaves: ops.read_histories(as_products(*leaves)),
        *PRODUCTS,
    ),
    "write_histories": (
        lambda *leaves: ops.write_histories(as_products(*leaves[:6]), leaves[6:]),
        *PRODUCTS,
        amaxes(12),
        amaxes(6),
    ),
    "write_histories, a product": (
        lambda h, k, s, t, a, b: ops.write_histories(
            [[(h, s), (k, t)]], [[(a, s), (b, t)]]
        ),
        amaxes(4),
        amaxes(7),
        powers(1),
        2 * powers(1),
        amaxes(1),
        3 * powers(1),
    ),
    "read_rows": (
        lambda h, s: ops.read_rows([(h, s)], fp8_max=[448.0]),
        amaxes(3, 4),
        powers(3, 1),
    ),
    "write_rows": (
        lambda h, s, a, b: ops.write_rows([(h, s)], [ops.join_recorded([(a, b)])] * 3),
        amaxes(3, 4),
        powers(3, 1),
        amaxes(1),
        powers(1),
    ),
    "count": (
        lambda x, s: ops.count_saturated_and_flushed(x, s, E4M3),
        100 * integers(6, 10),
        powers(),
    ),
    "quantize_blocks": (
        lambda x: ops.quantize_blocks(x, E4M3, block=(4, 3)),
        integers(6, 10),
    ),
    "quantize_blocks_transpose": (
        lambda x: ops.quantize_blocks_transpose(x, E5M2, block=(1, 32), scale="e8m0"),
        integers(6, 40, dtype=BF16),
    ),
    "transpose_blocks": (
        lambda x, s: ops.transpose_blocks(x, s, block=(1, 4)),
        integers(6, 8, dtype=E4M3),
        powers(6, 2, dtype=oracle_blocks.E8M0),
    ),
    "quantize_activation": (
        lambda x, s, a: ops.quantize_activation(
            x, s, E4M3, activation="silu_gated", amax=a
        ),
        gated(6, 2, 8),
        powers(),
        AMAX,
    ),
    "quantize_activation_grad": (
        lambda x, g, s, a: ops.quantize_activation_grad(
            x, g, s, E5M2, activation="silu_gated", amax=a, column_sums=True
        ),
        gated(6, 2, 8),
        integers(6, 8),
        powers(),
        AMAX,
    ),
    "quantize_norm": (
        lambda x, gamma, beta, s: ops.quantize_norm(
            x, gamma, beta, s, E4M3, kind="layer", epsilon=1.0
        ),
        integers(6, 16),
        integers(16),
        integers(16),
        powers(),
    ),
    "quantize_pair": (
        lambda x, y, s, a: ops.quantize_pair(x, y, s, E4M3, amax=a),
        integers(6, 8),
        100 * integers(6, 8),
        powers(),
        AMAX,
    ),
    "scaled_matmul": (
        lambda a, b, s, t, bias, sum_: PRODUCT(a, b, s, t, bias=bias, accumulator=sum_),
        *OPERANDS,
        integers(7),
        integers(6, 7),
    ),
    "scaled_matmul of codes alone": (PRODUCT, *OPERANDS),
    "scaled_matmul of batches": (
        lambda a, b, s, bias: PRODUCT(a, b, s, F32(2), bias=bias, batch=1),
        integers(2, 6, 33, dtype=E4M3),
        integers(2, 7, 33, dtype=E5M2),
        powers(),
        integers(2, 7),
    ),
    "block_scaled_matmul": (
        functools.partial(BLOCKS, a_block=(1, 32), b_block=(1, 32)),
        integers(6, 64, dtype=E4M3),
        integers(7, 64, dtype=E4M3),
        powers(6, 2, dtype=oracle_blocks.E8M0),
        powers(7, 2, dtype=oracle_blocks.E8M0),
    ),
    "block_scaled_matmul by a tensor": (
        functools.partial(BLOCKS, a_block=(1, 128), b_block=None),
        integers(6, 160, dtype=E4M3),
        integers(7, 160, dtype=E4M3),
        powers(6, 2),
        powers(1),
    ),
    "ragged_matmul, rows": (
        functools.partial(RAGGED, ragged="rows"),
        integers(9, 8, dtype=E4M3),
        integers(2, 5, 8, dtype=E5M2),
        powers(),
        powers(),
        GROUP_SIZES,
    ),
    "ragged_matmul, contraction": (
        functools.partial(RAGGED, ragged="contraction"),
        integers(8, 9, dtype=E4M3),
        integers(5, 9, dtype=E5M2),
        powers(),
        powers(),
        GROUP_SIZES,
    ),
}


OPS = pytest.mark.parametrize("op", CALLS)


def check(function, arguments, outer, inner):
    """Batch the arguments numbered `outer` in one vmap, and those numbered `inner` in
    another inside of it.
    """
    axes = range(len(arguments))
    given = [x if i in outer and i in inner else x[:, 0] if i in outer
             else x[0] if i in inner else x[0, 0]
             for i, x in enumerate(arguments)]  # fmt: skip
    run = (
        jax.vmap(function, [0 if i in inner else None for i in axes])
        if inner
        else function
    )
    got = jax.jit(jax.vmap(run, [0 if i in outer else None for i in axes]))(*given)
    one = jax.jit(function)
    for i, j in itertools.product(range(OUTER), range(INNER) if inner else [None]):
        member = [
            x[i if k in outer else 0, j if k in inner and j is not None else 0]
            for k, x in enumerate(arguments)
        ]
        found = jax.tree.map(
            lambda leaf, i=i, j=j: leaf[i] if j is None else leaf[i, j], got
        )
        assert_same_bits(
            found, one(*member), f"batched {outer} and {inner}, member {i}, {j}"
        )


@OPS
def test_vmap(implementation, op):
    """All arguments, and all but each; a product has a rule for one operand alone."""
    function, *arguments = CALLS[op]
    every = set(range(len(arguments)))
    alone = [{0}, {1}] if "matmul" in op else []
    for batched in [every, *(every - {i} for i in every), *alone]:
        if batched:
            check(function, arguments, batched, set())


@pytest.mark.ci
@OPS
def test_nested_vmap(implementation, op):
    """Both vmaps over all, and over parts: groups must not mix."""
    function, *arguments = CALLS[op]
    every = set(range(len(arguments)))
    first, rest = {0}, every - {0} or {0}
    for outer, inner in ((every, every), (first, rest), (rest, first)):
        check(function, arguments, outer, inner)


@OPS
def test_other_axes(implementation, op):
    """Members may be in any place."""
    function, *arguments = CALLS[op]
    arguments = [x[0] for x in arguments]
    last = [np.moveaxis(x, 0, -1) for x in arguments]
    got = jax.vmap(function, -1)(*last)
    assert_same_bits(got, jax.vmap(function)(*arguments), "batched in the last place")


@OPS
def test_eager_equals_jit_equals_donated(implementation, op):
    function, *arguments = CALLS[op]
    arguments = [x[0, 0] for x in arguments]
    expected = function(*arguments)
    for run in (jax.jit(function), jax.checkpoint(function)):
        assert_same_bits(run(*arguments), expected)
    # What an op overwrites is needed otherwise here.
    donated = jax.jit(lambda x, *rest: (function(x, *rest), x), donate_argnums=0)
    assert_same_bits(
        donated(jnp.array(arguments[0]), *arguments[1:]), (expected, arguments[0])
    )


@pytest.mark.parametrize(
    "op", ["quantize_transpose", "scaled_matmul", "ragged_matmul, rows"]
)
def test_column_major_operands(implementation, op):
    """An argument that lies transposed in memory: the canonical form is row-major, XLA
    has to copy.
    """
    function, *arguments = CALLS[op]
    first, *rest = (x[0, 0] for x in arguments)
    device = jax.devices("gpu" if implementation == "gpu" else "cpu")[0]
    form = Format(
        Layout(tuple(range(first.ndim))[::-1]),
        jax.sharding.SingleDeviceSharding(device),
    )
    got = jax.jit(function, in_shardings=(form, *(None,) * len(rest)))(
        jax.device_put(first, form), *rest
    )
    assert_same_bits(got, function(first, *rest))


def test_handlers_that_run_at_once(implementation):
    """Independent calls in one program, and that program in four threads: right, and
    nobody waits for ever.

    A handler that waits for the pool it runs in can deadlock as soon as two of them
    run; 60 s are a thousand times what this needs.
    """
    x = cases.random_values((6, 256, 520), BF16, 7)

    @jax.jit
    def program(x):
        return [
            ops.quantize_transpose(x[i], F32(1 + i % 3), E4M3) for i in range(len(x))
        ]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        context = contextvars.copy_context
        futures = [
            pool.submit(context().run, lambda: jax.block_until_ready(program(x)))
            for _ in range(8)
        ]
        for future in futures:
            for i, got in enumerate(future.result(timeout=60)):
                cases.assert_codes(
                    "quantize_transpose",
                    got,
                    x[i],
                    F32(1 + i % 3),
                    oracle.E4M3,
                    "in a thread",
                )


def test_one_traced_function_under_each_implementation():
    """A jitted function is traced again when the implementation changes: no stale
    program.
    """
    quantize = jax.jit(lambda x, s: ops.quantize(x, s, E4M3))
    for name in ("reference", "ffi", "reference", "xla"):
        with ops.implementation(name):
            has_call = "jaxfp8_quantize" in quantize.lower(X, S).as_text()
            cases.assert_quantized(quantize(X, S), X, S, oracle.E4M3, name)
        assert has_call == (name == "ffi")


def test_implementation_rejects_unknown_names_and_restores():
    with pytest.raises(ValueError, match="implementation"):
        with ops.implementation("cuda"):
            pass
    lower = jax.jit(lambda x: ops.amax(x)).lower
    with ops.implementation("reference"):
        with ops.implementation("ffi"):
            assert "jaxfp8_amax" in lower(X).as_text()
        assert "jaxfp8_amax" not in lower(X).as_text()
    assert "jaxfp8_amax" in lower(X).as_text(), (
        "outside of the context the custom call is the default"
    )
