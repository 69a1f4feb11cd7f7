"""The index arithmetic of the CUDA kernels, at sizes that no test can allocate, and the
shared-memory swizzle.
"""

import pytest

BIG = (2**31 - 1, 2**31, 2**31 + 5, 2**40 + 3)
TILE_VECTORS = 128  # of a warp: 32 lanes, 4 vectors each
WARPS = 8
SIDE = 128


@pytest.mark.parametrize("vector", [1, 4, 8])
@pytest.mark.parametrize("multiprocessors", [1, 58, 132])
@pytest.mark.parametrize(
    "groups, size",
    [
        *((1, s) for s in (1, 7, 8, 1024, 8191, 8193, 10**6, *BIG)),
        *((g, 3) for g in (2, 17, 10**6, *BIG)),
        (5, 2**33),
    ],
)
def test_stream_plan(emulated_library, groups, size, vector, multiprocessors):
    plan = emulated_library.stream_plan(groups, size, vector, multiprocessors)
    vectors, tiles, workers, slots, blocks, one_group = plan
    assert vectors == size // vector
    assert tiles * TILE_VECTORS >= vectors and (tiles - 1) * TILE_VECTORS < max(
        vectors, 1
    )
    # Worker i takes tiles i, i + workers, ...; slot j groups j, j + slots, ...:
    # together, all.
    assert 1 <= workers and 1 <= slots <= groups
    assert workers <= max(tiles + WARPS - 1, WARPS)
    assert blocks == -(-workers * slots // WARPS)
    assert blocks <= multiprocessors * 16
    assert one_group == (workers % WARPS == 0)
    if one_group:  # no block has warps without a group, which would miss the barrier
        assert workers * slots % WARPS == 0


@pytest.mark.parametrize(
    "groups, m, n",
    [
        (1, 2**31 + 5, 3),
        (1, 3, 2**31 + 5),
        (1, 2**20, 2**20 + 1),
        (2**31 + 5, 1, 1),
        (3, 200, 300),
        (1, 1, 1),
    ],
)
def test_transpose_plan(emulated_library, groups, m, n):
    rows, columns = -(-m // SIDE), -(-n // SIDE)
    tiles = emulated_library.transpose_tiles(groups, m, n)
    assert tiles == groups * rows * columns
    for index in {0, min(1, tiles - 1), tiles // 2, tiles - 1}:
        group, rest = divmod(index, rows * columns)
        row, column = (SIDE * v for v in divmod(rest, columns))
        expected = [group, row, column, min(SIDE, m - row), min(SIDE, n - column)]
        assert emulated_library.transpose_tile(groups, m, n, index) == expected


@pytest.mark.parametrize("vector", [4, 8])
def test_swizzle(emulated_library, vector):
    """Slots of 8 codes tile shared memory; half-warps write and quarter-warps read
    without bank conflicts.
    """
    slot_offset = emulated_library.library.slot_offset
    pair_offset = emulated_library.library.pair_offset
    places = [slot_offset(c, s, c // vector) for c in range(SIDE) for s in range(16)]
    assert sorted(places) == list(range(0, SIDE * SIDE, 8))
    for slot in range(16):
        for element in range(vector):
            for first in range(0, SIDE // vector, 16):  # 16 lanes, 8 bytes each
                groups = range(first, first + 16)
                assert (
                    len(
                        {
                            slot_offset(g * vector + element, slot, g) % 128
                            for g in groups
                        }
                    )
                    == 16
                )
    for column in range(SIDE):  # 8 lanes, 16 bytes each
        pairs = [pair_offset(column, p, column // vector) for p in range(8)]
        assert len({p % 128 for p in pairs}) == 8
        for p, offset in enumerate(pairs):
            swapped = column // vector % 2 == 1
            halves = [slot_offset(column, 2 * p + i, column // vector) for i in (0, 1)]
            assert halves == ([offset + 8, offset] if swapped else [offset, offset + 8])
