"""Checks of plans: which algorithm a product uses, how it is measured, and where that is kept."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import oracle
from gemm import FASTEST, FIRST, WORKSPACE, Gemm, with_package


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
    gemm.set_device(1, 90)
    assert asked(1, 16, 48, 32) == 0 and gemm.counts()["handles"] == 2
    gemm.set_device(4, 90)
    assert asked(1, 16, 48, 32) == 1 and gemm.counts()["handles"] == 3


def first_algorithm(folder):
    """Without measurements: the first that cuBLASLt says can run, within the workspace."""
    gemm = Gemm(folder)
    gemm.check(1, 16, 48, 32)
    assert gemm.counts()["algorithm"] == FIRST


def tuner(folder):
    """The fastest by the clock, cold caches and medians; then programs use it."""
    gemm, ffi, Product = with_package(folder)
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
        {"out": "bf16", "has_bias": True},
        {"out": "f16", "has_bias": True},
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
    gemm, ffi, Product = with_package(folder)
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
    gemm.set_device(0, 80)
    assert "need compute capability 8.9" in reason(device=5)
    assert ffi.gemm_platform(0) == ("Fake GPU", 90, 130002), "known before"
    gemm.set_device(0)
    gemm.check(1, 16, 48, 32)
    assert gemm.counts()["algorithm"] == FIRST


def tuned_plans(folder):
    """A plan from a file is used on its platform alone, for its product alone, and only if cuBLASLt accepts it."""
    gemm, ffi, Product = with_package(folder)
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
        gemm, ffi, Product = with_package(folder)
        import jax
        import jax.numpy as jnp

        import jaxfp8

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
        matmuls = gemm.counts()["matmuls"]
        again = jaxfp8.autotune(jax.jit(program), *codes)
        assert [row["is_new"] for row in again.rows] == [False, False] and gemm.counts()["matmuls"] == matmuls

        # As in the next process, with the workspace that programs ask for.
        (path,) = Path(cache).glob("plans_*.json")
        assert path.name == "plans_Fake-GPU_cublaslt-130002.json"
        script = f"""
import sys
sys.path = {sys.path!r}
from gemm import *
gemm, ffi, Product = with_package(Path({str(folder)!r}))
from jaxfp8.autotune import _plan_files
store = _plan_files.Store()
store.load()
assert sum(map(len, store.plans.values())) == 2, store.plans
gemm.check(1, 16, 48, 32, precise=True, workspace=32 << 20)
assert gemm.counts()["algorithm"] == FASTEST and gemm.counts()["heuristics"] == 0, gemm.counts()
gemm.check(1, 16, 64, 32, precise=True, workspace=32 << 20)
assert gemm.counts()["algorithm"] == FIRST
"""
        subprocess.run([sys.executable, "-c", script], check=True)
        # Measured anew with another version, into a file of its own.
        gemm.fake.fake_version(ctypes.c_int64(130100))
        assert [row["is_new"] for row in jaxfp8.autotune(program, *codes).rows] == [True, True]
        assert len(list(Path(cache).glob("plans_*.json"))) == 2
