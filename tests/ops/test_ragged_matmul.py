"""ragged_matmul: groups of every size, against the oracle's loop over groups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import E4M3, E5M2, F32
from parametrize import each_row

from jaxfp8 import ops

from . import cases

M, K, N = 150, 40, 24
SIZES = {
    "all rows": [40, 60, 50],
    "rows beyond": [10, 33, 7],
    "empty groups": [0, 100, 0, 0, 1, 0],
    "one group": [150],
    "part of one group": [3],
    "all in the last": [0, 0, 150],
    "all empty": [0, 0],
    "rows of one": [1] * 64,
}
KINDS = ("rows", "contraction")
A_INV, B_INV = F32(0.0123), F32(1.7e-4)


def shapes(kind, groups, m=M, k=K, n=N):
    return ((m, k), (groups, n, k)) if kind == "rows" else ((k, m), (n, m))


def operands(kind, groups, a_fmt=E4M3, b_fmt=E5M2, seed=0):
    pairs = zip(shapes(kind, groups), (a_fmt, b_fmt), strict=True)
    return [cases.random_codes(*pair, seed + i) for i, pair in enumerate(pairs)]


def accumulation(implementation, precise=False):
    """The tensor cores of the emulator and of the interpreter are Ada's."""
    if implementation.startswith(("emulated", "ptx")):
        return {"accumulation": "precise" if precise else "fast", "device": "8.9"}
    return cases.accumulation(implementation, precise)


def product(kind, sizes, a, b, **options):
    return ops.ragged_matmul(
        a, b, A_INV, B_INV, np.int32(sizes), ragged=kind, out_dtype=F32, **options
    )


def check(implementation, kind, sizes, a, b):
    got = product(kind, sizes, a, b)
    expected = oracle.ragged_matmul(
        a, b, A_INV, B_INV, sizes, **accumulation(implementation)
    )
    expected.check(got, f"{kind}, {sizes}")


@pytest.mark.parametrize("kind", KINDS)
@each_row("sizes", SIZES)
def test_sizes(implementation, kind, sizes):
    check(implementation, kind, sizes, *operands(kind, len(sizes)))


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(implementation, kind):
    """Every pair of formats and output dtype, as one program."""
    sizes, b_inv = [40, 0, 70], F32(B_INV / 64)
    pairs = [
        operands(kind, 3, *formats)
        for formats in itertools.product(cases.FORMATS, repeat=2)
    ]
    # elsewhere `precise` changes nothing
    on_tensor_cores = implementation.startswith(("cuda", "emulated", "ptx"))
    precise = (False, True) if on_tensor_cores else (True,)
    rows = list(itertools.product(range(len(pairs)), cases.INPUT_DTYPES, precise))

    @jax.jit
    def products(pairs, sizes):
        return [
            ops.ragged_matmul(
                *pairs[i],
                A_INV,
                b_inv,
                sizes,
                ragged=kind,
                out_dtype=dtype,
                precise=precise,
            )
            for i, dtype, precise in rows
        ]

    for (i, dtype, precise), got in zip(
        rows, products(pairs, np.int32(sizes)), strict=True
    ):
        assert got.dtype == dtype
        options = {"out_dtype": dtype} | accumulation(implementation, precise)
        oracle.ragged_matmul(*pairs[i], A_INV, b_inv, sizes, **options).check(
            got, f"{kind}, {rows[i]}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_group(implementation, kind):
    """In a row of another group, in another group's matrix, and beyond the last group:
    it enters nothing else.
    """
    sizes = [40, 30, 50]
    a, b = operands(kind, len(sizes))
    rows_of = a if kind == "rows" else a.T
    rows_of[45] = rows_of[130] = np.nan
    if kind == "rows":
        b[1, 3] = np.nan
    else:
        b[:, 45] = b[:, 130] = np.nan
    check(implementation, kind, sizes, a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_cannot_be(implementation, kind):
    """Below 0 counts as 0, and groups end at the last row: nothing outside is read or
    written.
    """
    a, b = operands(kind, 4)
    got = product(kind, [-5, 100, 2**31 - 1, 7], a, b)
    expected = oracle.ragged_matmul(
        a, b, A_INV, B_INV, [0, 100, 50, 0], **accumulation(implementation)
    )
    expected.check(got, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m, k, n", [(0, 4, 5), (6, 0, 5), (6, 4, 0)])
def test_no_elements(implementation, kind, m, k, n):
    a, b = (np.zeros(shape, E4M3.dtype) for shape in shapes(kind, 2, m, k, n))
    check(implementation, kind, [0, 0], a, b)


@pytest.mark.parametrize("name", ["reference", "ffi"])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_groups(name, kind):
    """`lax.ragged_dot` on CPUs makes a copy of lhs for every group; here 64 groups take
    what 2 take.

    Beside the operands of the loop in a wider dtype, of which only b grows.
    """

    def temporaries(groups):
        a, b = (
            jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
            for shape in shapes(kind, groups, 1024, 128, 128)
        )
        sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
        with ops.implementation(name):
            run = jax.jit(
                lambda a, b, s: ops.ragged_matmul(a, b, 1.0, 1.0, s, ragged=kind)
            ).lower(a, b, sizes)
        # b, or the result: widened, and as a loop's initial value
        own = groups * 128 * 128 * 4 * 3
        return run.compile().memory_analysis().temp_size_in_bytes - own

    assert temporaries(64) <= temporaries(2) + 2**20, (temporaries(2), temporaries(64))
