"""Checks of the GEMM's calls to cuBLASLt, each in a process of its own: `python checks.py FOLDER CHECK`.

A separate process, because the stand-in has the soname of the real library: JAX must never meet it.
"""

import ctypes
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import oracle  # noqa: E402

FORMATS = {oracle.E4M3: 3, oracle.E5M2: 4}  # jaxfp8::Dtype
COUNTS = ("heuristics", "matmuls", "handles", "alive", "alignment", "fast", "batch")


class Gemm:
    """LaunchScaledMatmul on numpy arrays."""

    def __init__(self, folder: Path, fake: str | None = "libcublasLt.so.13"):
        self.fake = ctypes.CDLL(str(folder / fake)) if fake else None
        self.library = ctypes.CDLL(str(folder / "libgemm.so"))
        self.library.fake_device(0, 90)

    def counts(self) -> dict[str, int]:
        out = (ctypes.c_int64 * len(COUNTS))()
        self.fake.fake_counts(out)
        return dict(zip(COUNTS, out, strict=True))

    def error(
        self, a, b, a_scale, b_scale, out, *, bias=None, accumulator=None, precise=False, workspace=1 << 20
    ) -> str:
        def pointer(x):
            return ctypes.c_void_p(None if x is None else x.ctypes.data)

        codes = {fmt.dtype: code for fmt, code in FORMATS.items()}
        g, m, k = a.shape
        sizes = (workspace, g, m, b.shape[1], k, int(precise))
        text = ctypes.create_string_buffer(4096)
        self.library.scaled_matmul(
            codes[a.dtype], codes[b.dtype], pointer(a), pointer(b), pointer(a_scale), pointer(b_scale),
            ctypes.c_int64(a_scale.size > 1), ctypes.c_int64(b_scale.size > 1), pointer(bias), pointer(accumulator),
            pointer(out), *map(ctypes.c_int64, sizes), text,
        )  # fmt: skip
        assert self.library.fake_capture_mode_is_restored()
        return text.value.decode()

    def check(
        self, g, m, n, k, formats=(oracle.E4M3, oracle.E4M3), scales=(1, 1), bias=False, accumulator=None, **options
    ):
        """One product of random codes, against the oracle. `accumulator`: None, "apart" or "in place"."""
        rng = np.random.default_rng(m * n)
        a, b = (
            aligned(oracle.quantize(rng.standard_normal((g, rows, k)), 8, fmt)[0])
            for rows, fmt in zip((m, n), formats, strict=True)
        )
        a_scale, b_scale = (rng.uniform(0.5, 2, count).astype(np.float32) for count in scales)
        bias = aligned(rng.standard_normal(n).astype(oracle.BF16)) if bias else None
        out = aligned(np.full((g, m, n), np.nan, np.float32))
        add = None
        if accumulator:
            add = aligned(rng.standard_normal((g, m, n)).astype(np.float32))
            addend = add.copy()
            out = add if accumulator == "in place" else out
        error = self.error(a, b, a_scale, b_scale, out, bias=bias, accumulator=add, **options)
        assert error == "", error
        for i in range(g):
            product = oracle.scaled_matmul(
                a[i], b[i], a_scale[i % a_scale.size], b_scale[i % b_scale.size], bias=bias,
                accumulator=addend[i] if accumulator else None,
            )  # fmt: skip
            product.check(out[i])


def aligned(x) -> np.ndarray:
    """A copy that starts on a 256-byte boundary, as XLA's buffers do."""
    storage = np.empty(x.nbytes + 256, np.uint8)
    first = -storage.ctypes.data % 256
    copy = storage[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def products(folder):
    """Distinct m, n, k catch swapped dimensions, leading dimensions and operands."""
    gemm = Gemm(folder)
    for formats in ((oracle.E4M3, oracle.E4M3), (oracle.E4M3, oracle.E5M2), (oracle.E5M2, oracle.E4M3)):
        gemm.check(1, 16, 48, 32, formats)
    for bias in (False, True):
        for accumulator in (None, "apart", "in place"):
            gemm.check(1, 32, 16, 64, bias=bias, accumulator=accumulator)
    assert gemm.counts()["alive"] == 0, "descriptors leak"


def groups(folder):
    """One strided batch where the scales are shared, one call a group where they are not."""
    gemm = Gemm(folder)
    for scales, calls, batch in (((1, 1), 1, 3), ((3, 1), 3, 1), ((1, 3), 3, 1), ((3, 3), 3, 1)):
        for extras in ({}, {"bias": True}, {"accumulator": "in place"}):
            before = gemm.counts()["matmuls"]
            gemm.check(3, 16, 32, 48, scales=scales, **extras)
            assert gemm.counts()["matmuls"] == before + calls and gemm.counts()["batch"] == batch


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
    assert asked(1, 16, 48, 32, (oracle.E5M2, oracle.E4M3)) == 1
    assert asked(1, 16, 48, 32, bias=True) == 1
    assert asked(1, 16, 48, 32, accumulator="apart") == 1
    assert asked(2, 16, 48, 32) == 1
    # 16 x 48 codes a group: the second group's `a` starts 768 bytes in, its `b` at a multiple of 16 only.
    assert asked(2, 16, 17 * 16, 17 * 16, scales=(2, 1)) >= 1
    gemm.library.fake_device(1, 90)
    assert asked(1, 16, 48, 32) == 1 and gemm.counts()["handles"] == 2


def threads(folder):
    """Calls from many threads: right products, one handle."""
    gemm = Gemm(folder)
    failures = []

    def work(i):
        try:
            gemm.library.fake_device(0, 90)
            for j in range(20):
                gemm.check(1, 16 * (1 + (i + j) % 4), 32, 16)
        except AssertionError as error:
            failures.append(error)

    pool = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not failures, failures
    assert gemm.counts()["handles"] == 1 and gemm.counts()["alive"] == 0


def _reason(gemm, **options) -> str:
    a = aligned(np.zeros((1, 16, 32), oracle.E4M3.dtype))
    one, out = np.ones(1, np.float32), aligned(np.zeros((1, 16, 16), np.float32))
    return gemm.error(a, a, one, one, out, **options)


def no_algorithm(folder):
    reason = _reason(Gemm(folder), workspace=7)
    assert "no cuBLASLt algorithm" in reason and "a e4m3[1,16,32], b e4m3[1,16,32], out f32" in reason, reason


def old_device(folder):
    gemm = Gemm(folder)
    gemm.library.fake_device(0, 80)
    assert "need compute capability 8.9 or newer, device 0 has 8.0" in _reason(gemm)


def missing_library(folder):
    reason = _reason(Gemm(folder, fake=None))
    assert "cuBLASLt of CUDA 13 not found" in reason, reason


def old_library(folder):
    reason = _reason(Gemm(folder, fake="old/libcublasLt.so.13"))
    assert "libcublasLt.so.13 is too old: it has no cublasLtMatmul" in reason, reason


def no_terms(folder):
    """k = 0 needs no cuBLASLt."""
    gemm = Gemm(folder, fake=None)
    out = aligned(np.full((2, 16, 32), np.nan, np.float32))
    one = np.ones(1, np.float32)
    a, b = (np.zeros((2, rows, 0), oracle.E4M3.dtype) for rows in (16, 32))
    assert gemm.error(a, b, one, one, out) == ""
    assert (out == 0).all()


CHECKS = [products, groups, plans, threads, no_algorithm, old_device, missing_library, old_library, no_terms]

if __name__ == "__main__":
    next(check for check in CHECKS if check.__name__ == sys.argv[2])(Path(sys.argv[1]))
