"""Ops under jit, vmap, remat and donation: the same bits as the plain call, which other
tests compare with the oracle.

Sums are those of whole numbers, so that they are exact in any order and the comparison
is bitwise.
"""

import concurrent.futures
import contextvars

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from oracle import BF16, F32

from jaxfp8 import numerics, ops
from jaxfp8.inspect import _op_calls

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
X, S = cases.random_values((6, 10), BF16, 1), F32(3.3)
# How many rows of a ragged product each group of each member has.
GROUP_SIZES = np.int32(
    [[[4, 1, 1], [0, 3, 2], [6, 0, 0]], [[1, 1, 1], [0] * 3, [2, 4, 0]]]
)
# Which variants of the call of an op there are, where they are several.
VARIANTS = {
    "adam_update": 2,
    "block_scaled_matmul": 3,
    "encode_moment": 2,
    "join_recorded": 2,
    "quantize": 3,
    "quantize_blocks_transpose": 5,
    "quantize_norm": 2,
    "quantize_transpose": 3,
    "ragged_matmul": 2,
    "scaled_matmul": 3,
    "split_reading": 2,
    "write_histories": 2,
}
SILU_GATED = ops.ACTIVATIONS.index("silu_gated")


def members(op, index):
    """A call of the op, and its arguments for a batch of batches."""
    kind = _op_calls.Kind((6, 40, 33), np.dtype(F32), numerics.E4M3, index)
    function, _ = _op_calls.call(op, kind)
    batch = kind._replace(shape=(OUTER, INNER, *kind.shape))
    _, arguments = _op_calls.call(op, batch)
    if op == "ragged_matmul":
        arguments[-1] = GROUP_SIZES
    if op == "quantize_norm":
        arguments[0] = arguments[0].round()
    if "activation" in op:
        # far from zero silu and its derivative are exact
        arguments[0] = 128 * np.sign(arguments[0])
    return function, *arguments


def integers(*shape, dtype=F32):
    rng = np.random.default_rng(sum(shape))
    return rng.integers(-8, 9, (OUTER, INNER, *shape)).astype(dtype)


def amaxes(*shape):
    return np.abs(integers(*shape))


def powers(*shape):
    exponents = np.random.default_rng(0).integers(-3, 4, (OUTER, INNER, *shape))
    return np.ldexp(F32(1), exponents)


# Options that the calls of `python -m jaxfp8.selftest` do not have, and units of which
# some are batched.
CALLS = {
    "delayed_scales of two": (
        lambda h, k, s, t: ops.delayed_scales([h, k], [s, t], fp8_max=[448.0, 240.0]),
        amaxes(4),
        amaxes(7),
        powers(),
        powers(),
    ),
    "read_histories of two": (
        lambda h, k, s, t: ops.read_histories(
            [[(h, s)], [(k, t)]], fp8_max=[[448.0]] * 2
        ),
        amaxes(4),
        amaxes(7),
        powers(1),
        powers(1),
    ),
    "write_histories of two": (
        lambda h, k, s, a, b: ops.write_histories([[(h, s)], [(k, s)]], [a, b]),
        amaxes(4),
        amaxes(7),
        powers(1),
        amaxes(6),
        amaxes(6),
    ),
    "column sums": (
        lambda x, s: ops.quantize_transpose(x, s, E4M3, column_sums=True),
        integers(6, 10),
        powers(),
    ),
    "column sums of a gradient": (
        lambda x, g, s: ops.quantize_activation_grad(
            x, g, s, E5M2, activation="relu", column_sums=True
        ),
        integers(6, 8),
        integers(6, 8),
        powers(),
    ),
    "count": (
        lambda x, s: ops.count_saturated_and_flushed(x, s, E4M3),
        100 * integers(6, 10),
        powers(),
    ),
    "scaled_matmul of batches": (
        lambda a, b, s, bias: ops.scaled_matmul(
            a, b, s, F32(2), bias=bias, batch=1, out_dtype=F32
        ),
        integers(2, 6, 33, dtype=E4M3),
        integers(2, 7, 33, dtype=E5M2),
        powers(),
        integers(2, 7),
    ),
    "block_scaled_matmul by a tensor": (
        lambda a, b, s, t: ops.block_scaled_matmul(
            a, b, s, t, a_block=(1, 128), b_block=None, out_dtype=F32
        ),
        integers(6, 160, dtype=E4M3),
        integers(7, 160, dtype=E4M3),
        powers(6, 2),
        powers(1),
    ),
}
for name in _op_calls.OPS:
    first = SILU_GATED if "activation" in name else 0
    for index in range(first, first + VARIANTS.get(name, 1)):
        CALLS[f"{name} {index}"] = members(name, index)


OPS = pytest.mark.parametrize("op", CALLS)


def batched_over(function, batched, count):
    """A vmap over the arguments numbered `batched`, of so many."""
    return jax.vmap(function, [0 if i in batched else None for i in range(count)])


def check(function, arguments, batched):
    """Batch the arguments numbered `batched`."""
    run, one = batched_over(function, batched, len(arguments)), jax.jit(function)
    got = jax.jit(run)(*(x if i in batched else x[0] for i, x in enumerate(arguments)))
    for i in range(OUTER):
        member = [x[i if k in batched else 0] for k, x in enumerate(arguments)]
        found = jax.tree.map(lambda leaf, i=i: leaf[i], got)
        assert_same_bits(found, one(*member), f"batched {batched}, member {i}")


@OPS
def test_vmap(implementation, op):
    """All arguments, and all but each; the first alone; a product has a rule for one
    operand alone.
    """
    function, *arguments = CALLS[op]
    arguments = [x[:, 0] for x in arguments]
    every = set(range(len(arguments)))
    alone = [{0}, {1}] if "matmul" in op else [{0}]
    for batched in [every, *(every - {i} for i in every), *alone]:
        if batched:
            check(function, arguments, batched)


@pytest.mark.ci
@OPS
def test_nested_vmap(implementation, op):
    """Both vmaps over all, and over parts: groups must not mix. `test_vmap` has the
    inner ones.
    """
    function, *arguments = CALLS[op]
    every = set(range(len(arguments)))
    first, rest = {0}, every - {0} or {0}
    for outer, inner in ((every, every), (first, rest), (rest, first)):
        given = [x if i in inner else x[:, 0] for i, x in enumerate(arguments)]
        check(batched_over(function, inner, len(arguments)), given, outer)


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
