"""quantize_transpose: both layouts and amax bitwise against the oracle; the tiles' ragged edges included."""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

FORMATS = pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
DTYPES = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)


def check_rows(x, scales, fmt, what):
    """One call for all scales: x is `[m, n]` for every scale, or `[scales, m, n]`."""
    shared = x.ndim == 2
    run = jax.vmap(lambda x, scale: ops.quantize_transpose(x, scale, cases.dtype_of(fmt)), (None if shared else 0, 0))
    outputs = [np.asarray(out) for out in run(x, scales)]
    for i, scale in enumerate(scales):
        cases.assert_transposed([out[i] for out in outputs], x if shared else x[i], scale, fmt, what)


def as_matrix(values, rows: int) -> np.ndarray:
    """`[..., n]` cut and folded to `[..., rows, n // rows]`."""
    columns = values.shape[-1] // rows
    return values[..., : rows * columns].reshape(*values.shape[:-1], rows, columns)


@FORMATS
@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_every_half_code_at_every_scale(implementation, dtype, fmt):
    check_rows(as_matrix(oracle.all_half_codes(dtype), 128), cases.SCALES, fmt, "every 16-bit code")


@FORMATS
def test_every_rounding_boundary_and_its_neighbours(implementation, fmt):
    check_rows(as_matrix(cases.probes_for(cases.SCALES, fmt), 7), cases.SCALES, fmt, "rounding boundary")


@FORMATS
def test_f32_corner_cases_at_every_scale(implementation, fmt):
    scales = np.concatenate([cases.SCALES, cases.STRANGE_SCALES])
    check_rows(as_matrix(oracle.f32_corner_cases(2), 31), scales, fmt, "f32 corner case")


@pytest.mark.varied
@FORMATS
def test_shapes(implementation, fmt):
    scale = np.float32(0.77)
    for seed, shape in enumerate(cases.MATRIX_SHAPES + cases.EMPTY_MATRIX_SHAPES):
        x = cases.random_values(shape, cases.INPUT_DTYPES[seed % 3], seed)
        got = ops.quantize_transpose(x, scale, cases.dtype_of(fmt))
        cases.assert_transposed(got, x, scale, fmt, f"quantize_transpose of {shape}")


@FORMATS
@DTYPES
def test_bad_values_on_every_edge_of_a_tile(implementation, dtype, fmt):
    x = cases.random_values((67, 131), dtype, 3, spread=1)
    x[0, 0], x[66, 130], x[63, 64], x[64, 63], x[31, 130] = np.nan, np.inf, -np.inf, -np.nan, np.inf
    got = ops.quantize_transpose(x, np.float32(2), cases.dtype_of(fmt))
    cases.assert_transposed(got, x, np.float32(2), fmt)
    assert np.isnan(oracle.widen(got[0])).sum() == np.isnan(oracle.widen(got[1])).sum() == 5


@FORMATS
def test_sliced_and_transposed_operands(implementation, fmt):
    x = cases.random_values((66, 35), oracle.BF16, 11)
    for name, view in {"transposed": lambda x: x.T, "sliced": lambda x: x[3:60, 1:30]}.items():
        got = jax.jit(lambda x, s, view=view: ops.quantize_transpose(view(x), s, cases.dtype_of(fmt)))(x, np.float32(2))
        cases.assert_transposed(got, view(x), np.float32(2), fmt, name)


@FORMATS
def test_agrees_with_quantize(implementation, fmt):
    x = cases.random_values((513, 640), oracle.BF16, 19)
    data, data_t, top = ops.quantize_transpose(x, np.float32(0.9), cases.dtype_of(fmt))
    alone, alone_top = ops.quantize(x, np.float32(0.9), cases.dtype_of(fmt))
    cases.assert_bitwise(data, alone, "data")
    cases.assert_bitwise(data_t, np.asarray(alone).T, "data_t")
    cases.assert_bitwise(top, alone_top, "amax")


def test_amax_so_far_over_a_batch(implementation):
    """One amax for all matrices of a batch, with and without matrices."""
    x = cases.random_values((3, 4, 6), np.float32, 31, spread=1)
    for amax in np.float32([0, 1e30]):
        for count in (0, 3):
            *_, top = ops.quantize_transpose(x[:count], np.float32(2), cases.dtype_of(oracle.E4M3), amax=amax)
            cases.assert_bitwise(top, np.maximum(amax, oracle.amax(x[:count])), f"{count} matrices, {amax}")


# Around the 128 rows of a part, the 128 columns of a tile and the 64 of a block.
SUM_SHAPES = ((1, 1), (1, 9), (9, 1), (127, 65), (128, 128), (129, 257), (400, 72), (1000, 520), (0, 5), (5, 0))


@pytest.mark.varied
@DTYPES
def test_column_sums(implementation, dtype):
    """The sums come beside results that do not know of them, and twice the same."""
    for seed, shape in enumerate(SUM_SHAPES):
        x = cases.random_values(shape, dtype, seed, spread=1)
        run = jax.jit(lambda x: ops.quantize_transpose(x, np.float32(2), oracle.E5M2.dtype, column_sums=True))
        *others, sums = run(x)
        cases.assert_transposed(others, x, np.float32(2), oracle.E5M2)
        oracle.assert_column_sums(sums, x, f"{shape}")
        cases.assert_bitwise(run(x)[-1], sums, "the second time")


def test_column_sums_of_bad_values(implementation):
    """As in any sum: infinities stay, opposite ones and NaN make NaN, other columns know of nothing."""
    x = np.ones((300, 70), np.float32)
    x[5, 0], x[299, 1], x[0, 2], x[200, 2], x[131, 69] = np.inf, -np.inf, np.inf, -np.inf, np.nan
    *_, sums = ops.quantize_transpose(x, np.float32(1), oracle.E5M2.dtype, column_sums=True)
    expected = np.full(70, 300, np.float32)
    expected[[0, 1, 2, 69]] = np.inf, -np.inf, np.nan, np.nan
    np.testing.assert_array_equal(sums, expected)


def test_column_sums_of_many_dimensions(implementation):
    """Batches and members have sums of their own; rows and columns may be several dimensions."""
    x = cases.random_values((2, 3, 5, 40, 6), oracle.BF16, 3, spread=1)

    def sums(x):
        return ops.quantize_transpose(x, np.float32(1), oracle.E5M2.dtype, rows=2, cols=1, column_sums=True)[-1]

    for got in (sums(x), jax.vmap(sums)(x), jax.vmap(jax.vmap(sums))(x)):
        for i in range(2):
            for j in range(3):
                oracle.assert_column_sums(got[i, j], x[i, j].reshape(200, 6), f"batch {i}, {j}")
    wide = ops.quantize_transpose(x, np.float32(1), oracle.E5M2.dtype, rows=1, cols=3, column_sums=True)[-1]
    oracle.assert_column_sums(wide[1].reshape(-1), x[1].reshape(3, -1), "three dimensions of columns")
