"""Which implementation of an op runs: the user's choice, custom calls that are switched
off, and the check of GPUs.

A program uses the CUDA library only if the GPUs that it is lowered for can run the
library.
"""

import contextlib
import os
import re

import jax

from .._jax import _compat, _warnings
from . import _checks, _ffi

# The first compute capability with FP8 conversions and FP8 tensor cores.
_MIN_CAPABILITY = (8, 9)
# the reasons that were told: in warnings, and in each `listening`, the innermost last
_told = [[]]

# custom calls that a user has switched off, so that one bad kernel does not end a run
VARIABLE = "JAXFP8_DISABLE"
_CHOICES = ("ffi", "reference", "xla", "tpu")
# The context is part of jit's cache key: a change of the implementation retraces.
_context = jax.make_user_context(default_value=None)


def implementation(name: str) -> contextlib.AbstractContextManager:
    """Select the implementation of `jaxfp8.ops` for what is traced inside.

    Outside of this context custom calls run where a native library serves the platform,
    the jnp reference elsewhere.

    Args:
        name: `"ffi"` runs custom calls only, and raises on platforms without them.
            `"reference"` runs plain jnp. `"xla"` runs the reference too, but with the
            GEMM as the convert-multiply-dot pattern that XLA's compiler for GPUs
            rewrites to FP8 (docs/performance.md). `"tpu"` runs what TPUs run, plain jnp
            too, on every platform; it is needed only to compile for TPUs on a machine
            without one.

    Raises:
        ValueError: unknown `name`.
    """
    _checks.one_of("implementation", "name", name, _CHOICES)
    return using(name)


def using(name):
    """Return a context in which `selected()` is `name`: for a program that is lowered
    later than it was traced.
    """
    return _context(name)


def is_for_tpu():
    """Tell whether a program is traced for TPUs: where JAX's default backend is one, or
    by `implementation("tpu")`.
    """
    return (selected() or jax.default_backend()) == "tpu"


def is_for_cpu():
    """Tell whether a program is traced for CPUs, with their custom calls or the
    reference.
    """
    return backend() == "cpu" and selected() not in ("xla", "tpu")


def selected():
    """Return the name given to the innermost `implementation`, or None."""
    return _context.value


def parsed(value):
    """Return the ops that a value of JAXFP8_DISABLE names, separated by commas.

    Raises:
        ValueError: a name is not that of an op: with a typo the bad kernel would stay
            on.
    """
    names = frozenset(name.strip() for name in value.split(",")) - {""}
    if unknown := ", ".join(sorted(names - set(_ffi.OPS))):
        ops = ", ".join(_ffi.OPS)
        raise ValueError(
            f"{VARIABLE}: expected names of ops, separated by commas, got {unknown}; "
            f"the ops are {ops}"
        )
    return names


# The environment is read once: programs that jit has cached would not follow a later
# change.
_disabled = parsed(os.environ.get(VARIABLE, ""))


def why_disabled(*ops):
    """Return the reason if the custom call of one of the ops is switched off, a clause;
    else None.
    """
    off = _disabled.intersection(ops)
    return f"{VARIABLE} names {min(off)}" if off else None


def local_gpus():
    """Return the NVIDIA GPUs that JAX sees."""
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def backend():
    """Return the platform of this process, as programs are lowered for it: JAX calls
    both CUDA and ROCm "gpu".
    """
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "cuda" if local_gpus() else "rocm"


def gpus(ctx):
    """Return the GPUs that the program of a lowering rule is for, else those of this
    machine.
    """
    return _compat.gpus_of(ctx) or local_gpus()


def capability(gpu):
    """Return `(major, minor)` of an NVIDIA GPU; `()` for another GPU, such as AMD's
    "gfx942", or an unknown one.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", getattr(gpu, "compute_capability", ""))
    return () if match is None else tuple(map(int, match.groups()))


def capabilities(gpus):
    """Return the compute capabilities of GPUs, as far as they are known."""
    return set(map(capability, gpus)) - {()}


def lacks_fp8(gpus):
    """Return why CUDA custom calls cannot run on these GPUs; or None.

    Without a GPU a program is compiled ahead of time, for GPUs that are assumed to have
    everything.

    Args:
        gpus: anything with a `device_kind` and a `compute_capability`.
    """
    built = _ffi.cuda_architectures()
    need = ".".join(map(str, _MIN_CAPABILITY))
    for gpu in gpus:
        version = capability(gpu)
        have = ".".join(map(str, version))
        if () < version < _MIN_CAPABILITY:
            message = (
                f"{gpu.device_kind} has compute capability {have}, FP8 needs {need} "
                "or newer"
            )
            return message
        runs = any(_runs(architecture, version) for architecture in built)
        if version and built and not runs:
            message = (
                f"{gpu.device_kind} has compute capability {have}, the CUDA library "
                f"has code for {', '.join(built)}; add yours to "
                "JAXFP8_CUDA_ARCHITECTURES and build it (cuda/README.md)"
            )
            return message
    return None


def lacks_cublaslt():
    """Return why products cannot call cuBLASLt on this machine; or None."""
    if local_gpus():
        try:
            _ffi.cublaslt_version()
        except RuntimeError as error:
            return str(error)
    return None


def _runs(architecture, capability):
    """Tell whether code such as `sm_89` runs: on its generation from its version on,
    with an `a` on its version.
    """
    number = architecture.removeprefix("sm_").rstrip("af")
    major, minor = int(number[:-1]), int(number[-1])
    if architecture.endswith("a"):
        return capability == (major, minor)
    return (major, minor) <= capability < (major + 1,)


def warn(reason):
    """Warn once for each reason that programs run without custom calls."""
    if reason in _told[-1]:
        return
    _told[-1].append(reason)
    if len(_told) == 1:
        instead = "running in jnp: same results within their bounds, slower"
        _warnings.warn(f"jaxfp8: {reason}; {instead}", RuntimeWarning)


@contextlib.contextmanager
def listening():
    """Collect the reasons that programs lowered inside would warn of, each once, in
    place of the warnings.
    """
    _told.append([])
    try:
        yield _told[-1]
    finally:
        _told.pop()
