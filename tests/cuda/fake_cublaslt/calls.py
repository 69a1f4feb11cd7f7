"""Checks of single products: operands, scales, alignment, errors."""

import concurrent.futures
import ctypes
import sys
from pathlib import Path

import numpy as np
from gemm import FIRST, Gemm, aligned, spaced
from oracle import BF16, E4M3, E5M2, F16, F32, blocks as oracle_blocks

FORMATS = (
    (E4M3, E4M3),
    (E4M3, E5M2),
    (E5M2, E4M3),
)


def products(folder):
    """Distinct m, n, k catch swapped dimensions, leading dimensions and operands."""
    gemm = Gemm(folder)
    for formats in FORMATS:
        gemm.check(1, 16, 48, 32, formats)
    for bias in (False, True):
        for out_dtype in (BF16, F16):
            gemm.check(1, 32, 16, 64, bias=bias, out_dtype=out_dtype)
        for accumulator in (None, "apart", "in place"):
            gemm.check(1, 32, 16, 64, bias=bias, accumulator=accumulator)
    assert gemm.counts()["alive"] == 0, "descriptors leak"


def groups(folder):
    """One strided batch of the groups that share their scales, one call for each of
    these batches.
    """
    gemm = Gemm(folder)
    for scales, calls, batch in (
        ((1, 1), 1, 6),
        ((6, 1), 6, 1),
        ((1, 6), 6, 1),
        ((6, 6), 6, 1),
        ((2, 1), 2, 3),
    ):
        for extras in ({}, {"bias": True}, {"accumulator": "in place"}):
            before = gemm.counts()["matmuls"]
            gemm.check(6, 16, 32, 48, scales=scales, **extras)
            assert (
                gemm.counts()["matmuls"] == before + calls
                and gemm.counts()["batch"] == batch
            ), scales
    assert gemm.counts()["copies"] == 0


# By ScaleMode (cuda/kernels/scale_mode.h): what cuBLASLt multiplies, and what it does
# not.
ROWS, MX, ROW_BLOCKS, BLOCKS = 1, 2, 3, 4
NAMES = {ROWS: "rows", MX: "1x32", ROW_BLOCKS: "1x128", BLOCKS: "128x128"}
BLOCK_OF = {ROWS: (1, None), MX: (1, 32), ROW_BLOCKS: (1, 128), BLOCKS: (128, 128)}
PAIRS = (
    (ROWS, ROWS),
    (MX, MX),
    (ROW_BLOCKS, ROW_BLOCKS),
    (ROW_BLOCKS, BLOCKS),
    (BLOCKS, ROW_BLOCKS),
)
# A device of each; no GPU has every mode: Hopper those of f32, Blackwell MX.
CAPABILITIES = (90, 89, 100, 103, 120)


def _scaled(gemm, modes, g, m, n, k, capability=None, scale_shift=0):
    """One product of random codes and scales; returns the reason of a failure."""
    capability = capability or (100 if modes == (MX, MX) else 90)
    gemm.set_device(CAPABILITIES.index(capability), capability)
    rng = np.random.default_rng(m * n + k)
    sides, padded = [], []
    for rows, mode in zip((m, n), modes, strict=True):
        x = rng.standard_normal((g, rows, k)) * 2.0 ** rng.integers(
            -6, 6, (g, rows, k // 16)
        ).repeat(16, axis=2)
        kind = {"scale": "e8m0"} if mode == MX else {}
        sides.append(
            [oracle_blocks.quantize(F32(y), E4M3, BLOCK_OF[mode], **kind) for y in x]
        )
        codes, scales = (np.stack([side[i] for side in sides[-1]]) for i in range(2))
        layouts = [
            oracle_blocks.cublaslt_layout(scale, BLOCK_OF[mode], rows)
            for scale in scales
        ]
        padded.append((aligned(codes), aligned(np.stack(layouts), scale_shift)))
    (a, a_scale), (b, b_scale) = padded
    out = aligned(np.full((g, m, n), np.nan, F32))
    # As jaxfp8.ops asks for it: fast accumulation with whole rows alone.
    error = gemm.error(
        a, b, a_scale, b_scale, out, modes=modes, precise=modes != (ROWS, ROWS)
    )
    if not error:
        blocks = dict(
            zip(("a_block", "b_block"), map(BLOCK_OF.get, modes), strict=True)
        )
        for i, (left, right) in enumerate(zip(*sides, strict=True)):
            oracle_blocks.matmul(left[0], right[0], left[1], right[1], **blocks).check(
                out[i], f"{modes}, group {i}"
            )
    return error


def plans(folder):
    """The heuristic is asked once for each kind of call, and told the alignment."""
    gemm = Gemm(folder)

    def asked(*args, **kwargs):
        before = gemm.counts()["heuristics"]
        gemm.check(*args, **kwargs)
        return gemm.counts()["heuristics"] - before

    assert asked(1, 16, 48, 32) == 1
    assert gemm.counts()["alignment"] == 256 and gemm.counts()["fast"] == 1
    assert asked(1, 16, 48, 32) == 0
    assert asked(1, 16, 48, 32, precise=True) == 1 and gemm.counts()["fast"] == 0
    assert asked(1, 16, 48, 32, workspace=1024) == 1
    assert asked(1, 48, 16, 32) == 1
    assert asked(1, 16, 48, 32, (E5M2, E4M3)) == 1
    assert asked(1, 16, 48, 32, bias=True) == 1
    assert asked(1, 16, 48, 32, accumulator="apart") == 1
    assert asked(2, 16, 48, 32) == 1
    # 16 x 48 codes a group: the second group's `a` starts 768 bytes in, its `b` at a
    # multiple of 16 only.
    assert asked(2, 16, 17 * 16, 17 * 16, scales=(2, 1)) >= 1
    # Of the same model, and of another.
    gemm.set_device(1, 90)
    assert asked(1, 16, 48, 32) == 0 and gemm.counts()["handles"] == 2
    gemm.set_device(4, 90)
    assert asked(1, 16, 48, 32) == 1 and gemm.counts()["handles"] == 3


def block_scales(folder):
    """Each mode where the manual says that it reads its scales; distinct sizes, several
    blocks and tiles, groups. Each pair of modes has plans of its own.
    """
    gemm = Gemm(folder)
    for modes in PAIRS:
        for shape in ((1, 16, 48, 32), (1, 144, 272, 640), (3, 160, 16, 272)):
            for plans in (1, 0):
                before = gemm.counts()
                assert _scaled(gemm, modes, *shape) == ""
                after = gemm.counts()
                assert after["matmuls"] == before["matmuls"] + shape[0]
                assert after["heuristics"] == before["heuristics"] + plans, modes
    assert gemm.counts()["alive"] == 0


def capabilities(folder):
    """cuBLASLt has on each GPU what jaxfp8.ops asks of it there, and no more."""
    gemm = Gemm(folder)
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from jaxfp8.ops import _blocks

    for ordinal, capability in enumerate(CAPABILITIES):
        gemm.set_device(ordinal, capability)
        gemm.check(2, 16, 48, 32, scales=(2, 1))
        for modes in (*PAIRS, (BLOCKS, BLOCKS)):
            missing = _blocks.missing(
                tuple(map(NAMES.get, modes)), [divmod(capability, 10)]
            )
            reason = _scaled(gemm, modes, 1, 16, 48, 32, capability)
            assert ("no cuBLASLt algorithm" in reason) == (missing is not None), (
                capability,
                modes,
                reason,
            )


def unaligned_scales(folder):
    """Scales that lie anywhere are copied, each once, to the end of the workspace; the
    others are read in place.
    """
    gemm = Gemm(folder)
    for shifts in ((4, 0), (0, 4), (12, 8), (16, 32)):
        for scales in ((1, 1), (3, 1), (3, 3)):
            before = gemm.counts()
            gemm.check(3, 16, 48, 32, scales=scales, scale_shifts=shifts)
            copies = sum(shift % 16 != 0 for shift in shifts)
            assert gemm.counts()["copies"] == before["copies"] + copies, (
                shifts,
                scales,
            )
    for modes in PAIRS:
        assert _scaled(gemm, modes, 2, 160, 48, 272, scale_shift=4) == "", modes
    for scales, workspace in (((1, 1), 3), ((3, 1), 35)):
        a = aligned(np.zeros((3, 16, 32), E4M3.dtype))
        a_scale, b_scale = (spaced(np.ones(count, F32), 4) for count in scales)
        out = aligned(np.zeros((3, 16, 16), F32))
        reason = gemm.error(a, a, a_scale, b_scale, out, workspace=workspace)
        assert (
            "a_scale_inv: expected a pointer that is a multiple of 16 bytes" in reason
        ), reason
        assert f"got one of {workspace}" in reason, reason


def unaligned_workspace(folder):
    """cuBLASLt gets the part of the workspace from a multiple of 256 bytes on, which
    may be nothing.
    """
    gemm = Gemm(folder)
    for shift in (16, 128, 240):
        for workspace in (0, 100, 4096, 1 << 20):
            gemm.check(1, 16, 48, 32, workspace=workspace, workspace_shift=shift)
    gemm.check(
        3,
        16,
        48,
        32,
        scales=(3, 1),
        scale_shifts=(4, 4),
        workspace=512,
        workspace_shift=16,
    )


def threads(folder):
    """Calls from many threads: right products, one handle."""
    gemm = Gemm(folder)

    def work(i):
        gemm.set_device(0)
        for j in range(20):
            gemm.check(1, 16 * (1 + (i + j) % 4), 32, 16)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert gemm.counts()["handles"] == 1 and gemm.counts()["alive"] == 0


def capture(folder):
    """What allocates on the device happens in the handler's first stage, before a
    capture; a new plan needs nothing.
    """
    gemm = Gemm(folder)
    reason = ctypes.create_string_buffer(4096)
    gemm.library.prepare(reason)
    assert reason.value == b"" and gemm.counts()["handles"] == 1
    gemm.check(1, 16, 48, 32)
    gemm.check(1, 16, 32, 32)
    assert gemm.counts()["handles"] == 1 and gemm.counts()["heuristics"] == 2
    assert gemm.counts()["algorithm"] == FIRST


def _reason(gemm, **options) -> str:
    a = aligned(np.zeros((1, 16, 32), E4M3.dtype))
    one = aligned(np.ones(1, F32))
    out = aligned(np.zeros((1, 16, 16), F32))
    return gemm.error(a, a, one, one, out, **options)


def no_algorithm(folder):
    reason = _reason(Gemm(folder), workspace=7)
    assert (
        "no cuBLASLt algorithm" in reason
        and "a e4m3[1,16,32], b e4m3[1,16,32], out f32" in reason
    ), reason


def old_device(folder):
    gemm = Gemm(folder)
    gemm.set_device(0, 80)
    assert "need compute capability 8.9 or newer, device 0 has 8.0" in _reason(gemm)


def missing_library(folder):
    reason = _reason(Gemm(folder, fake=None))
    assert reason.startswith(
        "cuBLASLt of CUDA 13 not found: libcublasLt.so.13: cannot open"
    ), reason
    assert reason.endswith(
        '; this module needs JAX\'s plugin for CUDA 13: pip install "jax[cuda13]"'
    ), reason


def library_of_cuda_12(folder):
    gemm = Gemm(folder, fake="libcublasLt.so.12")
    gemm.check(1, 16, 48, 32)
    assert gemm.counts()["matmuls"] == 1


def old_library(folder):
    gemm = Gemm(folder, fake="old/libcublasLt.so.13")
    assert "libcublasLt.so.13 is too old: it has no cublasLtMatmul" in _reason(gemm)


def no_terms(folder):
    """k = 0 needs no cuBLASLt."""
    gemm = Gemm(folder, fake=None)
    out = aligned(np.full((2, 16, 32), np.nan, F32))
    one = np.ones(1, F32)
    a, b = (np.zeros((2, rows, 0), E4M3.dtype) for rows in (16, 32))
    assert gemm.error(a, b, one, one, out) == ""
    assert (out == 0).all()
