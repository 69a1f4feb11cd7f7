"""Which implementation of an op runs: the user's choice, custom calls that are switched off, and the check of GPUs.

A program uses the CUDA library only if the GPUs that it is lowered for can run the library, and leaves out the ops that
failed there in `python -m jaxfp8.selftest`: the record of a run is a file in the user's cache folder. Each kind of GPU,
driver and set of versions has a file, so that processes that write at once take nothing away.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from .._jax import _compat, _files, _warnings
from . import _ffi

# The first compute capability with FP8 conversions and FP8 tensor cores.
_MIN_CAPABILITY = (8, 9)
_WITHOUT = "running without FP8 custom calls: same results within their bounds, slower"
_warned = set()
_listeners = []

VARIABLE = "JAXFP8_DISABLE"  # custom calls that a user has switched off, so that one bad kernel does not end a run
_CHOICES = ("ffi", "reference", "xla", "tpu")
# The context is part of jit's cache key: a change of the implementation retraces.
_context = jax.make_user_context(default_value=None)


class Missing(NamedTuple):
    """Why custom calls cannot run.

    Attributes:
        reason: a clause that says why.
        hardware: whether only the reference can run; else only cuBLASLt is missing.
        instead: a clause for the warning, which says what runs.
    """

    reason: str
    hardware: bool
    instead: str = _WITHOUT


@contextlib.contextmanager
def implementation(name: str):
    """Select the implementation of `jaxfp8.ops` for what is traced inside.

    Outside of this context custom calls run where a native library serves the platform, the jnp reference elsewhere.

    Args:
        name: `"ffi"` runs custom calls only, and raises on platforms without them. `"reference"` runs plain jnp.
            `"xla"` runs the reference too, but with the GEMM as the convert-multiply-dot pattern that XLA's compiler
            for GPUs rewrites to FP8 (docs/xla.md). `"tpu"` runs what TPUs run, plain jnp too, on every platform; it is
            needed only to compile for TPUs on a machine without one (docs/tpu.md).

    Raises:
        ValueError: unknown `name`.
        RuntimeError: `"ffi"` where no compiled module is loaded.
    """
    if name not in _CHOICES:
        raise ValueError(f"implementation: name: expected one of {_CHOICES}, got {name!r}")
    # Refuse what no platform of this process can do. For one platform of several the lowering rule refuses.
    if name == "ffi" and not (_ffi.has_cpu_kernels or _ffi.has_cuda_kernels()):
        raise RuntimeError(f'implementation("ffi"): no compiled module is loaded; for CPUs: {_ffi.error("cpu")}')
    with using(name):
        yield


def using(name: str | None):
    """Return a context in which `selected()` is `name`: for a program that is lowered later than it was traced."""
    return _context(name)


def is_for_tpu() -> bool:
    """Tell whether a program is traced for TPUs: where JAX's default backend is one, or by `implementation("tpu")`."""
    return selected() == "tpu" or (selected() is None and jax.default_backend() == "tpu")


def selected() -> str | None:
    """Return the name given to the innermost `implementation`, or None."""
    return _context.value


def parsed(value: str) -> frozenset[str]:
    """Return the ops that a value of JAXFP8_DISABLE names, separated by commas.

    Raises:
        ValueError: a name is not that of an op: with a typo the bad kernel would stay on.
    """
    names = frozenset(name.strip() for name in value.split(",")) - {""}
    if unknown := ", ".join(sorted(names - set(_ffi.OPS))):
        ops = ", ".join(_ffi.OPS)
        raise ValueError(f"{VARIABLE}: expected names of ops, separated by commas, got {unknown}; the ops are {ops}")
    return names


# The environment is read once: programs that jit has cached would not follow a later change.
_disabled = parsed(os.environ.get(VARIABLE, ""))
_is_set = VARIABLE in os.environ  # a user who has set the variable, even to nothing, has chosen for every op


def why_disabled(op: str, gpus=()) -> str | None:
    """Return the reason if the custom call of `op` is switched off, a clause; else None.

    The user switches ops off by JAXFP8_DISABLE. Where it is not set, the record of the selftest on these GPUs does.
    """
    if op in _disabled:
        return f"{VARIABLE} names {op}"
    clause = why_failed(op, gpus)
    # Processes whose machines have different records would lower different programs for one mesh.
    return clause if clause and jax.process_count() == 1 else None


def why_failed(op: str, gpus) -> str | None:
    """Return the reason if `op` failed in the selftest on GPUs of one of these kinds, a clause; else None."""
    for kind in () if _is_set else dict.fromkeys(gpu.device_kind for gpu in gpus):
        record = read_record(kind)
        if any(check.endswith(f":{op}") for check in record.get("failed", ())):
            message = f"{op} failed python -m jaxfp8.selftest on {kind}, {record['date']} (an empty {VARIABLE} runs it)"
            return message
    return None


def missing_by_choice(op: str, gpus=()) -> Missing | None:
    """Return `why_disabled` as a `Missing`, for lowering rules; warn of a failed op that runs in several processes."""
    if clause := why_disabled(op, gpus):
        return Missing(clause, True, "the jnp reference runs: same results within their bounds, slower")
    if clause := why_failed(op, gpus):
        warn(clause, f"it runs in a program of several processes: set {VARIABLE}={op} in each of them")
    return None


def local_gpus() -> list:
    """Return the NVIDIA GPUs that JAX sees."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def backend() -> str:
    """Return the platform of this process, as programs are lowered for it: JAX calls both CUDA and ROCm "gpu"."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "cuda" if local_gpus() else "rocm"


def gpus(ctx) -> list:
    """Return the GPUs that the program of a lowering rule is for, else those of this machine."""
    return _compat.gpus_of(ctx) or local_gpus()


def capability(gpu) -> tuple[int, ...]:
    """Return `(major, minor)` of an NVIDIA GPU; `()` for another GPU, such as AMD's "gfx942", or an unknown one."""
    match = re.fullmatch(r"(\d+)\.(\d+)", getattr(gpu, "compute_capability", ""))
    return () if match is None else tuple(map(int, match.groups()))


def missing_on(gpus, *, cublaslt: bool) -> Missing | None:
    """Return what keeps a CUDA custom call from running on these GPUs.

    Without a GPU a program is compiled ahead of time, for GPUs that are assumed to have everything.

    Args:
        gpus: anything with a `device_kind` and a `compute_capability`.
        cublaslt: whether the call needs cuBLASLt.
    """
    for gpu in gpus:
        if () < capability(gpu) < _MIN_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (capability(gpu), _MIN_CAPABILITY))
            return Missing(f"{gpu.device_kind} has compute capability {have}, FP8 needs {need} or newer", True)
        built = _ffi.cuda_architectures()
        if capability(gpu) and built and not any(_runs(architecture, capability(gpu)) for architecture in built):
            have = ".".join(map(str, capability(gpu)))
            return Missing(
                f"{gpu.device_kind} has compute capability {have}, the CUDA library has code for {', '.join(built)}; "
                "add yours to JAXFP8_CUDA_ARCHITECTURES and build it (cuda/README.md)",
                True,
            )
    if cublaslt and local_gpus():
        try:
            _ffi.cublaslt_version()
        except RuntimeError as error:
            return Missing(str(error), False)
    return None


def _runs(architecture: str, capability: tuple[int, ...]) -> bool:
    """Tell whether code such as `sm_89` runs: on its generation from its version on, with an `a` on its version."""
    number, is_specific = architecture.removeprefix("sm_").rstrip("af"), architecture.endswith("a")
    major, minor = int(number[:-1]), int(number[-1])
    return capability[0] == major and (capability[1] == minor if is_specific else capability[1] >= minor)


def warn(reason: str, instead: str = _WITHOUT) -> None:
    """Warn once for each reason that programs run without custom calls."""
    if _listeners:
        _listeners[-1].append(reason)
    elif reason not in _warned:
        _warned.add(reason)
        _warnings.warn(f"jaxfp8: {reason}; {instead}", RuntimeWarning)


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Collect the reasons that programs lowered inside would warn of, each once, in place of the warnings."""
    reasons = []
    _listeners.append(reasons)
    try:
        yield reasons
    finally:
        _listeners.remove(reasons)
        reasons[:] = dict.fromkeys(reasons)


def driver() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    version = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d[\d.]*", version.read_text() if version.exists() else "")
    return match.group() if match else ""


def record_key(kind: str) -> dict[str, str]:
    """Return the kind of a GPU, its driver, and the versions of the software that ran: a record is valid for these.

    Raises:
        OSError: the CUDA module's file cannot be read.
        RuntimeError: cuBLASLt cannot be opened.
    """
    # A module that was built again has the same version, so its bytes count.
    with open(_ffi.module_path("_cuda") or "_cuda", "rb") as file:
        module = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "device": kind,
        "driver": driver(),
        "jaxfp8": importlib.metadata.version("jaxfp8"),
        "jax": jax.__version__,
        "cublaslt": str(_ffi.cublaslt_version()),
        "module": module,
    }


def record_path(key: dict[str, str]) -> Path:
    """Return the file of a key, in the user's cache folder; RuntimeError where the system names no home folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = cache if cache.is_absolute() else Path.home() / ".cache"
    return cache / "jaxfp8" / f"selftest-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


@functools.cache
def read_record(kind: str) -> dict:
    """Return the record of a kind of GPU with this driver and these versions; `{}` where there is no valid one.

    Returns:
        `date`, the day of the run; `failed`, the names of the checks that failed, such as `"values:amax"`.
    """
    try:
        expected = record_key(kind)
        file = record_path(expected)
        # Opening a pipe would wait for its writer.
        record = json.loads(file.read_text()) if file.is_file() else {}
        is_valid = record["key"] == expected
        return {"date": str(record["date"]), "failed": list(map(str, record["failed"]))} if is_valid else {}
    except Exception:  # whatever the file has, or stands in its place: programs run as without it
        return {}


def write_record(key: dict[str, str], failed: list[str]) -> Path:
    """Record a run of today in which these checks failed, and return the file.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: the system names no home folder.
    """
    file = record_path(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _files.replaced(file, "w") as opened:
        json.dump({"key": key, "date": datetime.date.today().isoformat(), "failed": failed}, opened, indent=1)
    return file
