"""The cases of ops, at several shapes, dtypes and formats, and comparisons of their
results: functions `(results, expected) -> clause`, or None where the results are right.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..inspect._op_calls import PRODUCTS, Kind, call
from ..numerics import E4M3, E5M2

_DTYPES = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32)))
_PAIRS = tuple(itertools.product(_DTYPES, (E4M3, E5M2)))
# The shapes are tiny, odd, empty, aligned, in groups by vmap, or of many tiles. Their
# number, 7, is prime to that of _PAIRS, 6, so that every shape meets every pair.
_MATRICES = ((1, 1), (7, 129), (217, 41), (0, 5), (256, 512), (3, 33, 65), (2048, 4096))
_PRODUCTS = (
    (1, 1, 1),
    (7, 5, 33),
    (48, 80, 112),
    (0, 5, 16),
    (256, 384, 512),
    (3, 33, 17, 65),
    (512, 512, 1024),
)
# The ops that compute values themselves, with rounding errors of their own.
COMPUTED = ("quantize_activation", "quantize_activation_grad", "quantize_norm")
# For values whose last bits are free: the fraction of codes that may differ, and the
# relative error of the amax.
_DIFFERENT, _AMAX = 0.01, 2.0**-11
_STEP = 16  # the products that a tensor core adds at once; a larger step loses less
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
_SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-25, "float32": 2.0**-126}


def _bits(x):
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)


def _wrong(what, good, got, expected) -> str | None:
    """Return the first place where `good` is False; None where there is none."""
    if good.all():
        return None
    place = tuple(int(i) for i in np.unravel_index(np.argmin(good), good.shape))
    return (
        f"{what}: {(~good).sum()} of {good.size} wrong, first at {place}: "
        f"{got[place]!r}, expected {expected[place]!r}"
    )


def bit_problem(results, expected):
    """Compare arrays to the bit; of numbers that are wider than codes any NaN is right
    where one is expected.
    """
    for i, (got, right) in enumerate(zip(results, expected, strict=True)):
        if (got.shape, got.dtype) != (right.shape, right.dtype):
            return (
                f"result {i}: {got.dtype}{got.shape}, expected "
                f"{right.dtype}{right.shape}"
            )
        good = _bits(got) == _bits(right)
        # XLA's compilers for CPUs and GPUs make different NaNs of the same code.
        if got.dtype.itemsize > 1:
            good |= np.isnan(got) & np.isnan(right)
        if problem := _wrong(f"result {i}", good, got, right):
            return problem
    return None


def _near(got, right, bound):
    same = (got == right) | (np.isnan(got) & np.isnan(right))
    return same | (np.abs(got - right) <= bound)


def _step_problem(results, expected):
    """Compare the results of `adam_update`."""
    # Two updates or parameters, then two moments of each. A GPU's jnp divides and takes
    # roots with errors of 2 ulp, of a number below 4 where a parameter's sum cancels.
    # Moments are sums of products, which all platforms round alike.
    with np.errstate(invalid="ignore"):
        for i, (got, right) in enumerate(zip(results[:2], expected[:2], strict=True)):
            bound = 8 * 2.0**-23 * np.maximum(np.abs(right), 1)
            good = _near(got, right, bound)
            if problem := _wrong(f"result {i}", good, got, right):
                return problem
    return bit_problem(results[2:], expected[2:])


def _order(codes):
    """Map FP8 codes to integers in the order of their values."""
    bits = _bits(codes).astype(np.int16)
    return np.where(bits & 0x80, -(bits & 0x7F), bits)


def _code_problem(results, expected):
    """Compare the codes, in both layouts, of ops that compute the values they quantize,
    so that last bits decide between neighbouring codes.

    n additions are off by n units of 2**-24, for rows of 4096 by 2**-12. A code spans
    2**-4 of its value, so 2**-7 of codes may differ.
    """
    *layouts, (amax, right_amax) = zip(results, expected, strict=True)
    for data, right in layouts:
        # Rounding may give a neighbour of a number. It never turns a number into a NaN,
        # or a NaN into another code.
        distance = np.abs(_order(data) - _order(right))
        is_nan = np.isnan(np.float32(data)) | np.isnan(np.float32(right))
        good = distance <= np.where(is_nan, 0, 1)
        if problem := _wrong("codes", good, data, right):
            return problem
        # Only a few values lie so near the middle of two codes that their last bits
        # decide.
        if np.count_nonzero(distance) > 1 + _DIFFERENT * data.size:
            return f"codes: {np.count_nonzero(distance)} of {data.size} differ by one"
    with np.errstate(invalid="ignore"):
        good = _near(amax, right_amax, _AMAX * right_amax)
    return _wrong("amax", good, amax, right_amax)


_PROBLEMS = dict.fromkeys(COMPUTED, _code_problem) | {
    "adam_update": _step_problem,
}


def product_problem(got, pieces, added, tensor_cores: bool) -> str | None:
    """Compare a product with the exact one; the bound is derived here.

    A tensor core aligns the products of a step and the sum so far to the largest of
    these 17 numbers, and cuts each of them, and the new sum, after 13 bits: a step may
    lose 18 times 2**-13 of the largest number. However a kernel cuts k, the sum so far
    is a sum of consecutive terms. Without tensor cores sums are f32, and lose up to k
    times 2**-24 of the sum of magnitudes. Scales, each added term and the result are
    rounded once more.

    Args:
        got: the result, whose first dimensions may be the rows in groups.
        pieces: pairs `(a [..., m, k], b [..., n, k])` in float64, scaled; the result
            stacks their products by rows.
        added: `[..., 1 or m, n]` arrays in float64, which are added to the product.
        tensor_cores: whether tensor cores multiply.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # 1. Compute the exact product, and the error that its sum may have.
        parts = zip(*(_piece(a, b, tensor_cores) for a, b in pieces), strict=True)
        exact, bound = (np.concatenate(part, axis=-2) for part in parts)
        # 2. Add the errors of rounding scales and added terms in f32, and the result to
        #    its dtype. `_SMALLEST` covers subnormal results; 1 + 2**-10 covers products
        #    of these errors.
        bound = bound + 4 * 2.0**-24 * sum(map(np.abs, added), np.abs(exact))
        exact = sum(added, exact)
        bound += _ROUNDING[got.dtype.name] * (np.abs(exact) + bound)
        bound = (1 + 2.0**-10) * bound + _SMALLEST[got.dtype.name]
        got = got.astype(np.float64).reshape(exact.shape)
        return _wrong("product", _near(got, exact, bound), got, exact)


def _piece(a, b, tensor_cores):
    """Return the exact product, and the error that the sum may have."""
    k = a.shape[-1]
    b = np.swapaxes(b, -1, -2)
    if not tensor_cores:
        return a @ b, k * 2.0**-24 * (np.abs(a) @ np.abs(b))
    steps = []
    for i in range(0, max(k, 1), _STEP):
        steps.append(a[..., i : i + _STEP] @ b[..., i : i + _STEP, :])
    # However a kernel cuts k, its sum so far is the difference of two of these sums.
    sums = np.cumsum(steps, axis=0)
    # The largest number that a step aligns to: a product of two elements, or a sum so
    # far.
    a, b = np.abs(a), np.abs(b)
    largest = a.max(-1, keepdims=True, initial=0) * b.max(-2, keepdims=True, initial=0)
    largest = np.maximum(largest, sums.max(0, initial=0) - sums.min(0, initial=0))
    growth = len(steps) * (_STEP + 2) * 2.0**-13
    return sums[-1], growth / (1 - growth) * largest


class Case(NamedTuple):
    """A call of an op.

    Attributes:
        op: the name of the op.
        name: the name of the case, for people.
        function: the function to call.
        arguments: its arguments, numpy arrays, for all groups.
        terms: of a product the function of the arguments that gives the exact product,
            see `call`; else None.
    """

    op: str
    name: str
    function: Callable
    arguments: tuple
    terms: Callable | None

    def problem(self, results: list, expected: list, tensor_cores: bool) -> str | None:
        """Return what is wrong in the results of the case; None where they are right.

        Args:
            results: numpy arrays.
            expected: those of the reference; of a product nothing is read.
            tensor_cores: whether tensor cores multiply.
        """
        if self.terms:
            terms = self.terms(*self.arguments)
            return product_problem(results[0], *terms, tensor_cores)
        return _PROBLEMS.get(self.op, bit_problem)(results, expected)


def cases(op: str, quick: bool = False) -> Iterator[Case]:
    """Yield the cases of an op, which take shapes, and pairs of dtype and format, in
    turn; with `quick` five fewer.
    """
    shapes = _PRODUCTS if op in PRODUCTS else _MATRICES
    for index in range(len(shapes) + (0 if quick else 5)):
        shape = shapes[index % len(shapes)]
        pair = _PAIRS[index % len(_PAIRS)]
        yield case(op, Kind(shape, *pair, index, hard=100 < np.prod(shape) < 10**5))


def case(op: str, kind: Kind) -> Case:
    """Return one case; an additional leading dimension counts groups, each with
    arguments of its own.
    """
    rank = 3 if op in PRODUCTS else 2
    groups = kind.shape[:-rank]
    one = kind._replace(shape=kind.shape[-rank:])
    calls = [call(op, one, group) for group in range(*groups or (1,))]
    function, arguments, *terms = calls[0]
    if groups:
        function = jax.vmap(function)
        arguments = map(np.stack, zip(*(parts[1] for parts in calls), strict=True))
    shape = ",".join(map(str, kind.shape))
    name = f"{kind.dtype.name}[{shape}] {kind.form}, {kind.index}"
    return Case(op, name, function, tuple(arguments), *(terms or [None]))


def on_tpu(x: np.ndarray) -> np.ndarray:
    """Return x as a TPU may read it: in float32 and bfloat16 numbers below 2**-126 are
    zeros, and NaNs have no sign.
    """
    if x.dtype not in (np.float32, jnp.bfloat16):
        return x
    zero, nan = np.zeros_like(x), np.full_like(x, np.nan)
    return np.where(
        np.isnan(x), nan, np.where(np.abs(x) < np.float32(2.0**-126), zero, x)
    )
