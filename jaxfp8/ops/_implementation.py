"""Select the implementation of the ops: custom calls, the jnp reference, or XLA's own FP8 rewriting."""

import contextlib

import jax

from . import _ffi

_CHOICES = ("ffi", "reference", "xla")
# The context is part of jit's cache key: a change of the implementation retraces.
_context = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def implementation(name: str):
    """Select the implementation of `jaxfp8.ops` for what is traced inside.

    Outside of this context custom calls run where a native library serves the platform, the jnp reference elsewhere.

    Args:
        name: `"ffi"` runs custom calls only, and raises on platforms without them. `"reference"` runs plain jnp.
            `"xla"` runs the reference too, but with the GEMM as the convert-multiply-dot pattern that XLA's compiler
            for GPUs rewrites to FP8 (docs/xla.md).

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


def selected() -> str | None:
    """Return the name given to the innermost `implementation`, or None."""
    return _context.value
