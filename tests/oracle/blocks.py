"""The oracle for blocks with scales of their own, in numpy and ml_dtypes alone (see
`__init__.py`).

A block is `(r, c)`, None for all rows or columns; the last block of a dimension may be
smaller. Matrices are `[m, n]`. Exponents are found by comparing with all powers of two,
in f64, which holds every f32 times them exactly.
"""

import ml_dtypes
import numpy as np

import oracle
from oracle import F32, PRECISE, Format, Product
from oracle.accumulation import gemm_bound, tensor_core_matmul

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
# of an E8M0 scale; its code is 127 more, and 255 is NaN
EXPONENTS = np.arange(-127, 128)
NAN_SCALE = 255


def bounds(size: int, block: int | None) -> list[tuple[int, int]]:
    """(begin, end) of each block of a dimension."""
    step = block or max(size, 1)
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]


def e8m0_exponent(amax: float, fmt: Format, rounding: str) -> int:
    """ceil: the smallest 2**e with FP8_MAX * 2**e >= amax. floor: the largest with (the
    power of two in FP8_MAX) * 2**e <= amax. Where there is none, -127."""
    powers = np.ldexp(1.0, EXPONENTS)
    if rounding == "ceil":
        return int(EXPONENTS[np.argmax(powers * fmt.max >= amax)])
    fits = powers * (fmt.max / 1.75) <= amax
    return int(EXPONENTS[fits][-1]) if fits.any() else -127


def quantize_block(x, fmt: Format, scale: str, rounding: str, power_2_scale: bool):
    """(codes, scale_inv) of one block; scale_inv as f32, or as a uint8 code."""
    wide = oracle.widen(x)
    amax = float(oracle.amax(x))
    if scale == "e8m0":
        if not np.isfinite(amax):
            return np.full(wide.shape, fmt.nan_code, np.uint8).view(
                fmt.dtype
            ), NAN_SCALE
        e = e8m0_exponent(amax, fmt, rounding)
        # Exact, but for numbers that are far too small for FP8.
        return oracle.encode(
            np.ldexp(wide.astype(np.float64), -e).astype(F32), fmt
        ), e + 127
    # A quotient in f64 of two f32 rounds to f32 as the exact one does: 53 >= 2 * 24 + 2
    # bits.
    sf = F32(min(fmt.max / amax, 2.0**126)) if 0 < amax < np.inf else F32(1)
    if power_2_scale:
        sf = F32(2.0 ** np.floor(np.log2(np.float64(sf)))) if sf != 1 else sf
        assert np.frexp(sf)[0] == 0.5
    return oracle.quantize(wide, sf, fmt)[0], F32(1 / np.float64(sf))


def quantize(
    x, fmt: Format, block, *, scale="f32", rounding="ceil", power_2_scale=False
):
    """(codes `[m, n]`, scale_inv `[blocks of rows, blocks of columns]`), f32 or
    E8M0.
    """
    x = np.asarray(x)
    rows, cols = (bounds(size, b) for size, b in zip(x.shape, block, strict=True))
    codes = np.zeros(x.shape, fmt.dtype)
    scales = np.zeros((len(rows), len(cols)), np.uint8 if scale == "e8m0" else F32)
    for i, (top, bottom) in enumerate(rows):
        for j, (left, right) in enumerate(cols):
            part = slice(top, bottom), slice(left, right)
            codes[part], scales[i, j] = quantize_block(
                x[part], fmt, scale, rounding, power_2_scale
            )
    return codes, scales.view(E8M0) if scale == "e8m0" else scales


def scale_values(scales) -> np.ndarray:
    """f32 or E8M0 scales as f64, exactly."""
    scales = np.asarray(scales)
    if scales.dtype != E8M0:
        return scales.astype(np.float64)
    codes = scales.view(np.uint8)
    return np.where(codes == NAN_SCALE, np.nan, np.ldexp(1.0, codes.astype(int) - 127))


def element_scales(scales, block, shape) -> np.ndarray:
    """The scale of each element of a matrix, f64."""
    if block is None:
        return np.full(shape, float(scale_values(scales).reshape(())))
    out = np.zeros(shape)
    rows, cols = (bounds(size, b) for size, b in zip(shape, block, strict=True))
    values = scale_values(scales)
    assert values.shape == (len(rows), len(cols)), (values.shape, shape, block)
    for i, (top, bottom) in enumerate(rows):
        for j, (left, right) in enumerate(cols):
            out[top:bottom, left:right] = values[i, j]
    return out


def dequantize(codes, scales, block) -> np.ndarray:
    """codes * scales in f64, exactly: 4 by 24 bits."""
    codes = np.asarray(codes).astype(np.float64)
    return codes * element_scales(scales, block, codes.shape)


def _sum_bound(
    a, b, a_scales, b_scales, a_block, b_block, accumulation, device
) -> np.ndarray:
    """The bound of a sum on a GPU, of products with the scales of their elements.

    From one end of a block along k to the next, the scales of a row are one number,
    which multiplies the bound of a product of codes. These sums are then added in f32,
    or (MX on Blackwell) stay in an accumulator that drops 2**-25 of its largest addend
    before an addition and 2**-23 of the sum after it: less than 2**-22 of S for each of
    them.
    """
    k = a.shape[1]
    factors = [
        element_scales(s, block, x.shape)
        for x, s, block in ((a, a_scales, a_block), (b, b_scales, b_block))
    ]
    ends = {
        end for block in (a_block, b_block) if block for _, end in bounds(k, block[1])
    } or {k}
    error, begin = np.zeros((len(a), len(b))), 0
    for end in sorted(ends):
        part = slice(begin, end)
        scales = [np.abs(factor[:, part]).max(axis=1, initial=0) for factor in factors]
        product = np.outer(*scales)
        sums = [np.abs(x[:, part].astype(np.float64)) for x in (a, b)]
        error = error + product * gemm_bound(
            a[:, part], b[:, part], accumulation, device
        )
        error = error + len(ends) * 2.0**-22 * product * (sums[0] @ sums[1].T)
        begin = end
    return error


def matmul(
    a,
    b,
    a_scales,
    b_scales,
    *,
    a_block=None,
    b_block=None,
    bias=None,
    out_dtype=F32,
    accumulation="exact",
    device=None,
) -> Product:
    """a `[m, k]`, b `[n, k]` codes with their scales -> Product of dequantized a @ b.T
    (+ bias).

    f64 rounds products of 8 by 48 bits and their sums with errors of 2**-53, far below
    every tolerance.

    The bound, with u = 2**-24 and S = sum |a_k b_k| of dequantized numbers:
      - a number times its f32 scale may be rounded to f32 (u each), and so may the
        product of two such (u); or a product of codes is exact, that of the scales is
        rounded, and so is the product of both. Scales that apply to whole rows come
        after the sum, with the same two roundings. At most 5u S together;
      - the sum: "exact" in `oracle_accumulation.gemm_bound`, of dequantized numbers, or
        that of a GPU, `_sum_bound`;
      - XLA's CPU threads flush what is below 2**-126: a number (then its product with
        the other is lost), a product, a partial sum, a product of scales;
      - a bias is one more f32 addition, the output one more rounding: as in
        oracle.scaled_matmul.
    """
    a, b = np.asarray(a), np.asarray(b)
    with np.errstate(invalid="ignore", over="ignore"):
        wide_a = dequantize(a, a_scales, a_block)
        wide_b = dequantize(b, b_scales, b_block)
        k = wide_a.shape[1]
        exact = wide_a @ wide_b.T
        total = np.abs(wide_a) @ np.abs(wide_b).T
        if accumulation == "exact":
            bound = gemm_bound(wide_a, wide_b)
        else:
            bound = _sum_bound(
                a, b, a_scales, b_scales, a_block, b_block, accumulation, device
            )
        bound = bound + total * 5 * PRECISE
        sums = [np.abs(x).sum(axis=1) for x in (wide_a, wide_b)]
        codes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
        flushed = sums[0][:, None] + sums[1][None, :] + 2 * k
        # A product of scales is formed where each is one number for the whole sum.
        if all(np.asarray(scales).shape[-1] <= 1 for scales in (a_scales, b_scales)):
            flushed = flushed + codes
        bound = bound + flushed * 2.0**-126
        if bias is not None:
            bias = np.asarray(bias).astype(np.float64)
            exact, total = exact + bias, total + np.abs(bias)
            bound = bound + PRECISE * total
        return Product(exact, oracle.rounded_bound(exact, bound, out_dtype))


def hopper_ragged_matmul(a, b, a_scales, b_scales, group_sizes) -> np.ndarray:
    """The f32 results of Hopper's kernel for blocks, to the bit.

    Operands are those of `ragged_matmul`, with scales of `(1, 128)`, and of
    `(128, 128)` for b `[g, n, k]`. From one multiple of 128 along the contraction to
    the next the tensor cores add the products of codes, from zero on. The product of
    both scales is rounded to f32; that product times the sum is added to the total with
    one rounding.
    """
    ranges = oracle.group_ranges(group_sizes)

    def product(a, b, a_scales, b_scales, begin, end):
        total = np.zeros((len(a), len(b)), F32)
        a, b = (_inside(x, begin, end) for x in (a, b))
        for i, (first, last) in enumerate(bounds(a.shape[1], 128)):
            if first < end and last > begin:
                sums = tensor_core_matmul(a[:, first:last], b[:, first:last])
                scales = a_scales[:, i, None] * b_scales[None, :, i]
                total = oracle.multiply_add(scales, sums, total)
        return total

    if b.ndim == 2:
        return np.stack([product(a, b, a_scales, b_scales, *each) for each in ranges])
    out = np.zeros((len(a), b.shape[1]), F32)
    for e, (i, j) in enumerate(ranges):
        of_columns = np.repeat(b_scales[e], 128, axis=0)[: b.shape[1]]
        out[i:j] = product(a[i:j], b[e], a_scales[i:j], of_columns, 0, a.shape[1])
    return out


def ragged_matmul_on_hopper(a, b, a_scales, b_scales, group_sizes, **options):
    """As `ragged_matmul`, with the bound of Hopper's tensor cores. Blocks of a have one
    row.
    """
    options |= {"accumulation": "precise", "device": "9.0"}

    def multiply(group, begin, end):
        if b.ndim == 2:
            parts = (_inside(x, begin, end) for x in (a, b))
            return matmul(*parts, a_scales, b_scales, **options)
        rows = slice(begin, end)
        return matmul(a[rows], b[group], a_scales[rows], b_scales[group], **options)

    return oracle.by_group(multiply, a, b, group_sizes)


def _inside(x, begin, end):
    """x with zeros beside some of its columns."""
    places = np.arange(x.shape[1])
    return np.where((places >= begin) & (places < end), x, np.zeros((), x.dtype))


def ragged_matmul(
    a, b, a_scales, b_scales, group_sizes, *, a_block=None, b_block=None, out_dtype=F32
) -> Product:
    """a `[m, k]` by b `[g, n, k]`, group by group of rows; or a `[p, m]` by b `[n, m]`,
    cut along m, to `[g, p, n]`.

    Blocks are those of all of a, and of each matrix of b. Products read numbers, each
    times the scale of its block: the bound of `matmul` is that of such numbers too.
    """
    wide_a, one = dequantize(a, a_scales, a_block), np.ones(1, F32)

    def multiply(group, begin, end):
        if b.ndim == 2:
            wide_b = dequantize(b, b_scales, b_block)
            parts = wide_a[:, begin:end], wide_b[:, begin:end]
        else:
            parts = wide_a[begin:end], dequantize(b[group], b_scales[group], b_block)
        return matmul(*parts, one, one, out_dtype=out_dtype)

    return oracle.by_group(multiply, a, b, group_sizes)


def cublaslt_layout(scales, block, rows: int) -> np.ndarray:
    """The scales of a matrix of so many rows where cuBLASLt's manual wants them, as one
    dimension; E8M0 as uint8 codes, 0 where a tile is beyond the matrix.
    """
    scales = np.asarray(scales)
    scales = scales.view(np.uint8) if scales.dtype == E8M0 else scales
    if block == (1, None):
        return scales.reshape(-1)
    if block == (1, 128):
        return np.ascontiguousarray(scales.T).reshape(-1)
    blocks = scales.shape[1]
    inner_dim = -(-blocks // 4) * 4
    if block == (128, 128):  # the stride between columns is a multiple of 4
        out = np.zeros((scales.shape[0], inner_dim), scales.dtype)
        out[:, :blocks] = scales
        return out.reshape(-1)
    assert block == (1, 32)
    out = np.zeros(-(-rows // 128) * 128 * inner_dim, scales.dtype)
    for outer, inner in np.ndindex(rows, blocks):
        tile = (inner // 4 * 4 + outer // 128 * inner_dim) * 128
        out[tile + outer % 32 * 16 + outer % 128 // 32 * 4 + inner % 4] = scales[
            outer, inner
        ]
    return out
