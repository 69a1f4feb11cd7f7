"""decode_moment and encode_moment: bitwise against the oracle, along any axis, under
vmap and on meshes.
"""

import jax
import numpy as np
import oracle
import pytest
from equality import assert_all_bitwise
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import assert_bitwise, moments as oracle_moments

from jaxfp8.ops import _encode_moment

from .conftest import ALL

IMPLEMENTATIONS = *ALL, pytest.param("tpu", marks=pytest.mark.ci)
E4M3 = oracle.E4M3.dtype
# One block, blocks and a part of one, many rows, more elements than one thread takes.
SHAPES = ((1, 64), (3, 100), (7, 300), (65, 128), (9, 16384))
SPECS = (("x", None), (None, "x"), ("y", "x"), (("x", "y"), None), (None, ("x", "y")))
# Signed and to nearest; squares, to nearest and stochastically.
KINDS = pytest.mark.parametrize(
    "squared, stochastic", [(False, False), (True, False), (True, True), (False, True)]
)


def numbers(rng, shape, squared=False):
    """Rows of numbers of all sizes, of spans from 0 to 40 octaves, among them zeros,
    subnormals, NaNs and Infs.
    """
    size = rng.integers(-140, 126, (shape[0], 1))
    span = rng.choice([0, 4, 12, 40], (shape[0], 1))
    with np.errstate(over="ignore"):
        x = np.float32(
            rng.standard_normal(shape) * np.exp2(size - span * rng.random(shape))
        )
    is_hard = rng.random((shape[0], 1)) < 0.3
    x = np.where(
        is_hard & (rng.random(shape) < 0.1),
        rng.choice(oracle.f32_corner_cases(), shape),
        x,
    )
    # A negative square is none, and is encoded as the number it is.
    return np.where(rng.random((shape[0], 1)) < 0.8, np.abs(x), x) if squared else x


def moment(rng, shape):
    """A moment of any codes."""
    blocks = shape[0], -(-shape[1] // 128)
    amax = np.exp2(np.float32(rng.integers(-140, 120, blocks))) * rng.integers(
        0, 3, blocks
    ).astype(np.float32)
    return (
        rng.integers(0, 256, shape, np.uint8).view(E4M3),
        amax,
        rng.integers(-1, 2, blocks).astype(np.int8),
    )


def changed(rng, old, squared):
    """What a moment is after a step, in which most rows change, and keys."""
    after = numbers(rng, old[0].shape, squared)
    after[::3] = oracle_moments.decode(*old)[::3]
    return after, rng.integers(0, 2**32, old[1].shape, np.uint32)


def encode(old, after, keys, squared, axis=1):
    return _encode_moment.encode_moment(*old, after, keys, squared=squared, axis=axis)


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(implementation, shape, squared, stochastic):
    rng = np.random.default_rng(shape[1])
    for _ in range(3):
        old = moment(rng, shape)
        after, keys = changed(rng, old, squared)
        keys = keys if stochastic else None
        expected = oracle_moments.encode(*old, after, keys, squared)
        assert_bitwise(
            _encode_moment.decode_moment(*old, axis=1),
            oracle_moments.decode(*old),
            "elements",
        )
        got = jax.jit(lambda *x: encode(*x, squared))(old, after, keys)
        assert_all_bitwise(got, expected)
        rows_that_stay = [[x[::3] for x in moment] for moment in (expected, old)]
        assert_all_bitwise(*rows_that_stay)


def test_a_moment_of_one_element(implementation):
    """XLA's simplifier takes single numbers apart where it leaves arrays."""
    decode = jax.jit(lambda *moment: _encode_moment.decode_moment(*moment, axis=1))
    amax, exponent = np.float32([[1.7]]), np.int8([[-1]])
    for code in range(128):
        old = np.uint8([[code]]).view(E4M3), amax, exponent
        assert_bitwise(decode(*old), oracle_moments.decode(*old), f"code {code}")


def shards(mesh, entry) -> int:
    """How many parts an entry of a PartitionSpec makes."""
    return int(np.prod([mesh.shape[name] for name in entry or ()]))


def put(mesh, x, spec):
    """x on the mesh, cut where devices divide a dimension."""
    divisible = (
        entry if size % shards(mesh, entry) == 0 else None
        for size, entry in zip(x.shape, spec, strict=False)
    )
    return jax.device_put(x, NamedSharding(mesh, P(*divisible)))


def assert_blocks_stay(program, mesh, n, spec) -> None:
    """Only shards of rows of n elements that are no whole blocks are gathered."""
    parts = shards(mesh, spec[1])
    is_gathered = "all-gather(" in program.as_text()
    assert is_gathered == (n % (128 * parts) != 0 and parts > 1)
