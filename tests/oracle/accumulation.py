"""How tensor cores add FP8 products: a model that runs, and the bound of a sum that
follows from it. numpy alone.

One addition of a tensor core takes the accumulator and `step` products. With e the
largest exponent among them, it cuts everything below 2**(e - bits) off each of them,
adds what is left exactly, and cuts the result to `out_bits` bits after the leading one.
The exponent of a product is the sum of its factors' exponents; a subnormal code has the
smallest one.

Where this is known from:
  - measured by others, to the bit, on all of these GPUs: Xie et al., MMA-Sim (arXiv
    2511.10909, and its source);
  - Hopper's 13 bits also by DeepSeek-V3 (section 3.5.2; its 14 bits count the leading
    one) and by SageAttention2 (its 22 bits are sign, exponent and these 13);
  - documented by NVIDIA: fast accumulation acts on Ada and Hopper, and leaves out the
    promotion to higher precision;
  - assumed: a promotion every 128 elements or fewer (128 is CUTLASS's default;
    cuBLASLt's is not documented), steps in ascending order, and f32 additions of all
    that leaves a tensor core (promotions, splits of K).
"""

import dataclasses
import functools

import numpy as np

U = 2.0**-24  # unit roundoff of f32
PROMOTION = 128


@dataclasses.dataclass(frozen=True)
class TensorCore:
    """One instruction's addition: how many products, and the bits that addends and
    result keep.
    """

    step: int
    bits: int
    out_bits: int


ADA = TensorCore(16, 13, 13)  # mma.sync of FP8: two additions of 16
HOPPER = TensorCore(32, 13, 13)  # wgmma of FP8
# tcgen05.mma and mma.sync, with or without scales of blocks
BLACKWELL = TensorCore(32, 25, 23)


def tensor_core(device: str) -> TensorCore:
    """The additions of a compute capability such as "9.0"."""
    if device == "8.9":
        return ADA
    if device.startswith("9."):
        return HOPPER
    if float(device) >= 10:
        return BLACKWELL
    raise ValueError(
        "tensor_core: device: expected a compute capability from 8.9 on, got "
        f"{device!r}"
    )


_SMALLEST = {"float8_e4m3fn": 2.0**-6, "float8_e5m2": 2.0**-14}  # normal number
_FRACTION_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
# the exponent of zero, which stays below that of every product when another is added to
# it
_ZERO = -60


def _exponent(x) -> np.ndarray:
    """floor(log2(|x|)), of codes and sums of their products: int8."""
    return np.where(x == 0, _ZERO, np.frexp(x)[1] - 1).astype(np.int8)


def _normal(x) -> np.ndarray:
    """|x|, or the smallest normal number of its format where it is less and not
    zero.
    """
    x = np.asarray(x)
    wide = np.abs(x.astype(np.float64))
    return np.where(wide == 0, 0, np.maximum(wide, _SMALLEST[x.dtype.name]))


def _operand(x) -> tuple[np.ndarray, np.ndarray]:
    """(values as f64, exponents as a tensor core reads them: that of a subnormal code
    is the smallest).
    """
    return np.asarray(x).astype(np.float64), _exponent(_normal(x))


# -------------------------------------------------------------------------------- model


def _cut(x, quantum):
    """x without what is below the quantum."""
    return np.trunc(x / quantum) * quantum


def _quantum(exponent, bits):
    """2**(exponent - bits)."""
    return np.ldexp(1.0, exponent.astype(int) - bits)


def tensor_core_matmul(
    a, b, *, step=32, bits=13, out_bits=None, promotion=None
) -> np.ndarray:
    """a `[m, k]` by b `[n, k]`, codes, as a tensor core adds them up. The result is
    f32.

    Args:
        step, bits: as in `TensorCore`; so is out_bits, by default `bits`.
        promotion: after how many elements the accumulator is added to an f32 sum and
            begins at zero; None: at the end.
    """
    # without NaN and infinities
    (a, a_exponent), (b, b_exponent) = _operand(a), _operand(b)
    out_bits = bits if out_bits is None else out_bits
    zero = np.zeros((len(a), len(b)))
    total, accumulator, since = zero.astype(np.float32), zero, 0
    for begin in range(0, a.shape[1], step):
        part = slice(begin, begin + step)
        products = a[:, None, part] * b[None, :, part]
        exponents = a_exponent[:, None, part] + b_exponent[None, :, part]
        largest = np.maximum(exponents.max(axis=-1), _exponent(accumulator))
        quantum = _quantum(largest, bits)
        added = _cut(products, quantum[..., None]).sum(axis=-1)
        added = added + _cut(accumulator, quantum)
        accumulator = _cut(added, _quantum(_exponent(added), out_bits))
        since += step
        if promotion and since >= promotion:
            total = total + accumulator.astype(np.float32)
            accumulator = zero
            since = 0
    return total + accumulator.astype(np.float32)


# -------------------------------------------------------------------------------- bound


def gemm_bound(
    a,
    b,
    accumulation: str = "exact",
    device: str | None = None,
    op: str = "scaled_matmul",
) -> np.ndarray:
    """How far a sum of products of codes may be from `a @ b.T`: f64 `[m, n]`, before
    scales and the result's rounding.

    Args:
        a, b: codes `[m, k]` and `[n, k]`.
        accumulation: "exact" (CPU, jnp reference), "fast" or "precise".
        device: the compute capability, such as "9.0"; with "exact" it is not read.
        op: "scaled_matmul" or "ragged_matmul"; on Ada the second goes to f32 more
            often.

    Exact: K exact products and at most K additions, each with relative error u on a
    partial sum of at most S = sum|a_k b_k|: error <= K u S / (1 - K u) (Higham,
    Accuracy and Stability, eq. 3.5).

    A tensor core, in one addition. Let A bound the accumulator, 2**e be the largest
    power of two in A and in the products, q = 2**(e - bits), and A' bound the result.
      - A product of exponent p is a multiple of 2**(p - f), where f is how many
        fraction bits both codes have, so it loses nothing where p - f >= e - bits. The
        others lose less than q each: n q.
      - The accumulator loses less than q; so does the sum of the products, should it be
        added to the accumulator by itself: 2 q.
      - The result loses less than 2**-out_bits of the largest power of two in A'.
    A, fast: the accumulator holds the steps since some step, because K may be split
    anywhere. It is at most the largest |P_s - P_j| over j <= s, where P are the sums of
    the first steps, plus the error so far. A, precise: the same with j among the last
    PROMOTION elements, plus the error of these.

    What leaves the tensor core is added in f32, at most once a step: steps u S / (1 -
    steps u) on top. The error so far is part of what is added; it is below 2**-9 S in
    every sum that a bound is of use for, which a factor covers.
    """
    a, b = np.asarray(a), np.asarray(b)
    k = a.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
        if accumulation == "exact":
            return total * _growth(k * U)
        if accumulation not in ("fast", "precise"):
            raise ValueError(
                'gemm_bound: accumulation: expected "exact", "fast" or "precise", got '
                f"{accumulation!r}"
            )
        core = tensor_core(device)
        steps = -(-k // core.step)
        added = total * _growth(steps * U) * (1 + 2.0**-9)
        if core.out_bits < 23:
            promotion = (
                None
                if accumulation == "fast"
                else 32
                if core is ADA and op == "ragged_matmul"
                else PROMOTION
            )
            return added + _lost(a, b, core, promotion)
        # As many bits as f32: instead of its power of two, the sum of all magnitudes.
        each = (min(core.step, k) + 2) * 2.0**-core.bits + 2.0**-core.out_bits
        return added + _normal(a) @ _normal(b).T * _growth(steps * each)


def _growth(x: float) -> float:
    return x / (1 - x)


def _lost(a, b, core: TensorCore, promotion: int | None) -> np.ndarray:
    """The sum over the additions of what each of them loses; see `gemm_bound`."""
    fraction_bits = sum(_FRACTION_BITS[x.dtype.name] for x in (a, b))
    (a, a_exponent), (b, b_exponent) = _operand(a), _operand(b)
    # ten times faster
    a_exponent, b_exponent = (
        np.ascontiguousarray(x.T) for x in (a_exponent, b_exponent)
    )
    window = promotion and -(-promotion // core.step)
    prefix = error = np.zeros((len(a), len(b)))
    # the sums, and the errors, where the accumulator may have begun
    starts, errors = [prefix], [error]

    def magnitude():
        return (
            functools.reduce(np.maximum, (np.abs(prefix - start) for start in starts))
            + error
            - errors[0]
        )

    for begin in range(0, a.shape[1], core.step):
        part = slice(begin, begin + core.step)
        exponents = a_exponent[part, :, None] + b_exponent[part, None]
        largest = np.maximum(exponents.max(axis=0), _exponent(magnitude()))
        cut = (exponents < largest - np.int8(core.bits - fraction_bits)).sum(
            axis=0, dtype=np.int8
        )
        # zeros lose nothing
        cut = (
            cut - len(exponents) + (a[:, part] != 0).astype(float) @ (b[:, part] != 0).T
        )
        error = error + (cut + 2) * _quantum(largest, core.bits)
        prefix = prefix + a[:, part] @ b[:, part].T
        error = error + _quantum(_exponent(magnitude()), core.out_bits)
        if window is None:  # the smallest and the largest sum say as much as all
            starts = [np.minimum(starts[0], prefix), np.maximum(starts[-1], prefix)]
        else:
            starts, errors = [*starts, prefix][-window:], [*errors, error][-window:]
    return error
