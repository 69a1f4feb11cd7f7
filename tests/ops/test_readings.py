"""read_histories and write_histories: bitwise against the oracle, for products of any
batch, count and content.
"""

import functools
import itertools

import jax
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from oracle import F32

from jaxfp8 import ops

from .test_delayed_scales import LENGTHS, history

BELOW_ZERO = F32([-1, -np.inf, -(2.0**-149)])
AMAXES = F32(
    [
        0,
        1,
        2.0**-149,
        2.0**-126,
        np.finfo(F32).max,
        np.inf,
        np.nan,
        -0.0,
        -1,
        -np.inf,
    ]
)
STAYS = F32([0, 0, -0.0, 1, 2.0**-149, np.nan, -1])
SCALE_INVS = F32([0, -0.0, 1, 2.0**-126, 2.0**126, np.nan, 2.0**-149, -1, np.inf])


def product(batch, lengths, seed=0):
    """Pairs of a history and a scale; in some batches an entry or the scale is below
    zero.
    """
    rng, groups, pairs = np.random.default_rng(seed), int(np.prod(batch)), []
    for i, length in enumerate(lengths):
        entries = history(groups * length, 10 * seed + i).reshape(groups, length)
        scales = rng.choice(
            F32([1, 0.3, 2.0**-140, np.nan, np.inf, 0, -0.0]), (groups, 1)
        )
        for group in range(groups):
            kind = rng.integers(4)
            if kind == 0:
                entries[group, rng.integers(length)] = rng.choice(BELOW_ZERO)
            elif kind == 1:
                scales[group] = rng.choice(BELOW_ZERO)
        pairs.append((entries.reshape(*batch, length), scales.reshape(*batch, 1)))
    return pairs


def record(pairs, seed=0):
    """What a step may give for these, the numbers that do not count included."""
    rng, batch = np.random.default_rng(seed), pairs[0][0].shape[:-1]
    kinds = AMAXES, SCALE_INVS, STAYS, BELOW_ZERO, AMAXES, AMAXES
    numbers = [[rng.choice(values, batch) for values in kinds] for _ in pairs]
    return np.stack(list(itertools.chain(*numbers)), -1).astype(F32)


def largest_values(pairs, first=0):
    """Of the format of each quantizer of a product."""
    formats = itertools.cycle([448.0, 57344.0, 240.0])
    return list(itertools.islice(formats, first, first + len(pairs)))


def expected_reading(pairs, fp8_max):
    out = np.empty((*pairs[0][0].shape[:-1], 6 * len(pairs)), F32)
    for i in np.ndindex(out.shape[:-1]):
        numbers = [
            oracle.reading(h[i], scale[i], F32(largest))
            for (h, scale), largest in zip(pairs, fp8_max, strict=True)
        ]
        out[i] = np.concatenate(numbers)
    return out


def expected_state(pairs, recorded):
    written = [(np.empty_like(h), np.empty_like(scale)) for h, scale in pairs]
    for i in np.ndindex(recorded.shape[:-1]):
        for q, (h, scale) in enumerate(written):
            h[i], scale[i] = oracle.write_history(pairs[q][0][i], recorded[i][6 * q :])
    return written


PRODUCTS = {
    "every length": [product((40,), [length], length) for length in LENGTHS],
    "one state": [product((), (5, 1, 2), seed) for seed in range(3)],
    "layers, layers with experts, a state": [
        product((3,), (7, 7, 7)),
        product((2, 3), (4, 5)),
        product((), (3,)),
    ],
    "no layers": [product((0,), (4, 4)), product((2, 0), (3,))],
    "many": [product((2,), (i % 4 + 1,) * (i % 3 + 1), i) for i in range(70)],
}


@pytest.mark.parametrize("which", PRODUCTS)
def test_bitwise(implementation, which):
    """Each quantizer has the scale of its own format, also where a call has so many
    that no constant holds them.
    """
    products = PRODUCTS[which]
    recorded = [record(pairs, i) for i, pairs in enumerate(products)]
    fp8_max = [largest_values(pairs, i) for i, pairs in enumerate(products)]
    read = functools.partial(ops.read_histories, fp8_max=fp8_max)
    expected = list(map(expected_reading, products, fp8_max))
    assert_same_bits(jax.jit(read)(products), expected, "read")
    expected = list(map(expected_state, products, recorded))
    got = jax.jit(ops.write_histories)(products, recorded)
    assert_same_bits(got, expected, "written")


@pytest.mark.parametrize("rows, lengths", [(1, (3,)), (5, (4, 1, 2)), (43, (2, 300))])
def test_rows_of_histories(implementation, rows, lengths):
    """The rows of arrays as products of their own, more of them too than one launch has
    room for.
    """
    pairs = product((rows,), lengths)
    recorded = record(pairs)
    recorded[:, 2::6] = 0  # no history stays
    fp8_max = largest_values(pairs)
    read = functools.partial(ops.read_rows, fp8_max=fp8_max)
    expected = list(expected_reading(pairs, fp8_max))
    assert_same_bits(jax.jit(read)(pairs), expected, "read")
    written = jax.jit(ops.write_rows)(pairs, list(recorded))
    assert_same_bits(written, expected_state(pairs, recorded), "written")


@pytest.mark.parametrize("k", [1, 3, 64])
def test_numbers_of_a_reading(implementation, k):
    """All bits pass as they are, to each quantizer and back."""
    bits = np.random.default_rng(k).integers(0, 2**32, (5, k, 6), np.uint32)
    parts = jax.jit(jax.vmap(ops.split_reading))(bits.view(F32).reshape(5, 6 * k))
    for i, got in enumerate(parts):
        expected = np.split(bits[:, i].view(F32), (2, 3, 4, 5), axis=-1)
        assert_same_bits(got, expected, f"quantizer {i}")
    recorded = [(pair[:, :1], pair[:, 1:]) for pair, *_ in parts]
    bits[..., 2:] = 0
    for in_loop in (False, True):
        join = functools.partial(ops.join_recorded, in_loop=in_loop)
        rows = jax.jit(jax.vmap(join))(recorded)
        assert_same_bits(rows, bits.view(F32).reshape(5, 6 * k), f"{in_loop}")


def test_in_place(implementation):
    """Histories that are overwritten, as those of a training step that gives its state
    away: a thread writes where its neighbor reads.
    """
    (pairs,) = products = [product((3,), (1, 2, 3, 256, 257, 258, 1000))]
    recorded = [record(pairs)]
    given = jax.tree.map(lambda x: jax.numpy.array(x, copy=True), products)
    written = jax.jit(ops.write_histories, donate_argnums=0)(given, recorded)
    assert_same_bits(written, [expected_state(pairs, recorded[0])], "written")
    assert all(h.is_deleted() for h, _ in given[0])
