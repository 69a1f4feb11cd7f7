"""quantize_blocks: codes and scales bitwise against the oracle, and MX blocks against a
table written by hand.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from oracle import blocks as oracle_blocks

from jaxfp8 import ops
from jaxfp8.numerics import _scaling
from jaxfp8.ops import _blocks

from . import cases
from .conftest import EMULATED

# The custom call of a CPU; the reference is what other platforms run, and meshes where
# blocks are long.
IMPLEMENTATIONS = (
    "cpu",
    "reference",
    EMULATED,
    pytest.param("gpu", marks=pytest.mark.gpu),
)

F32, F16, BF16 = np.dtype(np.float32), oracle.F16, oracle.BF16
FORMATS = pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
DTYPES = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)
KINDS = {
    "f32": {},
    "f32, power of two": {"power_2_scale": True},
    "ceil": {"scale": "e8m0"},
    "floor": {"scale": "e8m0", "rounding": "floor"},
}
ALL_KINDS = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
BLOCKS = (
    (1, 32),
    (1, 128),
    (128, 128),
    (1, None),
    (None, None),
    (3, 5),
    (None, 1),
    (32, 1),
)


def check(x, fmt, block, what="", **options):
    """One matrix against the oracle."""
    got = ops.quantize_blocks(x, cases.dtype_of(fmt), block=block, **options)
    assert_blocks(got, x, fmt, block, what, **options)
    return got


def assert_blocks(got, x, fmt, block, what="", **options):
    expected = oracle_blocks.quantize(x, fmt, block, **options)
    for value, wanted, name in zip(got, expected, ("codes", "scale_inv"), strict=True):
        oracle.assert_bitwise(
            value, wanted, f"{what} {fmt.name}, block {block}, {options}: {name}"
        )


# ------------------------------------------------------------------ the contract for MX

TINY, SMALLEST, INF, NAN = 2.0**-126, 2.0**-149, np.inf, np.nan
F32_MAX, BF16_MAX, F16_MAX = (float(jnp.finfo(dtype).max) for dtype in (F32, BF16, F16))
ABOVE_448, BELOW_2 = (
    float(np.nextafter(np.float32(v), np.float32(to))) for v, to in ((448, 449), (2, 0))
)
BAD = None  # the scale is NaN (code 255), and so are all codes of the block

# The first elements of a block of 32, the rest is zeros. Then, for each format and
# rounding, the exponent e of the scale and the elements' values before it: element *
# 2**e is the number that the block holds.
CONTRACT = {
    # name: (x, dtype,  e4m3 ceil, e4m3 floor,  e5m2 ceil, e5m2 floor)
    "zero": ([0, -0.0], F32, (-127, [0, -0.0]), (-127, [0, -0.0]),
             (-127, [0, -0.0]), (-127, [0, -0.0])),
    "smallest normal": ([TINY], F32, (-127, [2]), (-127, [2]),
                        (-127, [2]), (-127, [2])),
    "smallest subnormal": ([SMALLEST], F32, (-127, [0]), (-127, [0]),
                           (-127, [0]), (-127, [0])),
    "largest subnormal": ([TINY - SMALLEST], F32, (-127, [2]), (-127, [2]),
                          (-127, [2]), (-127, [2])),
    "max of the format": ([448], F32, (0, [448]), (0, [448]),
                          (-7, [57344]), (-7, [57344])),
    "just above it": ([ABOVE_448], F32, (1, [224]), (0, [448]),
                      (-6, [28672]), (-7, [57344])),
    "saturation": ([511, 496], F32, (1, [256, 256]), (0, [448, 448]),
                   (-6, [32768, 32768]), (-7, [57344, 57344])),
    "power of two": ([2, 1], F32, (-7, [256, 128]), (-7, [256, 128]),
                     (-14, [32768, 16384]), (-14, [32768, 16384])),
    "just below it": ([BELOW_2], F32, (-7, [256]), (-8, [448]),
                      (-14, [32768]), (-15, [57344])),
    "negative": ([1.5, -3], F32, (-7, [192, -384]), (-7, [192, -384]),
                 (-14, [24576, -49152]), (-14, [24576, -49152])),
    "underflow": (
        # in e4m3 half of the smallest number, a tie; and three quarters of it
        [1, 2.0**-18, -3 * 2.0**-19],
        F32,
        (-8, [256, 0, -(2.0**-9)]),
        (-8, [256, 0, -(2.0**-9)]),
        (-15, [32768, 0.125, -0.1875]),
        (-15, [32768, 0.125, -0.1875]),
    ),
    "largest float32": ([F32_MAX], F32, (120, [256]), (119, [448]),
                        (113, [32768]), (112, [57344])),
    "largest bfloat16": ([-BF16_MAX], BF16, (120, [-256]), (119, [-448]),
                         (113, [-32768]), (112, [-57344])),
    "largest float16": ([F16_MAX], F16, (8, [256]), (7, [448]),
                        (1, [32768]), (0, [57344])),
    "smallest float16": ([2.0**-24], F16, (-32, [256]), (-32, [256]),
                         (-39, [32768]), (-39, [32768])),
    "mixed Inf": ([1, -INF, 2], F32, BAD, BAD, BAD, BAD),
    "mixed NaN": ([1, NAN, 2], BF16, BAD, BAD, BAD, BAD),
    "all NaN": ([NAN] * 32, F16, BAD, BAD, BAD, BAD),
}  # fmt: skip
COLUMNS = tuple(itertools.product(cases.FORMATS, ("ceil", "floor")))


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(implementation, name):
    elements, dtype, *columns = CONTRACT[name]
    x = np.zeros((1, 32), dtype)
    x[0, : len(elements)] = elements
    for (fmt, rounding), expected in zip(COLUMNS, columns, strict=True):
        if expected is BAD:
            code, codes = 255, np.full((1, 32), fmt.nan_code, np.uint8).view(fmt.dtype)
        else:
            code, codes = expected[0] + 127, np.zeros((1, 32), fmt.dtype)
            codes[0, : len(elements)] = expected[1]
        got = check(x, fmt, (1, 32), name, scale="e8m0", rounding=rounding)
        cases.assert_bitwise(got[0], codes, f"{name}: codes, {fmt.name} {rounding}")
        assert got[1].dtype == jnp.float8_e8m0fnu
        cases.assert_bitwise(
            np.asarray(got[1]).view(np.uint8),
            np.uint8([[code]]),
            f"{name}: {fmt.name} {rounding}",
        )


# ------------------------------------------------------------------------------ bitwise


@FORMATS
@ALL_KINDS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_every_half_code(implementation, dtype, fmt, options):
    """In blocks of neighbours, so that most are finite; and in blocks of anything,
    smaller numbers beside larger.
    """
    codes = oracle.all_half_codes(dtype).reshape(2048, 32)
    check(codes, fmt, (1, 32), "neighbours", **options)
    finite = np.where(np.isfinite(oracle.widen(codes)), codes, dtype.type(0))
    mixed = np.random.default_rng(1).permutation(finite.reshape(-1)).reshape(256, 256)
    check(mixed, fmt, (1, 128), "mixed", **options)


@FORMATS
@ALL_KINDS
def test_f32_corner_cases(implementation, fmt, options):
    """Subnormals, the largest numbers, NaNs with payloads; blocks of one element have
    their own scale.
    """
    x = oracle.f32_corner_cases(3)
    x = x[: x.size // 8 * 8]
    check(x.reshape(-1, 8), fmt, (1, 8), "corner cases", **options)
    check(x[:1024].reshape(1, -1), fmt, (1, 1), "alone", **options)
    exponents = np.ldexp(np.float32(1), np.arange(-149, 128)).reshape(-1, 1)
    check(
        exponents * np.float32([1.5, 1, 0.75]),
        fmt,
        (1, None),
        "powers of two",
        **options,
    )


@FORMATS
@ALL_KINDS
def test_every_significand_next_to_the_boundary(implementation, fmt, options):
    """The exponent steps where the significand of amax passes 1.75; f32 neighbours of
    that, at several exponents.
    """
    near = (np.float32(1.75).view(np.int32) + np.arange(-4, 5, dtype=np.int32)).view(
        np.float32
    )
    x = np.concatenate(
        [
            np.ldexp(near, e)
            for e in (-130, -120, -119, -118, -112, -111, 0, 1, 126, 127)
        ]
    )
    check(x.reshape(-1, 1), fmt, (1, 1), "1.75", **options)


@FORMATS
@ALL_KINDS
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_and_ragged_edges(implementation, block, fmt, options):
    for shape in ((1, 1), (7, 33), (130, 257), *cases.EMPTY_MATRIX_SHAPES):
        check(
            cases.random_values(shape, F32, sum(shape)),
            fmt,
            block,
            f"{shape}",
            **options,
        )


@DTYPES
@ALL_KINDS
def test_dtypes_and_sliced_operands(implementation, dtype, options):
    x = cases.random_values((40, 70), dtype, 5)
    run = jax.jit(
        lambda x: ops.quantize_blocks(
            x[3:, ::2].T, oracle.E4M3.dtype, block=(1, 16), **options
        )
    )
    assert_blocks(run(x), x[3:, ::2].T, oracle.E4M3, (1, 16), **options)


def test_an_inf_leaves_other_blocks_alone(implementation):
    x = cases.random_values((4, 96), F32, 7, spread=1)
    x[1, 40] = np.inf
    for options in KINDS.values():
        data, scale_inv = check(x, oracle.E4M3, (1, 32), **options)
        bad = np.isnan(oracle.widen(data))
        assert (
            bad[1, 40]
            and not bad[0].any()
            and not bad[1, :32].any()
            and not bad[1, 64:].any()
        )
        is_mx = scale_inv.dtype == jnp.float8_e8m0fnu
        assert (
            bad[1, 32:64].all() == is_mx
            and np.isnan(oracle.widen(scale_inv)).sum() == is_mx
        )


# ------------------------------------------------------------------- shapes, transforms


@ALL_KINDS
def test_merged_rows_and_columns(implementation, options):
    """Blocks are those of the merged matrix; leading dimensions are matrices of their
    own.
    """
    x = cases.random_values((2, 3, 4, 5, 6), F32, 3)
    for rows, cols in itertools.product((1, 2), (1, 2)):
        data, scale_inv = ops.quantize_blocks(
            x, oracle.E4M3.dtype, block=(3, 7), rows=rows, cols=cols, **options
        )
        assert data.shape == x.shape
        batch = x.ndim - rows - cols
        m, n = np.prod(x.shape[batch : batch + rows]), np.prod(x.shape[batch + rows :])
        flat = [np.asarray(v).reshape(-1, *v.shape[batch:]) for v in (data, scale_inv)]
        for i, matrix in enumerate(x.reshape(-1, m, n)):
            got = flat[0][i].reshape(m, n), flat[1][i]
            assert_blocks(
                got, matrix, oracle.E4M3, (3, 7), f"{rows} by {cols}, {i}", **options
            )


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "tp"), axis_types=(axis_type,) * 2)


@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.parametrize(
    "spec", [P("data"), P(None, "tp"), P("tp", "data"), P(("data", "tp"))], ids=str
)
@pytest.mark.parametrize("block", [(1, 32), (1, None), (5, 7)], ids=str)
def test_meshes(axis_type, spec, block):
    """Blocks may lie on several devices."""
    x = cases.random_values((16, 64), F32, 9)
    on = mesh(axis_type)
    cut = jax.device_put(x, NamedSharding(on, spec))
    with jax.set_mesh(on):
        for options in KINDS.values():
            run = jax.jit(
                functools.partial(
                    ops.quantize_blocks, dtype=oracle.E4M3.dtype, block=block, **options
                )
            )
            got = run(cut)
            assert_blocks(got, x, oracle.E4M3, block, f"{spec}", **options)
            if axis_type is AxisType.Explicit:
                assert jax.typeof(got[0]).sharding.spec == jax.typeof(cut).sharding.spec


def test_shard_map_quantizes_its_own_shards():
    x = cases.random_values((16, 64), F32, 9)

    @jax.jit
    @jax.shard_map(mesh=mesh(), in_specs=P("data", "tp"), out_specs=P("data", "tp"))
    def run(x):
        return ops.quantize_blocks(x, oracle.E4M3.dtype, block=(1, 32), scale="e8m0")

    assert_blocks(run(x), x, oracle.E4M3, (1, 16), scale="e8m0")


# ------------------------------------------------------------------------------ mutants


def rounds_to_nearest(monkeypatch):
    def mutant(amax, dtype, rounding, original=_blocks.e8m0_scales):
        del rounding
        return original(amax * jnp.float32(2**0.5), dtype, "floor")

    monkeypatch.setattr(_blocks, "e8m0_scales", mutant)


def swaps_ceil_and_floor(monkeypatch):
    def mutant(amax, dtype, rounding, original=_blocks.e8m0_scales):
        return original(amax, dtype, "floor" if rounding == "ceil" else "ceil")

    monkeypatch.setattr(_blocks, "e8m0_scales", mutant)


def counts_blocks_from_one(monkeypatch):
    original = _blocks.cut
    monkeypatch.setattr(
        _blocks, "cut", lambda x, block: original(jnp.roll(x, 1, axis=-1), block)
    )


def returns_the_scale_itself(monkeypatch):
    for name in ("e8m0_scales", "f32_scales"):
        original = getattr(_blocks, name)

        def mutant(*args, original=original):
            scale, scale_inv = original(*args)
            return scale, scale.astype(scale_inv.dtype)

        monkeypatch.setattr(_blocks, name, mutant)


def loses_nan(monkeypatch):
    def mutant(x, axis):
        return jnp.max(
            jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros_like(x)), axis=axis
        )

    monkeypatch.setattr(_scaling, "abs_max", mutant)


def flushes_the_smallest_scale(monkeypatch):
    original = _blocks.e8m0
    monkeypatch.setattr(
        _blocks, "e8m0", lambda e, is_nan: original(jnp.maximum(e, -126), is_nan)
    )


MUTANTS = (
    rounds_to_nearest,
    swaps_ceil_and_floor,
    counts_blocks_from_one,
    returns_the_scale_itself,
    loses_nan,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", (*MUTANTS, flushes_the_smallest_scale), ids=lambda m: m.__name__
)
def test_mutants_are_caught(monkeypatch, mutant):
    def compare():
        jax.clear_caches()
        x = cases.random_values((6, 80), F32, 2)
        x[1], x[2, 3], x[3, :40] = 0, np.nan, 1e-40
        for options in KINDS.values():
            check(x, oracle.E4M3, (1, 32), **options)

    with ops.implementation("reference"):
        compare()
        mutant(monkeypatch)
        with pytest.raises(AssertionError, match="scale_inv|codes"):
            compare()
    jax.clear_caches()
