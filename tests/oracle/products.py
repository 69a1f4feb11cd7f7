"""The oracle for GEMMs (see `__init__.py`): exact products of codes, with the bound of
an implementation.
"""

import dataclasses

import ml_dtypes
import numpy as np

from oracle.accumulation import gemm_bound
from oracle.codec import BF16, F16, F32, PRECISE

# Unit roundoffs (half a unit in the last place) and half the smallest subnormal; f32
# and bf16 results below 2**-126 may be flushed to zero by XLA:CPU, so their absolute
# term is that whole smallest normal.
UNIT_ROUNDOFF = {np.dtype(F32): 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
ABSOLUTE = {np.dtype(F32): 2.0**-126, BF16: 2.0**-126, F16: 2.0**-25}


@dataclasses.dataclass(frozen=True)
class Product:
    """An exact product: `exact` in f64 (after scales, bias, accumulator) and the
    allowed absolute error `bound`.
    """

    exact: np.ndarray
    bound: np.ndarray

    def check(self, got, what: str = "product") -> None:
        """Raises AssertionError unless `got` is within the bound, NaN exactly where the
        exact product is NaN.
        """
        got = np.asarray(got)
        assert got.shape == self.exact.shape, (
            f"{what}: shape {got.shape}, expected {self.exact.shape}"
        )
        limit = float(ml_dtypes.finfo(got.dtype).max)
        # Where a result may round past the largest value of its dtype, an infinity of
        # that sign is right as well.
        may_overflow = np.abs(self.exact) + self.bound > limit
        wide = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            good = np.abs(wide - self.exact) <= self.bound
            good |= (wide == self.exact) | (np.isnan(wide) & np.isnan(self.exact))
            good |= (
                may_overflow & np.isinf(wide) & (np.sign(wide) == np.sign(self.exact))
            )
        if not good.all():
            worst = np.unravel_index(np.argmin(good), good.shape)
            raise AssertionError(
                f"{what}: {(~good).sum()} of {good.size} out of bound; first at "
                f"{worst}: got {wide[worst]!r}, exact {self.exact[worst]!r}, bound "
                f"{self.bound[worst]!r}"
            )


def rescaled(sums, a_scale_inv, b_scale_inv) -> np.ndarray:
    """f32 sums times both inverse scales: by the scales' product where that is a normal
    number, else one by one.
    """
    sums, a_scale_inv, b_scale_inv = (
        np.asarray(x, F32) for x in (sums, a_scale_inv, b_scale_inv)
    )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = a_scale_inv * b_scale_inv
        is_normal = (np.abs(product) >= 2.0**-126) & np.isfinite(product)
        return np.where(is_normal, sums * product, (sums * a_scale_inv) * b_scale_inv)


def scaled_matmul(
    a, b, a_scale_inv, b_scale_inv, *, bias=None, accumulator=None, out_dtype=F32,
    accumulation="exact", device=None, op="scaled_matmul",
):  # fmt: skip
    """a `[m, k]`, b `[n, k]` codes -> Product of (a @ b.T) * a_scale_inv * b_scale_inv
    (+ bias) (+ accumulator).

    FP8 products have at most 8 significant bits; f64 sums them with errors of 2**-53,
    far below every tolerance.

    The bound, with u = 2**-24 and S = sum|a_k b_k|:
      - the sum: `oracle_accumulation.gemm_bound`, which says what `accumulation`,
        `device` and `op` are;
      - s = a_scale_inv * b_scale_inv is rounded once (u) and the multiplication by it
        once more (u), or both scales multiply the sum one after the other (`rescaled`),
        which rounds twice as well: 2u |s| S;
      - each of bias and accumulator is one more f32 addition: u times the magnitude of
        the partial result, at most R = |s| S + |bias| + |accumulator|;
      - a scale below 2**-126 may be flushed, and so may s where cuBLASLt multiplies:
        |s| S more;
      - the final rounding to out_dtype: eps_out times the magnitude of the result
        (already in error by the above), plus half the smallest subnormal.
    """
    a64, b64 = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    s = float(np.asarray(a_scale_inv, np.float64).reshape(())) * float(
        np.asarray(b_scale_inv, np.float64).reshape(())
    )
    with np.errstate(invalid="ignore", over="ignore"):
        exact = (a64 @ b64.T) * s
        total = np.abs(a64) @ np.abs(b64).T
        magnitude = total * abs(s)
        bound = (
            gemm_bound(a, b, accumulation, device, op) * abs(s)
            + magnitude * 2 * PRECISE
        )
        factors = [a_scale_inv, b_scale_inv] + [s] * (
            accumulation != "exact" and op == "scaled_matmul"
        )
        if any(
            abs(float(np.asarray(factor).reshape(()))) < 2.0**-126 for factor in factors
        ):
            bound = bound + magnitude
        for term in (bias, accumulator):
            if term is not None:
                term = np.asarray(term).astype(np.float64)
                exact = exact + term
                magnitude = magnitude + np.abs(term)
                bound = bound + PRECISE * magnitude
        return Product(exact, rounded_bound(exact, bound, out_dtype))


def group_ranges(group_sizes) -> list[tuple[int, int]]:
    """(begin, end) of each group of rows."""
    ends = [int(end) for end in np.cumsum(group_sizes)]
    return list(zip([0, *ends], ends, strict=False))


def by_group(multiply, a, b, group_sizes) -> Product:
    """The product of each group, `multiply(group, begin, end)`, as one: `[g, p, n]`
    where a and b are cut, else the rows of a, which are exactly zero beyond the last
    group, whatever they hold.
    """
    parts = [
        multiply(group, *each) for group, each in enumerate(group_ranges(group_sizes))
    ]
    join = np.stack
    if b.ndim == 3:
        zeros = np.zeros((len(a) - int(np.sum(group_sizes)), b.shape[1]))
        parts.append(Product(zeros, zeros))
        join = np.concatenate
    return Product(
        join([part.exact for part in parts]), join([part.bound for part in parts])
    )


def rounded_bound(exact, bound, out_dtype) -> np.ndarray:
    """The bound of results after their rounding to `out_dtype`.

    A factor 1 + 2**-10 covers the products of small terms, each below 2**-10 for
    K <= 2**12.
    """
    out_dtype = np.dtype(out_dtype)
    size = UNIT_ROUNDOFF[out_dtype] * (np.abs(exact) + bound)
    return (bound + size) * (1 + 2.0**-10) + ABSOLUTE[out_dtype]


def _columns(x, begin: int, end: int, on_gpu: bool):
    """x[:, begin:end]. The kernel adds from the last multiple of 16 on, with zeros up
    to the first column.
    """
    first = begin // 16 * 16 if on_gpu else begin
    return np.where(
        np.arange(first, end) < begin, np.zeros((), x.dtype), x[:, first:end]
    )


def ragged_matmul(a, b, a_scale_inv, b_scale_inv, group_sizes, **options) -> Product:
    """a `[m, k]` by b `[g, n, k]`, group by group of rows; or a `[p, m]` by b `[n, m]`,
    cut along m, to `[g, p, n]`.
    """
    a, b = np.asarray(a), np.asarray(b)
    options["op"] = "ragged_matmul"
    on_gpu = options.get("accumulation", "exact") != "exact"

    def multiply(group, begin, end):
        if b.ndim == 2:
            parts = (_columns(x, begin, end, on_gpu) for x in (a, b))
        else:
            parts = a[begin:end], b[group]
        return scaled_matmul(*parts, a_scale_inv, b_scale_inv, **options)

    return by_group(multiply, a, b, group_sizes)
