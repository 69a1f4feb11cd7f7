"""The oracle for fused producers (see `__init__.py`): activations and norms in f64,
with the bound of an f32 one.
"""

import dataclasses

import numpy as np

from oracle.codec import F32, PRECISE, Format, amax, assert_bitwise, encode, widen
from oracle.products import Product


@dataclasses.dataclass(frozen=True)
class Values:
    """What a producer quantizes: `exact` in f64, and the absolute error `bound` of an
    f32 implementation.
    """

    exact: np.ndarray
    bound: np.ndarray

    def rows(self, begin=0, end=None) -> "Values":
        """Some rows of the matrix, of which all other dimensions are columns."""
        parts = (self.exact, self.bound)
        return Values(*(part.reshape(len(part), -1)[begin:end] for part in parts))

    def sums(self) -> Product:
        """The sums of columns: an addition for each row in any order, each off by u of
        what it adds up.
        """
        bound = self.bound.sum(0)
        size = np.abs(self.exact).sum(0) + bound
        return Product(self.exact.sum(0), bound + len(self.exact) * PRECISE * size)

    def check(
        self, data, data_t, top, scale, fmt: Format, *, start=0.0, what: str = "codes"
    ) -> None:
        """Raises AssertionError unless the codes are those of some f32 values within
        the bound, and so is the amax.

        f64 values keep what an f32 one loses, so a value counts as infinite where it
        rounds to that in f32; one that is within its bound of that may be either.

        Args:
            data: codes, of the shape of the values.
            data_t: their transpose, last dimension first; None to leave it out.
            top: the amax; `start` is the least it may be.
            scale: f32.
        """
        data = np.asarray(data)
        assert data.shape == self.exact.shape, (
            f"{what}: shape {data.shape}, expected {self.exact.shape}"
        )
        assert data.dtype == fmt.dtype, (
            f"{what}: dtype {data.dtype}, expected {fmt.dtype}"
        )
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = (
                (self.exact + sign * self.bound).astype(F32) for sign in (-1, 1)
            )
            finite = np.isfinite(low) & np.isfinite(high)
            unsure = ~finite & ~np.isnan(low) & (low != high)
            # One more rounding, of the product with the scale.
            least, most = (
                np.sort([low * F32(scale), high * F32(scale)], axis=0)[i]
                for i in (0, 1)
            )
            least = np.nextafter(least, F32(-np.inf))
            most = np.nextafter(most, F32(np.inf))
        got, least, most = (
            widen(v) for v in (data, encode(least, fmt), encode(most, fmt))
        )
        good = np.where(finite, (least <= got) & (got <= most), np.isnan(got) | unsure)
        if not good.all():
            worst = np.unravel_index(np.argmin(good), good.shape)
            raise AssertionError(
                f"{what}: {(~good).sum()} of {good.size} wrong; first at {worst}: got "
                f"{got[worst]!r}, expected {least[worst]!r} to {most[worst]!r} of "
                f"{self.exact[worst]!r} +- {self.bound[worst]!r}"
            )
        if data_t is not None:
            order = (data.ndim - 1, *range(data.ndim - 1))
            assert_bitwise(
                np.asarray(data_t),
                np.ascontiguousarray(data.transpose(order)),
                f"{what}: data_t",
            )
        ends = [
            amax(np.concatenate([v.reshape(-1), [F32(start)]])) for v in (low, high)
        ]
        with np.errstate(invalid="ignore"):
            least = np.maximum(0, np.abs(self.exact) - self.bound)
        sure = np.where(finite, least, np.where(unsure, 0, np.inf))
        smallest = max(float(sure.max(initial=0)) * (1 - 2.0**-23), float(start))
        assert smallest <= float(top) <= max(ends), (
            f"{what}: amax {top!r}, expected {smallest!r} to {max(ends)!r}"
        )


_U = 2.0**-24  # unit roundoff of f32


def _sigmoid(z):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def clamped(x, swiglu) -> tuple:
    """gate and up of a clamped SwiGLU, after its clamps, in f64, and its numbers, which
    are f32: `(gate, up, limit, alpha, offset)`. NaN stays.
    """
    limit, alpha, offset = (
        np.float64(F32(number))
        for number in (swiglu.limit, swiglu.alpha, swiglu.offset)
    )
    gate, up = x[..., 0, :], x[..., 1, :]
    return np.minimum(gate, limit), np.clip(up, -limit, limit), limit, alpha, offset


def argument(gate, name) -> tuple:
    """`z`, of which silu and gelu take the sigmoid, and its derivative."""
    if name.startswith("silu"):
        return gate, 1.0
    c = 2 * np.sqrt(2 / np.pi)
    return c * (gate + 0.044715 * gate**3), c * (1 + 0.134145 * gate**2)


def activation(x, name) -> Values:
    """gelu (tanh), silu, relu of x and its square; gated: of x[..., 0, :], times x[...,
    1, :]; for a clamped SwiGLU in place of a name gate * s(alpha gate) * (up + offset).

    The bound, for x * s(z) with s(z) = 1 / (1 + exp(-z)), z = x or 2 sqrt(2/pi) (x +
    0.044715 x^3). An exponent that is off by 5u of itself (two constants, a square, a
    sum, a product) and an exp off by 4u make exp(-z) off by (5 |z| + 4) u, of which 1 +
    exp(-z) has the share s(-z). Sum, quotient and product add at most u, 2u and u:

        |error| <= |result| (s(-z) (5 |z| + 4) + 4) u

    The implementations may flush subnormals, or lose a result to an exp(-z) above the
    largest f32: at most 88 * 2^-126 is lost, 88 / alpha with z = alpha x. A gate
    multiplies all this and rounds once more. A product of terms in u is below u^2 (5 *
    88 + 8)^2 < u, which one more u covers.

    In a clamped SwiGLU up + offset is rounded too. What is lost of a subnormal up is
    multiplied by the limit. A square is rounded once.
    """
    x, is_clamped = widen(x, np.float64), not isinstance(name, str)
    gated = is_clamped or name.endswith("_gated")
    gate, up = (x[..., 0, :], x[..., 1, :]) if gated else (x, np.float64(1))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if not is_clamped and name.startswith("relu"):
            exact = np.where(gate <= 0, 0, gate) ** (2 if "squared" in name else 1)
            return Values(exact, exact * _U + 2.0**-126)
        lost = 88
        if is_clamped:
            gate, up, limit, alpha, offset = clamped(x, name)
            up, z = up + offset, alpha * gate
            lost = max(88, 88 / alpha, limit)
        else:
            z, _ = argument(gate, name)
        # Beyond, s(z) is a zero of f64 as well, but 0 * inf is not.
        share = np.where(z < -700, 1, _sigmoid(-z))
        exact = gate * _sigmoid(z) * up
        roundings = 4 + gated + is_clamped + 1
        relative = (share * (5 * np.minimum(np.abs(z), 88) + 4) + roundings) * _U
        bound = np.abs(exact) * relative + lost * 2.0**-126 * np.maximum(1, np.abs(up))
        # Next to the largest f32 the function of a gate may round to infinity before it
        # is multiplied.
        bound = np.where(
            gated & (np.abs(gate) >= 2.0**128 * (1 - 8 * _U)), np.inf, bound
        )
    return Values(exact, np.where(np.isfinite(exact), bound, 0))


def norm(x, gamma, beta, kind: str, epsilon: float, depth: int | None = None) -> Values:
    """RMSNorm ("rms") or LayerNorm ("layer") over the last dimension.

    The bound, for sums whose terms take part in at most `depth` additions (by default
    any order: n), to first order in u; 1 + 2^-6 covers the products of the terms, each
    below 2^-8 for n <= 2^15:
      - the mean: depth + 1 roundings of terms that sum up to mean|x|;
      - a centered value c: that, and one rounding of itself;
      - the variance of computed c: for their squares depth + 3 relative, for their
        errors 2 mean(|c| |error|) and mean(error^2);
      - rsqrt: half of the relative error of variance + epsilon (one more rounding);
        itself up to 4u;
      - the result: |c| and its error, times factor and its relative error of three more
        roundings; a sum with beta.
    Implementations may flush subnormals: 2^-126 in each.
    """
    x, gamma = widen(x, np.float64), widen(gamma, np.float64)
    n = x.shape[-1]
    depth = n if depth is None else depth
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        c, c_error = x, np.zeros_like(x)
        if kind == "layer":
            mean = x.mean(-1, keepdims=True)
            c = x - mean
            c_error = (depth + 1) * _U * np.abs(x).mean(
                -1, keepdims=True
            ) + _U * np.abs(c)
        variance = (c * c).mean(-1, keepdims=True)
        variance_error = (depth + 3) * _U * variance + (
            2 * np.abs(c) * c_error + c_error**2
        ).mean(-1, keepdims=True)
        total = variance + epsilon
        factor = gamma / np.sqrt(total)
        factor_error = variance_error / total / 2 + 6 * _U
        exact = c * factor
        bound = (
            np.abs(exact) * factor_error
            + c_error * np.abs(factor)
            + 2 * _U * np.abs(exact)
        )
        if beta is not None:
            exact = exact + widen(beta, np.float64)
            bound = bound + _U * np.abs(exact)
        bound = bound * (1 + 2.0**-6) + 2.0**-126 * np.maximum(1, np.abs(factor))
    # An infinite variance leaves zeros, and no number to be off by.
    sure = np.isfinite(exact) & np.isfinite(bound)
    return Values(exact, np.where(sure, bound, 0))


def multiply_add(x, y, z) -> np.ndarray:
    """x * y + z of f32, rounded once to f32.

    In f64 the product is exact and the sum is not. Rounded to odd, its last bit tells
    that something was lost, so that the second rounding, to 29 bits fewer, is that of
    the exact sum (Boldo and Melquiond, 2008).
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product, z = widen(x, np.float64) * widen(y, np.float64), widen(z, np.float64)
        total = np.asarray(product + z)
        part = total - product  # TwoSum (Knuth): what the sum lost
        lost = (product - (total - part)) + (z - part)
        is_even = total.view(np.uint64) % 2 == 0
        odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
        total = np.where(np.isfinite(lost) & (lost != 0) & is_even, odd, total)
        return total.astype(F32)
