"""The cases of ops, at several shapes, dtypes and formats, and comparisons of their
results: functions `(results, expected) -> clause`, or None where the results are right.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..inspect._op_calls import Kind, call
from ..numerics import E4M3, E5M2

_DTYPES = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32)))
# The shapes `(m, n, k)` are tiny, odd, empty, aligned, in groups by vmap, or of many
# tiles: so many that an op meets every dtype with every format.
_SHAPES = (
    (1, 1, 1),
    (7, 129, 33),
    (217, 41, 112),
    (0, 5, 16),
    (256, 512, 384),
    (3, 33, 65, 17),
    (2048, 4096, 256),
)
# The ops that compute values themselves, with rounding errors of their own.
COMPUTED = ("quantize_activation", "quantize_activation_grad", "quantize_norm")
# For values whose last bits are free: the fraction of codes that may differ, and the
# relative error of the amax.
_DIFFERENT, _AMAX = 0.01, 2.0**-11


def _bits(x):
    return x.view(f"u{x.dtype.itemsize}")


def _wrong(name, got, right, bound=None) -> str | None:
    """Compare two arrays to the bit, but with a `bound` for their differences; return
    the first place that is wrong, or None.

    Of numbers that are wider than codes any NaN is right where one is expected: XLA's
    compilers for CPUs and GPUs make different NaNs of the same code.
    """
    good = _bits(got) == _bits(right)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        if got.dtype.itemsize > 1:
            good |= np.isnan(got) & np.isnan(right)
        if bound is not None:
            good |= np.abs(got - right) <= bound
    if good.all():
        return None
    place = tuple(np.argwhere(~good)[0].tolist())
    return (
        f"{name}: {(~good).sum()} of {good.size} wrong, first at {place}: "
        f"{got[place]!r}, expected {right[place]!r}"
    )


def bit_problem(results, expected, inexact: tuple[int, ...] = ()):
    """Compare arrays to the bit; the results at `inexact` may be off by 8 units in the
    last place, of a number of at least 1.
    """
    for i, (got, right) in enumerate(zip(results, expected, strict=True)):
        bound = None
        if i in inexact:
            bound = 8 * 2.0**-23 * np.maximum(np.abs(right), 1)
        if problem := _wrong(f"result {i}", got, right, bound):
            return problem
    return None


# An update or a parameter comes before two moments, of three arrays each. A GPU's jnp
# divides and takes roots with errors of 2 ulp, of a number below 4 where a parameter's
# sum cancels. Moments are sums of products, which all platforms round alike.
_INEXACT = {"adam_update": (0, 7)}


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
        is_near = np.nextafter(data, right) == right
        if problem := _wrong("codes", np.where(is_near, right, data), right):
            return problem
        # Only a few values lie so near the middle of two codes that their last bits
        # decide.
        different = np.count_nonzero(data != right)
        if different > 1 + _DIFFERENT * data.size:
            return f"codes: {different} of {data.size} differ by one"
    return _wrong("amax", amax, right_amax, _AMAX * right_amax)


class Case(NamedTuple):
    """A call of an op.

    Attributes:
        op: the name of the op.
        name: the name of the case, for people.
        function: the function to call.
        arguments: its arguments, numpy arrays, for all groups.
    """

    op: str
    name: str
    function: Callable
    arguments: list

    def problem(self, results: list, expected: list) -> str | None:
        """Return what is wrong in the results of the case, numpy arrays like those of
        `reference`; None where they are right.
        """
        if self.op in COMPUTED:
            return _code_problem(results, expected)
        return bit_problem(results, expected, _INEXACT.get(self.op, ()))

    def reference(self) -> list:
        """Return the results of the reference."""
        with ops.implementation("reference"):
            return jax.tree.leaves(jax.jit(self.function)(*self.arguments))


def cases(op: str) -> Iterator[Case]:
    """Yield the cases of an op, which take shapes, dtypes and formats in turn."""
    for index, shape in enumerate(_SHAPES):
        dtype, form = _DTYPES[index // 2 % 3], (E4M3, E5M2)[index % 2]
        is_hard = 100 < np.prod(shape[:-1]) < 10**5
        yield case(op, Kind(shape, dtype, form, index, is_hard))


def case(op: str, kind: Kind) -> Case:
    """Return one case."""
    function, arguments = call(op, kind)
    shape = ",".join(map(str, kind.shape))
    name = f"{kind.dtype.name}[{shape}] {kind.form}, {kind.index}"
    return Case(op, name, function, arguments)
