"""quantize and quantize_transpose: codes and amax bitwise against the oracle, over
every input code, rounding boundary and scale; the tiles' ragged edges, the amax so far,
the column sums."""

import jax
import numpy as np
import oracle
import pytest
from oracle import BF16, E5M2, F16, F32, assert_bitwise

from jaxfp8 import ops

from . import cases
from .conftest import EACH_DTYPE, EACH_FORMAT

NAMES = pytest.mark.parametrize("name", ["quantize", "quantize_transpose"])
E4M3 = cases.dtype_of(oracle.E4M3)
TWO = F32(2)


def check_rows(name, x, scales, fmt, what):
    """One call for all scales: x is `[n]` for every scale, or `[scales, n]`; as a
    matrix for quantize_transpose.
    """
    if name == "quantize_transpose":
        rows = 31 if x.shape[-1] > 1000 else 7
        x = x[..., : x.shape[-1] // rows * rows].reshape(*x.shape[:-1], rows, -1)
    shared = x.ndim == 1 + (name == "quantize_transpose")
    run = jax.vmap(
        lambda x, scale: getattr(ops, name)(x, scale, cases.dtype_of(fmt)),
        (None if shared else 0, 0),
    )
    outputs = [np.asarray(out) for out in run(x, scales)]
    for i, scale in enumerate(scales):
        cases.assert_codes(
            name, [out[i] for out in outputs], x if shared else x[i], scale, fmt, what
        )


def test_a_batch_of_matrices_of_each_member():
    """The matrices of a member share its scale, and have one amax."""
    x = np.arange(-48, 48, dtype=F32).reshape(3, 2, 4, 4)
    scales = F32([0.5, 1, 2])
    run = jax.vmap(lambda x, scale: ops.quantize_transpose(x, scale, E4M3))
    data, data_t, amax = map(np.asarray, run(x, scales))
    for i, scale in enumerate(scales):
        cases.assert_quantized((data[i], amax[i]), x[i], scale, oracle.E4M3)
    assert_bitwise(data_t, data.swapaxes(-1, -2), "data_t")


@NAMES
@EACH_FORMAT
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_every_half_code_at_every_scale(implementation, dtype, fmt, name):
    check_rows(
        name, oracle.all_half_codes(dtype), cases.SCALES, fmt, "every 16-bit code"
    )


@NAMES
@EACH_FORMAT
def test_every_rounding_boundary_and_its_neighbours(implementation, fmt, name):
    check_rows(
        name,
        cases.probes_for(cases.SCALES, fmt),
        cases.SCALES,
        fmt,
        "rounding boundary",
    )


@NAMES
@EACH_FORMAT
def test_f32_corner_cases_at_every_scale(implementation, fmt, name):
    """0, negative, infinite, NaN and subnormal scales too: no recipe produces them; the
    rules still say what comes out.
    """
    large = F32([2.0**127, 3e38, -3e38, 2.0**100])
    x = np.concatenate([oracle.f32_corner_cases(2), oracle.rounding_probes(fmt), large])
    subnormal = np.uint32([1, 0x1000, 0x7FFFFF, 0x400000]).view(F32)
    scales = np.concatenate([cases.SCALES, cases.STRANGE_SCALES, subnormal])
    check_rows(name, x, scales, fmt, "f32 corner case")


@NAMES
@EACH_FORMAT
def test_shapes(implementation, fmt, name):
    """Of one call, with f32[] and f32[1] scales."""
    shapes = (
        cases.SHAPES + cases.EMPTY_SHAPES
        if name == "quantize"
        else cases.MATRIX_SHAPES + cases.EMPTY_MATRIX_SHAPES
    )
    for seed, shape in enumerate(shapes):
        x = cases.random_values(shape, cases.INPUT_DTYPES[seed % 3], seed)
        scale = F32(3.7)
        got = getattr(ops, name)(
            x, scale.reshape((1,) * (seed % 2)), cases.dtype_of(fmt)
        )
        cases.assert_codes(name, got, x, scale, fmt, f"{shape}")


@NAMES
@EACH_FORMAT
@EACH_DTYPE
def test_one_bad_value_stays_visible_and_alone(implementation, dtype, fmt, name):
    """Every size class of a vectorised kernel, and edges of tiles; its neighbours keep
    their codes.
    """
    for shape in ((1, 8), (63, 65), (1, 4096), (67, 1045)):
        x = cases.random_values(shape, dtype, shape[1], spread=1)
        for position, bad in ((0, np.nan), (x.size // 2, -np.inf), (-1, np.nan)):
            spoilt = x.copy()
            spoilt.flat[position] = bad
            got = getattr(ops, name)(spoilt, TWO, cases.dtype_of(fmt))
            what = f"{shape}, position {position}"
            cases.assert_codes(name, got, spoilt, TWO, fmt, what)


@NAMES
def test_same_bytes_on_every_run(implementation, name):
    """Large enough for several threads; amax must not depend on who finishes first."""
    x = cases.random_values((1 << 9, 1 << 11), BF16, 13)
    quantize = jax.jit(lambda x, s: getattr(ops, name)(x, s, E4M3))
    for _ in range(4):
        cases.assert_codes(name, quantize(x, TWO), x, TWO, oracle.E4M3, "again")


# -------------------------------------------------------------------------- amax so far


@NAMES
@EACH_FORMAT
def test_the_amax_is_raised(implementation, fmt, name):
    """The codes do not know of it. Empty arrays leave it as it is. Its shape is that of
    the argument.
    """
    x = cases.random_values((3, 21, 41), BF16, 23, spread=1)
    own = oracle.amax(x)
    codes = oracle.quantize(x, TWO, fmt)[0]
    for amax in cases.AMAXES_SO_FAR:
        for shaped in (amax, amax.reshape(1)):
            data, *_, top = getattr(ops, name)(x, TWO, cases.dtype_of(fmt), amax=shaped)
            assert_bitwise(top, np.maximum(shaped, own), f"amax so far {amax}")
            assert_bitwise(data, codes, f"amax so far {amax}: codes")
        *_, top = getattr(ops, name)(x[:0], TWO, cases.dtype_of(fmt), amax=amax)
        assert_bitwise(top, amax, f"empty, amax so far {amax}")


# -------------------------------------------------------------------------- column sums

# Around the 128 rows of a part, the 128 columns of a tile and the 64 of a block.
SUM_SHAPES = (
    (1, 1),
    (1, 9),
    (9, 1),
    (127, 65),
    (128, 128),
    (129, 257),
    (400, 72),
    (1000, 520),
    (0, 5),
    (5, 0),
)


@EACH_DTYPE
def test_column_sums(implementation, dtype):
    """The sums come beside results that do not know of them, and twice the same."""
    for seed, shape in enumerate(SUM_SHAPES):
        x = cases.random_values(shape, dtype, seed, spread=1)
        run = jax.jit(
            lambda x: ops.quantize_transpose(x, TWO, E5M2.dtype, column_sums=True)
        )
        *others, sums = run(x)
        cases.assert_codes("quantize_transpose", others, x, TWO, E5M2, f"{shape}")
        oracle.assert_column_sums(sums, x, f"{shape}")
        assert_bitwise(run(x)[-1], sums, "the second time")


def test_column_sums_of_bad_values(implementation):
    """As in any sum: infinities stay, opposite ones and NaN make NaN, other columns
    know of nothing.
    """
    x = np.ones((300, 70), F32)
    x[5, 0], x[299, 1], x[0, 2], x[200, 2], x[131, 69] = (
        np.inf,
        -np.inf,
        np.inf,
        -np.inf,
        np.nan,
    )
    *_, sums = ops.quantize_transpose(x, F32(1), E5M2.dtype, column_sums=True)
    expected = np.full(70, 300, F32)
    expected[[0, 1, 2, 69]] = np.inf, -np.inf, np.nan, np.nan
    np.testing.assert_array_equal(sums, expected)


def test_column_sums_of_many_dimensions(implementation):
    """Batches have sums of their own; rows and columns may be several dimensions."""
    x = cases.random_values((2, 3, 5, 40, 6), BF16, 3, spread=1)

    def sums(x, rows=2, cols=1):
        return ops.quantize_transpose(
            x, TWO, E5M2.dtype, rows=rows, cols=cols, column_sums=True
        )[-1]

    got = sums(x)
    for i in np.ndindex(2, 3):
        oracle.assert_column_sums(got[i], x[i].reshape(200, 6), f"batch {i}")
    oracle.assert_column_sums(
        sums(x, 1, 3)[1].reshape(-1), x[1].reshape(3, -1), "three dimensions of columns"
    )
