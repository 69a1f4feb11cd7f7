"""Counts of what saturates and what becomes zero: bitwise against the oracle, in the same call as the codes."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases
from .test_structure import cuda_text, custom_calls

E4M3 = cases.dtype_of(oracle.E4M3)
SCALES = np.float32([1, 3.7, 2.0**-20, 2.0**40, 2.0**-126, np.finfo(np.float32).max])


def assert_counted(x, scale, fmt, what):
    """Both ops on a matrix: the counts are the oracle's, everything else is as without them."""
    options, expected = {"dtype": cases.dtype_of(fmt), "counts": True}, oracle.counts(x, scale, fmt)
    *codes, found = ops.quantize(x, scale, **options)
    cases.assert_bitwise(found, expected, f"quantize: {what}")
    cases.assert_quantized(codes, x, scale, fmt, what)
    *codes, sums, found = ops.quantize_transpose(x, scale, column_sums=True, **options)
    cases.assert_bitwise(found, expected, f"quantize_transpose: {what}")
    cases.assert_transposed(codes, x, scale, fmt, what)
    assert sums.shape == x.shape[1:]


@pytest.mark.varied
@pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)
@pytest.mark.parametrize("scales", [SCALES, cases.STRANGE_SCALES], ids=["scales", "strange"])
def test_every_value(implementation, dtype, fmt, scales):
    """All 16-bit values, or f32 corner cases and what lies next to a rounding boundary at that scale."""
    for i, scale in enumerate(scales):
        x = oracle.all_half_codes(dtype)
        if dtype.itemsize == 4:
            probes = cases.probes_for(scales[i : i + 1], fmt)[0] if scales is SCALES else oracle.rounding_probes(fmt)
            x = np.concatenate([oracle.f32_corner_cases(), probes])
        assert_counted(np.resize(x, (-(-x.size // 100), 100)), scale, fmt, f"{dtype} {fmt.name} {scale}")


@pytest.mark.parametrize("fmt, top, half", [(oracle.E4M3, 448, 2.0**-10), (oracle.E5M2, 57344, 2.0**-17)])
def test_by_hand(implementation, fmt, top, half):
    """On the boundaries: the largest number does not saturate, half of the smallest rounds to zero, zero is zero."""
    up, down = (lambda y: np.nextafter(np.float32(y), np.float32(np.inf))), (lambda y: np.nextafter(np.float32(y), 0))
    saturating = [up(top), -up(top), np.inf, -np.inf, 3e38]
    becoming_zero = [half, -half, down(half), 2.0**-149, -(2.0**-126)]
    others = [top, -top, down(top), up(half), -up(half), 0.0, -0.0, np.nan, 1, up(top - 1)]
    x = np.float32([*saturating, *becoming_zero, *others]).reshape(4, 5)
    for op in (ops.quantize, ops.quantize_transpose):
        *_, found = op(x, np.float32(1), cases.dtype_of(fmt), counts=True)
        cases.assert_bitwise(found, np.float32([5, 5]), op.__name__)


@pytest.mark.parametrize("shape", [(), (1,), (217, 41), (2, 3, 1, 5), (0,), (3, 0), (300_001,)], ids=str)
def test_shapes(implementation, shape):
    """Empty arrays count nothing; large ones are counted by several threads."""
    x = cases.random_values(shape, oracle.BF16, 3, spread=8)
    *_, found = ops.quantize(x, np.float32(16), E4M3, counts=True)
    cases.assert_bitwise(found, oracle.counts(x, np.float32(16), oracle.E4M3), str(shape))


def test_batches_and_members(implementation):
    """Dimensions of the tensor are one count, members of a vmap have their own, at their own scales."""
    x, scales = cases.random_values((3, 2, 130, 66), np.float32, 5, spread=8), np.float32([1, 2.0**-9, 100])
    own = np.stack([oracle.counts(of, s, oracle.E4M3) for of, s in zip(x, scales, strict=True)])
    for op in (ops.quantize, ops.quantize_transpose):
        *_, found = op(x, np.float32(3), E4M3, counts=True)
        cases.assert_bitwise(found, oracle.counts(x, np.float32(3), oracle.E4M3), op.__name__)
        *_, found = jax.vmap(lambda x, s, op=op: op(x, s, E4M3, counts=True))(x, scales)
        cases.assert_bitwise(found, own, f"{op.__name__} of members")
    nested = jax.vmap(jax.vmap(lambda x: ops.quantize_transpose(x, np.float32(3), E4M3, counts=True)[-1]))(x)
    for i in np.ndindex(3, 2):
        cases.assert_bitwise(nested[i], oracle.counts(x[i], np.float32(3), oracle.E4M3), f"member {i}")


@pytest.mark.parametrize("transpose", [True, False])
def test_of_what_an_op_computes(implementation, transpose):
    """relu is exact, so that its counts are; a norm of rows that are powers of two and zeros is, too."""
    x = cases.random_values((2, 37, 24), np.float32, 7, spread=8)
    options = {"transpose": transpose, "counts": True, "rows": 2}
    *codes, found = ops.quantize_activation(x, np.float32(3), E4M3, activation="relu", **options)
    values = np.maximum(x, 0)
    cases.assert_bitwise(found, oracle.counts(values, np.float32(3), oracle.E4M3), "relu")
    assert len(codes) == 3 and (codes[1] is not None) == transpose
    rows = np.zeros((8, 16), np.float32)
    rows[:, :4], gamma = 2.0 ** np.arange(8)[:, None], np.float32(2.0) ** np.linspace(-14, 16, 16).astype(np.float32)
    # x / sqrt(mean(x**2)) is 2 for the first four of a row. 2 * gamma is 2**-13, 2**-11, 2**-9 and 2**-7.
    *_, found = ops.quantize_norm(rows, gamma, None, np.float32(1), E4M3, kind="rms", epsilon=0.0, counts=True)
    cases.assert_bitwise(found, np.float32([0, 16]), "rms: 2**-13 and 2**-11 of eight rows become zero")
    *_, found = ops.quantize_norm(rows, gamma, None, np.float32(2.0**17), E4M3, kind="rms", epsilon=0.0, counts=True)
    cases.assert_bitwise(found, np.float32([8, 0]), "rms: 2**10 of eight rows saturates")


@pytest.mark.parametrize("op", ["quantize", "quantize_transpose", "quantize_activation", "quantize_norm"])
def test_a_flag(op):
    arguments = (np.ones(4, np.float32), None) if op == "quantize_norm" else ()
    kinds = {"quantize_activation": {"activation": "relu"}, "quantize_norm": {"kind": "rms", "epsilon": 0.0}}
    with pytest.raises(TypeError, match=f"{op}: counts: expected a bool, got 1"):
        getattr(ops, op)(np.ones((4, 4), np.float32), *arguments, np.float32(1), E4M3, counts=1, **kinds.get(op, {}))


@pytest.mark.parametrize("op", ["quantize", "quantize_transpose"])
def test_one_call_in_the_place_of_another(op):
    """The custom call that counts is one of its own, so that programs which do not count are what they were."""
    x, s = np.ones((4, 4), oracle.BF16), np.float32(1)
    for counts, target in ((False, op), (True, f"{op}_counted")):
        program = jax.jit(lambda x, s, counts=counts: getattr(ops, op)(x, s, E4M3, counts=counts))
        assert custom_calls(cuda_text(program, x, s)) == {target: 1}
        assert ("counts" in str(jax.make_jaxpr(program)(x, s))) == counts


def test_more_than_f32_can_count(implementation):
    """Sums are of integers: a sum of ones in float32 would stop at 2**24."""
    if implementation == "reference":
        pytest.skip("minutes in jnp")
    x = jnp.full((2**24 + 2**10,), 449, jnp.float16)
    *_, found = jax.jit(lambda x: ops.quantize(x, np.float32(1), E4M3, counts=True))(x)
    cases.assert_bitwise(found, np.float32([2**24 + 2**10, 0]), "all saturate")
