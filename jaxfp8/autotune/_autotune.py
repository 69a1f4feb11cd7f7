"""autotune: measure the fastest cuBLASLt algorithm of each FP8 product of a program."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from .._jax._table import aligned
from ..ops import _ffi
from ..ops._plans import Gemm, Plan, Platform
from ._plan_files import store

# The alignment of XLA's buffers, in bytes: kGemmAlignment of cuda/kernels/gemm_search.h.
_ALIGNMENT = 256


@dataclasses.dataclass(frozen=True)
class AutotuneReport:
    """The result of `autotune`; its `str` is a table.

    Attributes:
        platform: the model of GPU and the version of cuBLASLt for which the measurements hold.
        rows: a dict for each distinct product: `gemm`, `first_us` (microseconds with the algorithm that cuBLASLt puts
            first), `best_us` (with the fastest), `gain` (their ratio), `is_new` (measured now, not found in a table).
    """

    platform: Platform
    rows: list[dict]

    def __str__(self) -> str:
        platform = self.platform
        title = f"{platform.device_name}, cuBLASLt {platform.cublaslt_version}: {len(self.rows)} FP8 products"
        table = [("product", "first us", "best us", "gain", "")]
        for row in self.rows:
            times = (f"{row['first_us']:.1f}", f"{row['best_us']:.1f}", f"{row['gain']:.2f}")
            table.append((str(row["gemm"]), *times, "measured" if row["is_new"] else "known"))
        return f"{title}\n{aligned(table, right=1)}"


def autotune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> AutotuneReport:
    """Measure the FP8 products of `fn(*args, **kwargs)` and keep the fastest algorithm of each.

    `autotune` does not run `fn`, and compiles `fn` only for a mesh. From now on programs of this process use these
    algorithms; so do later processes on a GPU of the same model with the same version of cuBLASLt, by way of files in
    `$JAXFP8_CACHE_DIR` (by default `jaxfp8` in `$XDG_CACHE_HOME` or `~/.cache`). Programs that run as CUDA graphs keep
    the algorithms they were recorded with: call this before the first step, with nothing else on the GPU.

    Another algorithm may add up in another order: a product keeps its error bound and not its last bits. Runs that must
    agree bit by bit need the same files, and so do the processes of one run: measure in one process, then start them.

    Args:
        fn: any function, jitted or not; usually a training step.
        *args, **kwargs: the arguments of `fn`. A `jax.ShapeDtypeStruct` may stand for an array; on a mesh it has the
            array's sharding.

    Returns:
        An AutotuneReport with a row for each distinct product of `fn`.

    Raises:
        RuntimeError: there is no NVIDIA GPU, the CUDA module is not loaded, or the GPU cannot multiply FP8.
    """
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise RuntimeError(f"autotune: needs an NVIDIA GPU to measure on: {error}") from error
    if not _ffi.has_cuda_kernels():
        raise RuntimeError(f"autotune: the CUDA module of jaxfp8 is not loaded: {_ffi.error('cuda')}")
    # CUDA numbers the devices of this machine; JAX's own ids number the devices of all processes.
    return tune(device.local_hardware_id or 0, gemms_of(fn, *args, **kwargs))


def tune(device: int, gemms: list[Gemm]) -> AutotuneReport:
    """Measure the `gemms` that have no plan yet, on the device with this CUDA ordinal."""
    platform = _ffi.gemm_platform(device)
    known, new = store.on(platform), {}
    try:
        for gemm in gemms:
            if gemm not in known:
                new[gemm] = _ffi.tune_gemm(device, gemm)
    finally:
        # A measurement takes time: keep the finished plans if it is interrupted.
        if new:
            store.add(platform, new)
    return AutotuneReport(platform, [_row(gemm, known[gemm], gemm in new) for gemm in gemms])


def _row(gemm: Gemm, plan: Plan, is_new: bool) -> dict:
    first, best = plan.first_microseconds, plan.microseconds
    return {"gemm": gemm, "first_us": first, "best_us": best, "gain": first / best, "is_new": is_new}


def gemms_of(fn, *args, **kwargs) -> list[Gemm]:
    """Return the distinct FP8 products of `fn`, as one GPU runs them, in the order of the program."""
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    # Lowering names every custom call of one device, so nothing is compiled to find them.
    lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    partitions = lowered.compiler_ir("stablehlo").operation.attributes["mhlo.num_partitions"]
    # On a mesh, products of shards appear when XLA partitions.
    text = lowered.compile().as_text() if partitions.value > 1 else lowered.compiler_ir("hlo").as_hlo_text()
    calls = (line for line in text.splitlines() if f'"{_ffi.target_name("scaled_matmul")}"' in line)
    return list(dict.fromkeys(map(_gemm, calls)))


def _gemm(call: str) -> Gemm:
    """Return the product of a custom call, a line of HLO."""
    results, rest = call.split(" custom-call(", 1)
    # The types of operands stand in the constraints, braces within braces; the list of operands may hold names alone.
    constraints = re.search(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}", rest).group(1)
    (out, _), (_, workspace) = _arrays(results.split(" = ", 1)[1])
    (a, (*groups, m, k)), (b, (*_, n, _)), (_, a_scale), (_, b_scale), *_ = _arrays(constraints)
    flags = dict(re.findall(r"(\w+) = (true|false)", rest))
    # Groups that share their scales are one call of cuBLASLt (cuda/kernels/scaled_matmul.cc).
    batch = math.prod(groups) // max(a_scale[0], b_scale[0])
    has_bias, accumulate, precise = (flags[name] == "true" for name in ("has_bias", "has_accumulator", "precise"))
    return Gemm(batch, m, n, k, a, b, out, has_bias, accumulate, precise, workspace[0], _ALIGNMENT)


def _arrays(text: str) -> list[tuple[str, list[int]]]:
    """Parse HLO types, such as `f8e4m3fn[1,16,32]{2,1,0}, f32[1]{0}`: the dtype and the sizes of each."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return [(dtype, [int(size) for size in sizes.split(",") if size]) for dtype, sizes in arrays]
