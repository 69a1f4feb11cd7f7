"""The values check of every op on the CUDA handlers and kernels, emulated on the host; prints a row of JSON for each.

What a program for CUDA runs is lowered for the CPU here, under the names of the emulated handlers.
"""

import functools
import json

import jax
import numpy as np
from jax.interpreters import mlir

register_lowering = mlir.register_lowering


def register_for_cpu(op, rule, platform=None, **options):
    """Lower ops for CPUs as for CUDA, without a question about GPUs."""
    if platform == "cuda" and op.name.startswith("jaxfp8_"):
        _, native, _ = rule.args
        register_lowering(op, functools.partial(rule.func, "cpu", native, lambda: True), platform="cpu", **options)
    register_lowering(op, rule, platform=platform, **options)


mlir.register_lowering = register_for_cpu  # before jaxfp8 is imported

from cuda import emulated  # noqa: E402
from jaxfp8.ops import _ffi  # noqa: E402
from jaxfp8.selftest import _cases, _checks  # noqa: E402


def main():
    library = emulated.build_handlers(jax.ffi.include_dir())
    for op in _ffi.OPS:
        handler = jax.ffi.pycapsule(library[_ffi.target_name(op)])
        jax.ffi.register_ffi_target(f"emulated_cuda_{op}", handler, platform="cpu")
    _ffi.target_name = "emulated_cuda_{}".format
    _checks._has_call = lambda lowered, op: f"@emulated_cuda_{op}" in lowered.as_text()
    _checks._on_tensor_cores = lambda: True
    pairs = _cases._PAIRS
    _cases._MATRICES, _cases._PRODUCTS = _cases._MATRICES[:-1], _cases._PRODUCTS[:-1]  # threads are slow here
    for op in _cases.OPS:
        by_cublaslt = op in ("scaled_matmul", "block_scaled_matmul")  # emulated with f32 results
        _cases._PAIRS = [pair for pair in pairs if pair[0] == np.float32 or not by_cublaslt]
        print(json.dumps({"op": op, **_checks.values(op, quick=True)}), flush=True)


if __name__ == "__main__":
    main()
