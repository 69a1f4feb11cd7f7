"""quantize: codes and amax bitwise against the oracle, over every input code, every rounding boundary, every scale."""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

FORMATS = pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
DTYPES = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)


def check_rows(x, scales, fmt, what):
    """One call for all scales: x is `[n]` for every scale, or `[scales, n]`."""
    shared = x.ndim == 1
    batched = jax.vmap(lambda x, scale: ops.quantize(x, scale, cases.dtype_of(fmt)), (None if shared else 0, 0))
    data, top = (np.asarray(out) for out in batched(x, scales))
    for i, scale in enumerate(scales):
        cases.assert_quantized((data[i], top[i]), x if shared else x[i], scale, fmt, what)


@FORMATS
@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_every_half_code_at_every_scale(implementation, dtype, fmt):
    check_rows(oracle.all_half_codes(dtype), cases.SCALES, fmt, "every 16-bit code")


@FORMATS
def test_every_rounding_boundary_and_its_neighbours(implementation, fmt):
    check_rows(cases.probes_for(cases.SCALES, fmt), cases.SCALES, fmt, "rounding boundary")


@FORMATS
def test_f32_corner_cases_at_every_scale(implementation, fmt):
    check_rows(oracle.f32_corner_cases(2), cases.SCALES, fmt, "f32 corner case")


@FORMATS
def test_strange_scales(implementation, fmt):
    """0, negative, infinite and NaN scales: no recipe produces them; the rules still say what comes out."""
    x = np.concatenate([oracle.f32_corner_cases(3), oracle.rounding_probes(fmt)])
    check_rows(x, cases.STRANGE_SCALES, fmt, "strange scale")


@FORMATS
def test_subnormal_scales(implementation, fmt):
    """A scale below 2**-126 with x large enough to matter: the product is an ordinary number."""
    scales = np.uint32([1, 0x1000, 0x7FFFFF, 0x400000]).view(np.float32)
    x = np.concatenate([oracle.f32_corner_cases(4), np.float32([2.0**127, 3e38, -3e38, 2.0**100])])
    check_rows(x, scales, fmt, "subnormal scale")


@FORMATS
@DTYPES
def test_eager_without_vmap(implementation, dtype, fmt):
    """The plain call, where one group holds all elements, with f32[] and f32[1] scales."""
    x = cases.random_values((4099,), dtype, 5)
    for scale in np.float32([1, 2.0**-9, 2.0**126, 0.3]):
        for shaped in (scale, scale.reshape(1)):
            got = ops.quantize(x, shaped, cases.dtype_of(fmt))
            assert got[1].shape == ()
            cases.assert_quantized(got, x, scale, fmt)


@pytest.mark.varied
@FORMATS
def test_shapes(implementation, fmt):
    for seed, shape in enumerate(cases.SHAPES):
        x = cases.random_values(shape, cases.INPUT_DTYPES[seed % 3], seed)
        cases.assert_quantized(ops.quantize(x, np.float32(3.7), cases.dtype_of(fmt)), x, np.float32(3.7), fmt)


@FORMATS
def test_empty(implementation, fmt):
    for shape in cases.EMPTY_SHAPES:
        x = np.zeros(shape, np.float32)
        cases.assert_quantized(ops.quantize(x, np.float32(1), cases.dtype_of(fmt)), x, np.float32(1), fmt)


@pytest.mark.varied
@FORMATS
@DTYPES
def test_one_bad_value_stays_visible_and_alone(implementation, dtype, fmt):
    """Every size class of a vectorised kernel; the bad value's code is NaN, its neighbours keep theirs."""
    for size in (8, 4095, 4096, 70001):
        x = cases.random_values((size,), dtype, size, spread=1)
        for position, bad in ((0, np.nan), (size // 2, -np.inf), (size - 1, np.inf)):
            spoilt = x.copy()
            spoilt[position] = bad
            got = ops.quantize(spoilt, np.float32(2), cases.dtype_of(fmt))
            cases.assert_quantized(got, spoilt, np.float32(2), fmt, f"size {size}, position {position}")
            assert np.isnan(oracle.widen(got[0])).sum() == 1


@pytest.mark.varied
@FORMATS
@DTYPES
def test_sliced_and_transposed_operands(implementation, dtype, fmt):
    """Views of a larger array, inside jit, where XLA may choose a column-major layout."""
    x = cases.random_values((66, 35), dtype, 11)
    scale = np.float32(1.5)
    views = {
        "transposed": lambda x: x.T,
        "sliced": lambda x: x[3:60, 1:30],
        "strided": lambda x: x[::3, ::2],
        "reversed": lambda x: x[::-1],
        "unaligned": lambda x: x.reshape(-1)[1:],
    }
    everything = jax.jit(lambda x, s: [ops.quantize(view(x), s, cases.dtype_of(fmt)) for view in views.values()])
    for got, (name, view) in zip(everything(x, scale), views.items(), strict=True):
        cases.assert_quantized(got, view(x), scale, fmt, name)


@FORMATS
def test_same_bytes_on_every_run(implementation, fmt):
    """Large enough for several threads; amax must not depend on who finishes first."""
    x = cases.random_values((1 << 20,), oracle.BF16, 13)
    quantize = jax.jit(lambda x, s: ops.quantize(x, s, cases.dtype_of(fmt)))
    first = quantize(x, np.float32(2))
    cases.assert_quantized(first, x, np.float32(2), fmt)
    for _ in range(3):
        again = quantize(x, np.float32(2))
        cases.assert_bitwise(again[0], first[0], "second run: codes")
        cases.assert_bitwise(again[1], first[1], "second run: amax")


@pytest.mark.slow
@FORMATS
def test_every_half_code_at_two_thousand_random_scales(implementation, fmt):
    rng = np.random.default_rng(17)
    for dtype in (oracle.BF16, oracle.F16):
        for scales in np.split(np.float32(2.0 ** rng.uniform(-126, 127, 2048)), 32):
            check_rows(oracle.all_half_codes(dtype), scales, fmt, "every 16-bit code")
