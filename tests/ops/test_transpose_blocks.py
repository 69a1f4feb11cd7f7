"""transpose_blocks: bitwise against the oracle, and beside a second quantization."""

import itertools

import jax
import numpy as np
import oracle
import pytest
from equality import assert_all_bitwise
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import blocks as oracle_blocks

from jaxfp8 import ops

from . import cases
from .conftest import EACH_FORMAT

SHAPES = ((1, 1), (7, 33), (130, 257), *cases.EMPTY_MATRIX_SHAPES)
MX, F32 = {"scale": "e8m0"}, {"power_2_scale": True}
KINDS = pytest.mark.parametrize("kind", [MX, F32], ids=["e8m0", "f32"])


def random_scales(shape, kind, seed: int, spread: int = 20):
    """Powers of two around 1, or of any exponent."""
    exponents = np.random.default_rng(seed).integers(127 - spread, 128 + spread, shape)
    return (
        np.uint8(exponents).view(oracle_blocks.E8M0)
        if kind is MX
        else np.ldexp(np.float32(1), exponents - 127)
    )


def check(data, scale_inv, fmt, c, what=""):
    got = ops.transpose_blocks(data, scale_inv, block=(1, c))
    expected = oracle_blocks.transpose(data, scale_inv, fmt, c)
    assert_all_bitwise(got, expected, f"{what} {fmt.name}, blocks of {c}")


@EACH_FORMAT
@KINDS
def test_every_code_and_every_shift(implementation, fmt, kind):
    """Column i has code i, in rows whose scales lie 0 to 39 places below the
    largest.
    """
    data = np.broadcast_to(np.arange(256, dtype=np.uint8), (40, 256)).view(fmt.dtype)
    exponents = np.broadcast_to(3 - np.arange(40)[:, None], (40, 4))
    scale_inv = np.ldexp(np.float32(1), exponents)
    check(
        data,
        np.uint8(exponents + 127).view(oracle_blocks.E8M0) if kind is MX else scale_inv,
        fmt,
        64,
    )


@EACH_FORMAT
@KINDS
@pytest.mark.parametrize("c", [1, 3, 32, 128, 1000])
def test_blocks_and_ragged_edges(implementation, c, fmt, kind):
    for (m, n), spread in itertools.product(SHAPES, (2, 20)):
        data = (
            np.random.default_rng(m).integers(0, 256, (m, n), np.uint8).view(fmt.dtype)
        )
        check(data, random_scales((m, -(-n // c)), kind, n, spread), fmt, c, f"{m, n}")


@EACH_FORMAT
@KINDS
def test_extreme_and_bad_scales(implementation, fmt, kind):
    """The smallest and the largest scale in one block, a NaN; float32 that is no power
    of two.
    """
    data = np.random.default_rng(1).integers(0, 256, (12, 9), np.uint8).view(fmt.dtype)
    scale_inv = random_scales((12, 3), kind, 1)
    if kind is MX:
        scale_inv.view(np.uint8)[[0, 1, 4, 8], [0, 0, 1, 2]] = 0, 254, 255, 0
    else:
        bad = np.float32([2.0**-126, 2.0**127, np.nan, 0, -1, np.inf, 3, 2.0**-130])
        scale_inv[[0, 1, 3, 3, 6, 6, 9, 9], [0, 0, 1, 2, 0, 1, 0, 2]] = bad
    check(data, scale_inv, fmt, 3)


def test_merged_dimensions(implementation):
    fmt, c = oracle.E4M3, 4
    data = (
        np.random.default_rng(1)
        .integers(0, 120, (2, 3, 4, 8), np.uint8)
        .view(fmt.dtype)
    )
    scale_inv = random_scales((2, 12, 2), MX, 1, 3)
    got = ops.transpose_blocks(data, scale_inv, block=(1, c), rows=2)
    assert got[0].shape == (2, 8, 3, 4)
    for i in range(2):
        matrix = got[0][i].reshape(8, 12), got[1][i]
        expected = oracle_blocks.transpose(data[i].reshape(12, 8), scale_inv[i], fmt, c)
        assert_all_bitwise(matrix, expected, f"{i}")


@pytest.mark.parametrize("spec", [P("data"), P(None, "tp"), P("tp", "data")], ids=str)
@pytest.mark.parametrize("c", [4, 32])
def test_meshes(c, spec):
    """Blocks of 32 of either layout lie on several devices."""
    mesh, fmt = jax.make_mesh((2, 4), ("data", "tp")), oracle.E5M2
    data = np.random.default_rng(1).integers(0, 120, (16, 64), np.uint8).view(fmt.dtype)
    scale_inv = random_scales((16, 64 // c), MX, 1, 3)
    run = jax.jit(lambda d, s: ops.transpose_blocks(d, s, block=(1, c)))
    got = run(jax.device_put(data, NamedSharding(mesh, spec)), scale_inv)
    expected = oracle_blocks.transpose(data, scale_inv, fmt, c)
    assert_all_bitwise(got, expected, f"{spec}")
