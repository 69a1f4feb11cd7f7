"""Checks of the GEMM's calls to cuBLASLt, each in a process of its own: `python checks.py FOLDER CHECK`.

A separate process, because the stand-in has the soname of the real library: JAX must never meet it.
"""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import oracle  # noqa: E402
import oracle_blocks  # noqa: E402

FORMATS = {oracle.E4M3: 3, oracle.E5M2: 4}  # jaxfp8::Dtype
COUNTS = ("heuristics", "matmuls", "handles", "alive", "alignment", "fast", "batch", "algorithm")


WORKSPACE = 1 << 20
# Algorithms of the stand-in (cublaslt.cc): the first that runs, and the fastest of those that are timed.
FIRST, FASTEST = 2, 3


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
        self, a, b, a_scale, b_scale, out, *, bias=None, accumulator=None, precise=False, workspace=WORKSPACE,
        modes=(0, 0),
    ) -> str:  # fmt: skip
        def pointer(x):
            return ctypes.c_void_p(None if x is None else x.ctypes.data)

        codes = {fmt.dtype: code for fmt, code in FORMATS.items()}
        g, m, k = a.shape
        sizes = (workspace, g, m, b.shape[1], k, int(precise), *modes)
        strides = (0 if x.size == 1 else x.nbytes // g for x in (a_scale, b_scale))
        text = ctypes.create_string_buffer(4096)
        self.library.scaled_matmul(
            codes[a.dtype], codes[b.dtype], pointer(a), pointer(b), pointer(a_scale), pointer(b_scale),
            *map(ctypes.c_int64, strides), pointer(bias), pointer(accumulator),
            pointer(out), *map(ctypes.c_int64, sizes), text,
        )  # fmt: skip
        assert self.library.fake_capture_mode_is_restored()
        return text.value.decode()

    def check(
        self, g, m, n, k, formats=(oracle.E4M3, oracle.E4M3), scales=(1, 1), bias=False, accumulator=None, shift=0,
        **options,
    ):  # fmt: skip
        """One product of random codes, against the oracle.

        `accumulator`: None, "apart" or "in place"; `shift`: of a, in bytes off alignment.
        """
        rng = np.random.default_rng(m * n)
        a, b = (
            aligned(oracle.quantize(rng.standard_normal((g, rows, k)), 8, fmt)[0], off)
            for rows, fmt, off in zip((m, n), formats, (shift, 0), strict=True)
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


def aligned(x, shift=0) -> np.ndarray:
    """A copy that starts on a 256-byte boundary, or `shift` bytes behind one."""
    storage = np.empty(x.nbytes + 512, np.uint8)
    first = -storage.ctypes.data % 256 + shift
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


# By ScaleMode (cuda/kernels/scale_mode.h): what cuBLASLt multiplies, and what it does not.
ROWS, MX, ROW_BLOCKS, BLOCKS = 1, 2, 3, 4
BLOCK_OF = {ROWS: (1, None), MX: (1, 32), ROW_BLOCKS: (1, 128), BLOCKS: (128, 128)}
PAIRS = ((ROWS, ROWS), (MX, MX), (ROW_BLOCKS, ROW_BLOCKS), (ROW_BLOCKS, BLOCKS), (BLOCKS, ROW_BLOCKS))


def _scaled(gemm, modes, g, m, n, k, **options):
    """One product of random codes and scales; returns the reason of a failure."""
    rng = np.random.default_rng(m * n + k)
    sides, padded = [], []
    for rows, mode in zip((m, n), modes, strict=True):
        x = rng.standard_normal((g, rows, k)) * 2.0 ** rng.integers(-6, 6, (g, rows, k // 16)).repeat(16, axis=2)
        kind = {"scale": "e8m0"} if mode == MX else {}
        sides.append([oracle_blocks.quantize(np.float32(y), oracle.E4M3, BLOCK_OF[mode], **kind) for y in x])
        codes, scales = (np.stack([side[i] for side in sides[-1]]) for i in range(2))
        layouts = [oracle_blocks.cublaslt_layout(scale, BLOCK_OF[mode], rows, k) for scale in scales]
        padded.append((aligned(codes), aligned(np.stack(layouts))))
    (a, a_scale), (b, b_scale) = padded
    out = aligned(np.full((g, m, n), np.nan, np.float32))
    error = gemm.error(a, b, a_scale, b_scale, out, modes=modes, **options)
    if not error:
        blocks = dict(zip(("a_block", "b_block"), map(BLOCK_OF.get, modes), strict=True))
        for i, (left, right) in enumerate(zip(*sides, strict=True)):
            oracle_blocks.matmul(left[0], right[0], left[1], right[1], **blocks).check(out[i], f"{modes}, group {i}")
    return error


def block_scales(folder):
    """Each mode where the manual says that it reads its scales; distinct sizes, several blocks and tiles, groups."""
    gemm = Gemm(folder)
    for modes in PAIRS:
        for shape in ((1, 16, 48, 32), (1, 144, 272, 640), (3, 160, 16, 272)):
            before = gemm.counts()["matmuls"]
            assert _scaled(gemm, modes, *shape) == ""
            assert gemm.counts()["matmuls"] == before + shape[0], "a call for each group"
    assert gemm.counts()["alive"] == 0


def block_scale_plans(folder):
    """Each pair of modes has plans of its own; what cuBLASLt has no product for is named."""
    gemm = Gemm(folder)
    gemm.check(1, 32, 48, 64)
    for modes in PAIRS:
        before = gemm.counts()["heuristics"]
        for asked in (1, 1):
            assert _scaled(gemm, modes, 1, 32, 48, 64) == ""
            assert gemm.counts()["heuristics"] == before + asked, modes
    for modes in ((BLOCKS, BLOCKS), (ROWS, ROW_BLOCKS), (MX, BLOCKS)):
        reason = _scaled(gemm, modes, 1, 32, 48, 64)
        assert "no cuBLASLt algorithm" in reason and "scaled " in reason, reason


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
    # Of the same model, and of another.
    gemm.library.fake_device(1, 90)
    assert asked(1, 16, 48, 32) == 0 and gemm.counts()["handles"] == 2
    gemm.library.fake_device(4, 90)
    assert asked(1, 16, 48, 32) == 1 and gemm.counts()["handles"] == 3


def first_algorithm(folder):
    """Without measurements: the first that cuBLASLt says can run, within the workspace."""
    gemm = Gemm(folder)
    gemm.check(1, 16, 48, 32)
    assert gemm.counts()["algorithm"] == FIRST


def capture(folder):
    """What allocates on the device happens before a capture, in the handler's first stage; a new plan needs nothing."""
    gemm = Gemm(folder)
    reason = ctypes.create_string_buffer(4096)
    gemm.library.prepare(reason)
    assert reason.value == b"" and gemm.counts()["handles"] == 1
    gemm.library.fake_capture(1)
    gemm.check(1, 16, 48, 32)
    gemm.check(1, 16, 32, 32)
    assert gemm.counts()["handles"] == 1 and gemm.counts()["heuristics"] == 2


def tuner(folder):
    """The fastest by the clock, cold caches and medians; then programs use it."""
    gemm, ffi, Product = _with_package(folder)
    product = Product(1, 16, 48, 32, "f8e4m3fn", "f8e4m3fn", "f32", False, False, False, WORKSPACE, 256)
    plan = ffi.tune_gemm(0, product)
    # The time of one product, whatever a graph holds.
    assert (round(plan.microseconds, 3), round(plan.first_microseconds, 3)) == (3, 5), plan
    assert gemm.library.fake_allocations() == 0 and gemm.counts()["alive"] == 0, "the tuner leaks"
    asked = gemm.counts()["heuristics"]
    gemm.check(1, 16, 48, 32)
    assert gemm.counts()["algorithm"] == FASTEST and gemm.counts()["heuristics"] == asked
    # Every kind of product, on random codes; each keeps its own plan.
    for change in (
        {"batch": 3},
        {"a": "f8e5m2"},
        {"b": "f8e5m2"},
        {"has_bias": True},
        {"accumulate": True},
        {"has_bias": True, "accumulate": True, "precise": True},
    ):
        assert round(ffi.tune_gemm(0, product._replace(**change)).microseconds, 3) == 3, change
    gemm.check(3, 16, 48, 32)
    assert gemm.counts()["algorithm"] == FASTEST
    gemm.check(1, 16, 48, 32, precise=True)
    assert gemm.counts()["algorithm"] == FIRST
    # On another device, which is current for that long.
    assert round(ffi.tune_gemm(5, product).microseconds, 3) == 3 and gemm.library.fake_current_device() == 0
    # With another workspace, or lower alignment, algorithm 3 is no choice.
    for change in ({"workspace_bytes": 64}, {"alignment": 16}):
        assert round(ffi.tune_gemm(0, product._replace(**change)).microseconds, 3) == 4, change
    # Groups with scales of their own are products of one group.
    gemm.check(3, 16, 48, 32, scales=(3, 1))
    assert gemm.counts()["algorithm"] == FASTEST and gemm.counts()["batch"] == 1


def tuner_errors(folder):
    """Reasons, nothing left allocated, and the table as it was."""
    gemm, ffi, Product = _with_package(folder)
    product = Product(1, 16, 48, 32, "f8e4m3fn", "f8e4m3fn", "f32", False, False, False, WORKSPACE, 256)

    def reason(device=0, **changes):
        try:
            ffi.tune_gemm(device, product._replace(**changes))
        except RuntimeError as error:
            assert gemm.library.fake_allocations() == 0 and gemm.counts()["alive"] == 0, f"{error}: leaks"
            return str(error)
        raise AssertionError("no error")

    assert "no cuBLASLt algorithm" in reason(workspace_bytes=7)
    assert "cudaSetDevice failed" in reason(device=9)
    for change in ({"m": 24}, {"k": 0}, {"batch": 0}, {"alignment": 48}, {"alignment": 512}, {"n": -16}):
        assert "not a product" in reason(**change), change
    for change in (
        {"a": "f8e5m2", "b": "f8e5m2"},
        {"out": "f8e5m2"},
        {"a": "f32"},
        {"out": "bf16", "accumulate": True},
    ):
        assert "not formats" in reason(**change), change
    gemm.library.fake_memory_limit(ctypes.c_int64(8192))
    assert "cudaMalloc of 1048576 bytes failed" in reason()  # the workspace
    gemm.library.fake_memory_limit(ctypes.c_int64(64))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in reason()
    gemm.library.fake_device(0, 80)
    assert "need compute capability 8.9" in reason(device=5)
    assert ffi.gemm_platform(0) == ("Fake GPU", 90, 130002), "known before"
    gemm.check(1, 16, 48, 32)
    assert gemm.counts()["algorithm"] == FIRST


def tuned_plans(folder):
    """A plan from a file is used on its platform alone, for its product alone, and only if cuBLASLt accepts it."""
    gemm, ffi, Product = _with_package(folder)
    product = Product(1, 16, 48, 32, "f8e4m3fn", "f8e4m3fn", "f32", False, False, False, WORKSPACE, 256)
    platform = ffi.gemm_platform(0)
    algorithm = ffi.tune_gemm(0, product._replace(m=160)).algorithm

    def used(n=48, **options):
        gemm.check(1, 16, n, 32, **options)
        return gemm.counts()["algorithm"]

    def set_plan(algorithm=algorithm, platform=platform, **changes):
        ffi.set_gemm_plan(platform, product._replace(**changes), algorithm)

    # Of other platforms.
    set_plan(platform=platform._replace(cublaslt_version=130001))
    set_plan(platform=platform._replace(capability=100))
    set_plan(platform=platform._replace(device_name="Other GPU"))
    assert used() == FIRST and ffi.count_gemm_plans() == (0, 1)
    # A plan that comes later is used from then on.
    set_plan()
    assert used() == FASTEST and used() == FASTEST and ffi.count_gemm_plans() == (1, 0)
    # A damaged one is not: cuBLASLt does not know it, or it needs more workspace than there is.
    set_plan("0" * 128, n=64)
    assert used(64) == FIRST
    set_plan(n=80, workspace_bytes=1024)
    assert used(80, workspace=1024) == FIRST and ffi.count_gemm_plans() == (1, 2)
    # At lower alignment the product has another plan: algorithm 3 would fail.
    set_plan(n=96)
    assert used(96) == FASTEST and used(96, shift=16) == FIRST
    # What was measured with this version says nothing about the next.
    gemm.fake.fake_version(ctypes.c_int64(130100))
    assert used() == FIRST and ffi.gemm_platform(0).cublaslt_version == 130100
    set_plan(platform=platform._replace(cublaslt_version=130100), n=112)
    assert used(112) == FIRST, "the words of another version's algorithm"


def autotune(folder):
    """From a function to files, and from files to another process."""
    import tempfile

    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAXFP8_CACHE_DIR"] = cache
        gemm, ffi, Product = _with_package(folder)
        import jax
        import jax.numpy as jnp

        import jaxfp8
        from jaxfp8 import _plan_files

        gpu = type("FakeDevice", (), {"local_hardware_id": 0, "device_kind": "Fake GPU", "compute_capability": "9.0"})
        jax.local_devices = lambda backend=None: [gpu()]
        ffi._has_cuda_kernels = True

        def program(a, b):
            def product(a, precise=False):
                return jaxfp8.ops.scaled_matmul(a, b, jnp.ones(1), jnp.ones(1), out_dtype=jnp.float32, precise=precise)

            return product(a), product(a), product(a, precise=True)

        codes = [jax.ShapeDtypeStruct((rows, 32), jnp.float8_e4m3fn) for rows in (16, 48)]
        report = jaxfp8.autotune(program, *codes)
        assert [row["is_new"] for row in report.rows] == [True, True], report
        assert [round(row["gain"], 3) for row in report.rows] == [round(5 / 3, 3)] * 2, report
        text = str(report)
        assert "Fake GPU, cuBLASLt 130002: 2 FP8 products" in text, text
        assert "16 x 48 x 32, f8e4m3fn by f8e4m3fn to f32, precise" in text and "1.67" in text, text
        matmuls = gemm.counts()["matmuls"]
        again = jaxfp8.autotune(jax.jit(program), *codes)
        assert [row["is_new"] for row in again.rows] == [False, False] and gemm.counts()["matmuls"] == matmuls

        # As in the next process, with the workspace that programs ask for.
        (path,) = Path(cache).glob("plans_*.json")
        assert path.name == "plans_Fake-GPU_cublaslt-130002.json"
        script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import checks
gemm, ffi, Product = checks._with_package(checks.Path({str(folder)!r}))
from jaxfp8 import _plan_files
store = _plan_files.Store()
store.load()
assert sum(map(len, store.plans.values())) == 2, store.plans
gemm.check(1, 16, 48, 32, precise=True, workspace=32 << 20)
assert gemm.counts()["algorithm"] == checks.FASTEST and gemm.counts()["heuristics"] == 0, gemm.counts()
gemm.check(1, 16, 64, 32, precise=True, workspace=32 << 20)
assert gemm.counts()["algorithm"] == checks.FIRST
"""
        subprocess.run([sys.executable, "-c", script], check=True)
        # Measured anew with another version, into a file of its own.
        gemm.fake.fake_version(ctypes.c_int64(130100))
        assert [row["is_new"] for row in jaxfp8.autotune(program, *codes).rows] == [True, True]
        assert len(list(Path(cache).glob("plans_*.json"))) == 2
        # What cannot be written is used all the same.
        gemm.fake.fake_version(ctypes.c_int64(130200))
        _plan_files.cache_folder = lambda: path / "not a folder"
        assert jaxfp8.autotune(program, *codes).rows[0]["is_new"]
        gemm.check(1, 16, 48, 32, workspace=32 << 20)
        assert gemm.counts()["algorithm"] == FASTEST


def _with_package(folder):
    """The stand-ins as the package's CUDA library."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from jaxfp8.ops import _ffi, _plans

    gemm = Gemm(folder)
    _ffi._loaded["CUDA"] = gemm.library
    return gemm, _ffi, _plans.Gemm


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


CHECKS = [
    products,
    groups,
    block_scales,
    block_scale_plans,
    plans,
    first_algorithm,
    capture,
    tuner,
    tuner_errors,
    tuned_plans,
    autotune,
    threads,
    no_algorithm,
    old_device,
    missing_library,
    old_library,
    no_terms,
]

if __name__ == "__main__":
    next(check for check in CHECKS if check.__name__ == sys.argv[2])(Path(sys.argv[1]))
