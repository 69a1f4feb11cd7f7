"""The oracle: what every op and one delayed-scaling step must give, in numpy and ml_dtypes alone.

It shares no code with the package and imports nothing of JAX, so a wrong rule cannot be wrong in both places. The
rules are those of docs/numerics.md; `test_formats.py` checks the oracle itself against a third, exact source (the
midpoints of the 256 codes, rational quotients).

Convention: `scale` multiplies to quantize, `scale_inv = 1 / scale` to dequantize. A *stored* scale is a `scale_inv`.
Numpy keeps f32 subnormals (no flush to zero), which is what the rules ask for.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
from oracle_accumulation import gemm_bound

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
SCALE_MAX = F32(2.0**126)  # keeps 1 / scale a normal f32
SCALE_MIN = F32(2.0**-126)  # keeps 1 / scale finite


@dataclasses.dataclass(frozen=True)
class Format:
    """An FP8 format: its ml_dtypes dtype, its largest value and its one NaN code."""

    name: str
    dtype: np.dtype
    max: float
    nan_code: int


E4M3 = Format("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 448.0, 0x7F)
E5M2 = Format("e5m2", np.dtype(ml_dtypes.float8_e5m2), 57344.0, 0x7E)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def all_codes(fmt: Format) -> np.ndarray:
    """The 256 codes, in order."""
    return np.arange(256, dtype=np.uint8).view(fmt.dtype)


def all_half_codes(dtype) -> np.ndarray:
    """The 65,536 values of a 16-bit float dtype, NaNs and infinities included, in order of their bits."""
    return np.arange(65536, dtype=np.uint16).view(dtype)


def bits(values) -> np.ndarray:
    """The bytes of an array as unsigned integers: what 'bitwise equal' compares."""
    values = np.asarray(values)
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(values.shape)


def assert_bitwise(got, expected, what: str) -> None:
    """Raises AssertionError unless shape, dtype and every byte agree; says where the first difference is."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    different = bits(got) != bits(expected)
    if different.any():
        first = np.unravel_index(np.argmax(different), different.shape)
        raise AssertionError(
            f"{what}: {different.sum()} of {different.size} differ; first at {first}: got {got[first]!r} "
            f"({bits(got)[first]:#x}), expected {expected[first]!r} ({bits(expected)[first]:#x})"
        )


def widen(x, dtype=F32) -> np.ndarray:
    """x as f32 or f64, exactly; signalling NaNs do not warn."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(dtype)


# ---------------------------------------------------------------------------------------------------------------- ops


def amax(x) -> np.float32:
    """max |x| as f32; 0 for an empty array; NaN counts as +inf."""
    x = np.asarray(x)
    if x.size == 0:
        return F32(0)
    magnitude = np.abs(widen(x))
    return F32(np.where(np.isnan(magnitude), F32(np.inf), magnitude).max())


def encode(y, fmt: Format) -> np.ndarray:
    """f32 -> codes: nearest even, saturating (infinities too), NaN without sign."""
    y = np.asarray(y)
    if y.dtype != F32:
        raise TypeError(f"encode: y: expected float32, got {y.dtype}")
    with np.errstate(invalid="ignore"):
        codes = np.array(np.clip(y, F32(-fmt.max), F32(fmt.max)).astype(fmt.dtype))
    codes.view(np.uint8)[np.isnan(y)] = fmt.nan_code
    return codes


def quantize(x, scale, fmt: Format) -> tuple[np.ndarray, np.float32]:
    """(codes, amax): one f32 multiplication, one rounding. A non-finite x becomes the NaN code."""
    wide = widen(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = wide * F32(scale)
    y = np.where(np.isfinite(wide), y, F32(np.nan)).astype(F32)
    return encode(y, fmt), amax(x)


def counts(x, scale, fmt: Format) -> np.ndarray:
    """How many elements have |x * scale| above the largest value, and how many are not zero and get the code of zero.

    An infinity is above it, a NaN is not. f32 `[2]`, so at most 2**24 elements.
    """
    wide, zero = widen(x), np.isin(bits(quantize(x, scale, fmt)[0]), (0x00, 0x80))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        saturated = np.abs(wide * F32(scale)) > fmt.max
    return F32([saturated.sum(), (zero & (wide != 0)).sum()])


def quantize_transpose(x, scale, fmt: Format) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes, codes transposed, amax) of a matrix."""
    data, top = quantize(x, scale, fmt)
    return data, np.ascontiguousarray(data.T), top


def assert_column_sums(got, x, what: str = "column sums") -> None:
    """Raises AssertionError unless f32 `[n]` are the sums over the rows of x `[m, n]`, in any order of additions.

    m - 1 additions in f32, each off by at most 2**-24 of a partial sum, which is at most S = sum|x|: the error is at
    most (m - 1) 2**-24 S to first order (Higham, eq. 4.4), and 2**-126 an addition where XLA flushes subnormals. The
    factor 1 + 2**-10 covers the higher orders for m below 2**13.
    """
    with np.errstate(invalid="ignore"):
        wide = np.asarray(x).astype(np.float64)
        exact, total = wide.sum(axis=0), np.abs(wide).sum(axis=0)
        bound = len(wide) * (PRECISE * total * (1 + 2.0**-10) + 2.0**-126)
        got = np.asarray(got)
        assert got.dtype == F32 and got.shape == exact.shape, f"{what}: {got.dtype}{got.shape}, expected {exact.shape}"
        good = (np.abs(got.astype(np.float64) - exact) <= bound) | (got == exact) | (np.isnan(got) & np.isnan(exact))
    assert good.all(), f"{what}: {(~good).sum()} of {good.size} out of bound; first at {np.argmin(good)}"


def dequantize(codes, scale_inv, dtype) -> np.ndarray:
    """codes * scale_inv in f32, rounded once to `dtype`; every NaN is the quiet positive one of `dtype`."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wide = widen(codes) * F32(scale_inv)
        out = np.array(wide.astype(dtype))
    out[np.isnan(wide)] = np.array(np.nan, dtype=dtype)
    return out


# -------------------------------------------------------------------------------------------------- fused producers


@dataclasses.dataclass(frozen=True)
class Values:
    """What a producer quantizes: `exact` in f64, and the absolute error `bound` of an f32 implementation."""

    exact: np.ndarray
    bound: np.ndarray

    def check(self, data, data_t, top, scale, fmt: Format, *, start=0.0, what: str = "codes") -> None:
        """Raises AssertionError unless the codes are those of some f32 values within the bound, and so is the amax.

        f64 values keep what an f32 one loses, so a value counts as infinite where it rounds to that in f32; one that is
        within its bound of that may be either.

        Args:
            data: codes, of the shape of the values.
            data_t: their transpose, last dimension first; None to leave it out.
            top: the amax; `start` is the least it may be.
            scale: f32.
        """
        data = np.asarray(data)
        assert data.shape == self.exact.shape, f"{what}: shape {data.shape}, expected {self.exact.shape}"
        assert data.dtype == fmt.dtype, f"{what}: dtype {data.dtype}, expected {fmt.dtype}"
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = ((self.exact + sign * self.bound).astype(F32) for sign in (-1, 1))
            finite = np.isfinite(low) & np.isfinite(high)
            unsure = ~finite & ~np.isnan(low) & (low != high)
            # One more rounding, of the product with the scale.
            least, most = (np.sort([low * F32(scale), high * F32(scale)], axis=0)[i] for i in (0, 1))
            least, most = np.nextafter(least, F32(-np.inf)), np.nextafter(most, F32(np.inf))
        got, least, most = (widen(v) for v in (data, encode(least, fmt), encode(most, fmt)))
        good = np.where(finite, (least <= got) & (got <= most), np.isnan(got) | unsure)
        if not good.all():
            worst = np.unravel_index(np.argmin(good), good.shape)
            raise AssertionError(
                f"{what}: {(~good).sum()} of {good.size} wrong; first at {worst}: got {got[worst]!r}, expected "
                f"{least[worst]!r} to {most[worst]!r} of {self.exact[worst]!r} +- {self.bound[worst]!r}"
            )
        if data_t is not None:
            order = (data.ndim - 1, *range(data.ndim - 1))
            assert_bitwise(np.asarray(data_t), np.ascontiguousarray(data.transpose(order)), f"{what}: data_t")
        ends = [amax(np.concatenate([v.reshape(-1), [F32(start)]])) for v in (low, high)]
        with np.errstate(invalid="ignore"):
            least = np.maximum(0, np.abs(self.exact) - self.bound)
        sure = np.where(finite, least, np.where(unsure, 0, np.inf))
        smallest = max(float(sure.max(initial=0)) * (1 - 2.0**-23), float(start))
        assert smallest <= float(top) <= max(ends), f"{what}: amax {top!r}, expected {smallest!r} to {max(ends)!r}"


_U = 2.0**-24  # unit roundoff of f32


def _sigmoid(z):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def activation(x, name: str) -> Values:
    """gelu (tanh), silu, relu of x; gated: of x[..., 0, :], times x[..., 1, :].

    The bound, for x * s(z) with s(z) = 1 / (1 + exp(-z)), z = x or 2 sqrt(2/pi) (x + 0.044715 x^3). An exponent that is
    off by 5u of itself (two constants, a square, a sum, a product) and an exp off by 4u make exp(-z) off by
    (5 |z| + 4) u, of which 1 + exp(-z) has the share s(-z). Sum, quotient and product add at most u, 2u and u:

        |error| <= |result| (s(-z) (5 |z| + 4) + 4) u

    The implementations may flush subnormals, or lose a result to an exp(-z) above the largest f32: at most 88 * 2^-126
    is lost. A gate multiplies all this and rounds once more. A product of terms in u is below u^2 (5 * 88 + 8)^2 < u,
    which one more u covers.
    """
    x = widen(x, np.float64)
    gated = name.endswith("_gated")
    gate, up = (x[..., 0, :], x[..., 1, :]) if gated else (x, np.float64(1))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if name == "relu":
            return Values(np.where(gate <= 0, 0, gate), np.full(gate.shape, 2.0**-126))
        z = gate if name.startswith("silu") else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        # Beyond, s(z) is a zero of f64 as well, but 0 * inf is not.
        share = np.where(z < -700, 1, _sigmoid(-z))
        exact = gate * _sigmoid(z) * up
        relative = (share * (5 * np.minimum(np.abs(z), 88) + 4) + 4 + gated + 1) * _U
        bound = np.abs(exact) * relative + 88 * 2.0**-126 * np.maximum(1, np.abs(up))
        # Next to the largest f32 the function of a gate may round to infinity before it is multiplied.
        bound = np.where(gated & (np.abs(gate) >= 2.0**128 * (1 - 8 * _U)), np.inf, bound)
    return Values(exact, np.where(np.isfinite(exact), bound, 0))


def norm(x, gamma, beta, kind: str, epsilon: float, depth: int | None = None) -> Values:
    """RMSNorm ("rms") or LayerNorm ("layer") over the last dimension.

    The bound, for sums whose terms take part in at most `depth` additions (by default any order: n), to first order in
    u; 1 + 2^-6 covers the products of the terms, each below 2^-8 for n <= 2^15:
      - the mean: depth + 1 roundings of terms that sum up to mean|x|;
      - a centered value c: that, and one rounding of itself;
      - the variance of computed c: for their squares depth + 3 relative, for their errors 2 mean(|c| |error|) and
        mean(error^2);
      - rsqrt: half of the relative error of variance + epsilon (one more rounding); itself up to 4u;
      - the result: |c| and its error, times factor and its relative error of three more roundings; a sum with beta.
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
            c_error = (depth + 1) * _U * np.abs(x).mean(-1, keepdims=True) + _U * np.abs(c)
        variance = (c * c).mean(-1, keepdims=True)
        variance_error = (depth + 3) * _U * variance + (2 * np.abs(c) * c_error + c_error**2).mean(-1, keepdims=True)
        total = variance + epsilon
        factor = gamma / np.sqrt(total)
        factor_error = variance_error / total / 2 + 6 * _U
        exact = c * factor
        bound = np.abs(exact) * factor_error + c_error * np.abs(factor) + 2 * _U * np.abs(exact)
        if beta is not None:
            exact = exact + widen(beta, np.float64)
            bound = bound + _U * np.abs(exact)
        bound = bound * (1 + 2.0**-6) + 2.0**-126 * np.maximum(1, np.abs(factor))
    return Values(exact, np.where(np.isfinite(exact), bound, 0))


def multiply_add(x, y, z) -> np.ndarray:
    """x * y + z of f32, rounded once to f32.

    In f64 the product is exact and the sum is not. Rounded to odd, its last bit tells that something was lost, so that
    the second rounding, to 29 bits fewer, is that of the exact sum (Boldo and Melquiond, 2008).
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


def affine(x, statistics, gamma, beta) -> np.ndarray:
    """`(x - mean) * (rstd * gamma) + beta` of rows, in f32: three roundings. Without beta the product is the third.

    statistics: `[m, 2]`, rstd and mean of each row; or `[m, 1]`, without a mean.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        centered = widen(x) if statistics.shape[-1] == 1 else widen(x) - statistics[..., 1:]
        factor = statistics[..., :1] * gamma
        return centered * factor if beta is None else multiply_add(centered, factor, np.broadcast_to(beta, x.shape))


# ------------------------------------------------------------------------------------------------- delayed scaling


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `DelayedScaling` that change numbers."""

    margin: int = 0
    amax_compute_algo: str | Callable = "max"
    first_step: str = "unit"


@dataclasses.dataclass(frozen=True)
class State:
    """The state of one quantizer: `amax_history` f32 (H,), slot 0 newest; `scale` f32 scalar, a scale_inv."""

    amax_history: np.ndarray
    scale: np.float32

    @staticmethod
    def init(length: int) -> "State":
        return State(np.zeros(length, F32), F32(1))


def is_below_zero(x) -> np.ndarray:
    """Whether an optimizer has stepped on it: -inf <= x < 0, by the bits, which no flushing thread changes."""
    bits = np.asarray(x, F32).view(np.uint32).astype(np.int64)
    return (bits > 0x80000000) & (bits <= 0xFF800000)


def clean_history(history) -> np.ndarray:
    """The history as it is read: f32, entries that are negative or not finite count as 0."""
    history = np.asarray(history).astype(F32)
    return np.where(np.isfinite(history) & (history > 0), history, F32(0)).astype(F32)


def _usable(value) -> bool:
    return value is not None and bool(np.isfinite(value) and value > 0)


def scale_pair(amax, stored, numerator) -> tuple[np.ndarray, np.ndarray]:
    """(scale, scale_inv) of each amax: numerator / amax, else 1 / stored, else 1; correctly rounded. NaN below zero.

    The divisor is clamped, so that scale and scale_inv are in [2**-126, 2**126]; a subnormal amax counts as 2**-126.
    The quotients are formed in f64: rounding one twice is harmless (53 >= 2 * 24 + 2 bits).
    """
    with np.errstate(invalid="ignore"):  # signalling NaNs
        is_state = ~(is_below_zero(amax) | is_below_zero(stored))
        amax, stored, numerator = np.asarray(amax, np.float64), np.asarray(stored, np.float64), float(numerator)
    low, high = float(SCALE_MIN), float(SCALE_MAX)
    smallest, largest = max(numerator / high, low), min(numerator / low, float(np.finfo(F32).max))
    has_amax, has_stored = ((v > 0) & (v < np.inf) for v in (amax, stored))
    divisor = np.where(has_amax, np.clip(amax, smallest, largest), np.where(has_stored, np.clip(stored, low, high), 1))
    scale = np.where(is_state, np.where(has_amax, numerator, 1) / divisor, np.nan).astype(F32)
    return scale, (1 / scale.astype(np.float64)).astype(F32)


def amax_to_scale(a, fmt: Format, margin: int = 0) -> np.float32:
    """FP8_MAX / a / 2**margin, with an integer margin: dividing by 2**margin is exact, so the order is free."""
    return F32(scale_pair(a, 1, fmt.max / 2.0**margin)[0])


def select_scale(state: State, fmt: Format, options: Options = Options(), current_amax=None) -> np.float32:
    """The scale of this step, from the stored history and scale (and the tensor in hand for first_step="current")."""
    if np.any(is_below_zero(np.asarray(state.amax_history).astype(F32))) or is_below_zero(state.scale).any():
        return F32(np.nan)
    history = clean_history(state.amax_history)
    algorithm = options.amax_compute_algo
    if algorithm == "max":
        a = history.max()
    elif algorithm == "most_recent":
        a = history[0]
    else:
        a = F32(algorithm(history))
    if not history.any():
        a = current_amax if options.first_step == "current" else F32(0)
    if _usable(a):
        return amax_to_scale(a, fmt, options.margin)
    stored = np.asarray(state.scale).astype(F32).reshape(())
    if not _usable(stored):
        return F32(1)
    with np.errstate(over="ignore"):  # 1 / subnormal
        return F32(min(max(F32(1) / stored, SCALE_MIN), SCALE_MAX))


def delayed_scale(history, stored, numerator, most_recent=False):
    """(history moved one step with 0 in slot 0, scale, scale_inv) of one quantizer before a step."""
    is_stepped_on = np.any(is_below_zero(history))
    history = clean_history(history)
    amax = F32(-1) if is_stepped_on else history[0] if most_recent else history.max()
    scale, scale_inv = scale_pair(amax, stored, numerator)
    history = np.roll(history, -1)
    history[0] = 0
    return history, scale, scale_inv


def push_amax(history, amax) -> np.ndarray:
    """The history with slot 0 the amax, or 0 where that is not a positive number."""
    history = np.array(history)
    history[0] = clean_history(amax)
    return history


def reading(history, stored) -> np.ndarray:
    """What a step needs of the state of a quantizer: f32 `[4]`, the window's amax, the newest, the scale and a 0."""
    if np.any(is_below_zero(history)) or np.any(is_below_zero(stored)):
        return np.concatenate([F32([-1, -1]), np.ravel(stored), F32([0])])
    entries = clean_history(history)
    return np.concatenate([[entries.max(), entries[0]], np.ravel(stored), F32([0])]).astype(F32)


def write_history(history, recorded) -> tuple[np.ndarray, np.float32]:
    """(next history, next scale) from the amax and the scale_inv of a step; zeros where the latter is 0."""
    amax, scale_inv = recorded[:2]
    if scale_inv == 0:
        return np.zeros_like(history), scale_inv
    entries = clean_history(history)
    return np.concatenate([clean_history([amax]), entries[2:], entries[:1]])[: len(history)], scale_inv


def next_state(state: State, scale, amax_now) -> State:
    """History rolled by -1, the oldest entry dropped, slot 0 the new amax (0 when it is not finite); s' = 1 / scale."""
    history = np.roll(clean_history(state.amax_history), -1)
    history[0] = amax_now if np.isfinite(amax_now) else F32(0)
    return State(history, F32(1) / F32(scale))


def step(x, state: State, fmt: Format, options: Options = Options()):
    """One quantizer, one step: (codes, scale, next state)."""
    scale = select_scale(state, fmt, options, amax(x))
    codes, top = quantize(x, scale, fmt)
    return codes, scale, next_state(state, scale, top)


# -------------------------------------------------------------------------------------------------------------- GEMM

# Unit roundoffs (half a unit in the last place) and half the smallest subnormal; f32 and bf16 results below 2**-126
# may be flushed to zero by XLA:CPU, so their absolute term is that whole smallest normal.
_UNIT_ROUNDOFF = {np.dtype(F32): 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
_ABSOLUTE = {np.dtype(F32): 2.0**-126, BF16: 2.0**-126, F16: 2.0**-25}
PRECISE = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Product:
    """An exact product: `exact` in f64 (after scales, bias, accumulator) and the allowed absolute error `bound`."""

    exact: np.ndarray
    bound: np.ndarray

    def check(self, got, what: str = "product") -> None:
        """Raises AssertionError unless `got` is within the bound, NaN exactly where the exact product is NaN."""
        got = np.asarray(got)
        assert got.shape == self.exact.shape, f"{what}: shape {got.shape}, expected {self.exact.shape}"
        limit = float(ml_dtypes.finfo(got.dtype).max)
        # Where a result may round past the largest value of its dtype, an infinity of that sign is right as well.
        may_overflow = np.abs(self.exact) + self.bound > limit
        wide = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            good = np.abs(wide - self.exact) <= self.bound
            good |= (wide == self.exact) | (np.isnan(wide) & np.isnan(self.exact))
            good |= may_overflow & np.isinf(wide) & (np.sign(wide) == np.sign(self.exact))
        if not good.all():
            worst = np.unravel_index(np.argmin(good), good.shape)
            raise AssertionError(
                f"{what}: {(~good).sum()} of {good.size} out of bound; first at {worst}: got {wide[worst]!r}, exact "
                f"{self.exact[worst]!r}, bound {self.bound[worst]!r}"
            )


def rescaled(sums, a_scale_inv, b_scale_inv) -> np.ndarray:
    """f32 sums times both inverse scales: by the scales' product where that is a normal number, else one by one."""
    sums, a_scale_inv, b_scale_inv = (np.asarray(x, F32) for x in (sums, a_scale_inv, b_scale_inv))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = a_scale_inv * b_scale_inv
        is_normal = (np.abs(product) >= 2.0**-126) & np.isfinite(product)
        return np.where(is_normal, sums * product, (sums * a_scale_inv) * b_scale_inv)


def scaled_matmul(
    a, b, a_scale_inv, b_scale_inv, *, bias=None, accumulator=None, out_dtype=F32, accumulation="exact", device=None,
    op="scaled_matmul",
):  # fmt: skip
    """a `[m, k]`, b `[n, k]` codes -> Product of (a @ b.T) * a_scale_inv * b_scale_inv (+ bias) (+ accumulator).

    FP8 products have at most 8 significant bits; f64 sums them with errors of 2**-53, far below every tolerance.

    The bound, with u = 2**-24 and S = sum|a_k b_k|:
      - the sum: `oracle_accumulation.gemm_bound`, which says what `accumulation`, `device` and `op` are;
      - s = a_scale_inv * b_scale_inv is rounded once (u) and the multiplication by it once more (u), or both scales
        multiply the sum one after the other (`rescaled`), which rounds twice as well: 2u |s| S;
      - each of bias and accumulator is one more f32 addition: u times the magnitude of the partial result, at most
        R = |s| S + |bias| + |accumulator|;
      - a scale below 2**-126 may be flushed, and so may s where cuBLASLt multiplies: |s| S more;
      - the final rounding to out_dtype: eps_out times the magnitude of the result (already in error by the above), plus
        half the smallest subnormal.
    """
    a64, b64 = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    s = float(np.asarray(a_scale_inv, np.float64).reshape(())) * float(np.asarray(b_scale_inv, np.float64).reshape(()))
    with np.errstate(invalid="ignore", over="ignore"):
        exact = (a64 @ b64.T) * s
        total = np.abs(a64) @ np.abs(b64).T
        magnitude = total * abs(s)
        bound = gemm_bound(a, b, accumulation, device, op) * abs(s) + magnitude * 2 * PRECISE
        factors = [a_scale_inv, b_scale_inv] + [s] * (accumulation != "exact" and op == "scaled_matmul")
        if any(abs(float(np.asarray(factor).reshape(()))) < 2.0**-126 for factor in factors):
            bound = bound + magnitude
        for term in (bias, accumulator):
            if term is not None:
                term = np.asarray(term).astype(np.float64)
                exact = exact + term
                magnitude = magnitude + np.abs(term)
                bound = bound + PRECISE * magnitude
        out_dtype = np.dtype(out_dtype)
        eps_out = _UNIT_ROUNDOFF[out_dtype]
        # A factor 1 + 2**-10 covers the products of the small terms above, each below 2**-10 for K <= 2**12.
        bound = (bound + eps_out * (np.abs(exact) + bound)) * (1 + 2.0**-10) + _ABSOLUTE[out_dtype]
    return Product(exact, bound)


def group_ranges(group_sizes) -> list[tuple[int, int]]:
    """(begin, end) of each group of rows."""
    ends = [int(end) for end in np.cumsum(group_sizes)]
    return list(zip([0, *ends], ends, strict=False))


def _columns(x, begin: int, end: int, on_gpu: bool):
    """x[:, begin:end]. The kernel adds from the last multiple of 16 on, with zeros up to the first column."""
    first = begin // 16 * 16 if on_gpu else begin
    return np.where(np.arange(first, end) < begin, np.zeros((), x.dtype), x[:, first:end])


def ragged_matmul(a, b, a_scale_inv, b_scale_inv, group_sizes, **options) -> Product:
    """a `[m, k]` by b `[g, n, k]`, group by group of rows; or a `[p, m]` by b `[n, m]`, cut along m, to `[g, p, n]`."""
    ranges, a, b = group_ranges(group_sizes), np.asarray(a), np.asarray(b)
    options["op"] = "ragged_matmul"
    if b.ndim == 2:
        on_gpu = options.get("accumulation", "exact") != "exact"
        cuts = [[_columns(x, i, j, on_gpu) for x in (a, b)] for i, j in ranges]
        parts = [scaled_matmul(*cut, a_scale_inv, b_scale_inv, **options) for cut in cuts]
        return Product(*(np.stack([getattr(part, name) for part in parts]) for name in ("exact", "bound")))
    parts = [scaled_matmul(a[i:j], b[e], a_scale_inv, b_scale_inv, **options) for e, (i, j) in enumerate(ranges)]
    rest = np.zeros((a.shape[0] - ranges[-1][1], b.shape[1]))  # exactly zero, whatever these rows hold
    return Product(*(np.concatenate([*(getattr(part, name) for part in parts), rest]) for name in ("exact", "bound")))


# ------------------------------------------------------------------------------------------------------------- layer


@dataclasses.dataclass(frozen=True)
class LayerState:
    """The three quantizers of a layer."""

    input: State
    kernel: State
    output_grad: State

    @staticmethod
    def init(length: int) -> "LayerState":
        return LayerState(*(State.init(length) for _ in range(3)))


@dataclasses.dataclass(frozen=True)
class DenseStep:
    """All a Dense layer's step gives: codes, scales, the three products, the next state."""

    codes: dict[str, np.ndarray]
    scales: dict[str, np.float32]
    y: Product
    dgrad: Product
    wgrad: Product
    state: LayerState


def dense_step(
    x,
    kernel,
    grad,
    state: LayerState,
    options: Options = Options(),
    *,
    forward: Format = E4M3,
    backward: Format = E5M2,
    out_dtype=F32,
    dgrad_dtype=F32,
    wgrad_dtype=F32,
    bias=None,
) -> DenseStep:
    """One forward and backward of y = x @ kernel: fprop = x @ kernel, dgrad = grad @ kernel.T, wgrad = x.T @ grad.

    x `[m, k]`, kernel `[k, n]`, grad `[m, n]` in the dtypes in which they are quantized. bias `[n]` is added to y,
    rounded to out_dtype.
    """
    x_codes, x_scale, x_state = step(x, state.input, forward, options)
    k_codes, k_scale, k_state = step(kernel, state.kernel, forward, options)
    g_codes, g_scale, g_state = step(grad, state.output_grad, backward, options)
    x_inv, k_inv, g_inv = x_state.scale, k_state.scale, g_state.scale
    return DenseStep(
        codes={"input": x_codes, "kernel": k_codes, "output_grad": g_codes},
        scales={"input": x_scale, "kernel": k_scale, "output_grad": g_scale},
        y=scaled_matmul(
            x_codes, k_codes.T, x_inv, k_inv, bias=None if bias is None else bias.astype(out_dtype), out_dtype=out_dtype
        ),
        dgrad=scaled_matmul(g_codes, k_codes, g_inv, k_inv, out_dtype=dgrad_dtype),
        wgrad=scaled_matmul(x_codes.T, g_codes.T, x_inv, g_inv, out_dtype=wgrad_dtype),
        state=LayerState(x_state, k_state, g_state),
    )


def ragged_step(
    lhs,
    rhs,
    group_sizes,
    grad,
    state: LayerState,
    options: Options = Options(),
    *,
    forward: Format = E4M3,
    backward: Format = E5M2,
    out_dtype=F32,
    dgrad_dtype=F32,
    wgrad_dtype=F32,
) -> DenseStep:
    """One forward and backward of rows of lhs `[m, k]` by the matrix of their group in rhs `[g, k, n]`.

    dgrad = grad @ rhs[e].T for the rows of group e, wgrad[e] = lhs.T @ grad over them. Rows of no group are as if lhs
    and grad were zero there.
    """
    rows = group_ranges(group_sizes)[-1][1]
    lhs, grad = (np.where(np.arange(len(x))[:, None] < rows, x, np.zeros((), x.dtype)) for x in (lhs, grad))
    x_codes, x_scale, x_state = step(lhs, state.input, forward, options)
    k_codes, k_scale, k_state = step(rhs, state.kernel, forward, options)
    g_codes, g_scale, g_state = step(grad, state.output_grad, backward, options)
    x_inv, k_inv, g_inv = x_state.scale, k_state.scale, g_state.scale
    return DenseStep(
        codes={"input": x_codes, "kernel": k_codes, "output_grad": g_codes},
        scales={"input": x_scale, "kernel": k_scale, "output_grad": g_scale},
        y=ragged_matmul(x_codes, k_codes.swapaxes(1, 2), x_inv, k_inv, group_sizes, out_dtype=out_dtype),
        dgrad=ragged_matmul(g_codes, k_codes, g_inv, k_inv, group_sizes, out_dtype=dgrad_dtype),
        wgrad=ragged_matmul(x_codes.T, g_codes.T, x_inv, g_inv, group_sizes, out_dtype=wgrad_dtype),
        state=LayerState(x_state, k_state, g_state),
    )


# -------------------------------------------------------------------------------------------------------- test inputs


def rounding_probes(fmt: Format) -> np.ndarray:
    """f32 values at which rounding to `fmt` can go wrong, all exact.

    Every finite code, the midpoint of every two neighbours and of the largest value and its would-be successor, each
    with its f32 neighbours on both sides, in both signs; zeros.
    """
    finite = all_codes(fmt).astype(np.float64)
    ladder = np.unique(np.abs(finite[np.isfinite(finite)]))
    last_step = ladder[-1] - ladder[-2]
    ladder = np.append(ladder, [ladder[-1] + last_step])
    points = np.concatenate([ladder, (ladder[:-1] + ladder[1:]) / 2]).astype(F32)
    points = np.concatenate([points, np.nextafter(points, F32(0)), np.nextafter(points, F32(np.inf))])
    return np.unique(bits(np.concatenate([points, -points]))).view(F32)


def f32_corner_cases(seed: int = 0) -> np.ndarray:
    """Zeros, subnormals, the smallest and largest numbers, infinities, NaNs of several payloads, random bits."""
    fixed = [0x00000000, 0x00000001, 0x00000002, 0x003FFFFF, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001]
    fixed += [0x3F800000, 0x7F7FFFFF, 0x7F000000, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]
    fixed = np.array(fixed, np.uint32)
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 2**32, 8192, dtype=np.uint32)
    subnormal = rng.integers(0, 2**23, 1024, dtype=np.uint32) | (rng.integers(0, 2, 1024, dtype=np.uint32) << 31)
    return np.concatenate([fixed, fixed | np.uint32(0x80000000), anything, subnormal]).view(F32)
