"""The target of a program: a platform, and which FP8 GEMMs run on it."""

import re
from typing import NamedTuple

from ..numerics import E5M2, FP8_DTYPES
from ..ops import _ffi, _primitive, _support

_OTHERS = ("cpu", "tpu", "rocm")
# The primitives of the FP8 GEMMs of `jaxfp8.ops`.
GEMM_OPS = ("jaxfp8_scaled_matmul", "jaxfp8_block_scaled_matmul", "jaxfp8_ragged_matmul")


class _Gpu(NamedTuple):
    """A GPU that is known only by its compute capability."""

    device_kind: str
    compute_capability: str


class Target(NamedTuple):
    """A platform.

    Attributes:
        name: the name of the platform, for messages.
        gpus: the NVIDIA GPUs; an empty tuple stands for GPUs with all FP8 GEMMs.
        lacks: why the platform has no FP8 GEMM at all; None where it has some.
    """

    name: str
    gpus: tuple = ()
    lacks: str | None = None

    @staticmethod
    def parse(platform: str | None) -> "Target":
        """Return the target that an argument `platform` of `gemms` and `assert_fp8` names.

        Raises:
            ValueError: `platform` is unknown.
        """
        local = tuple(_support.local_gpus())
        # On a CPU models are developed, to run on GPUs later.
        if platform is None:
            backend = _support.backend()
            platform = "cuda" if local or backend == "cpu" else backend
        # The last digit is the minor version: `sm_90` is 9.0, and `sm_100` is 10.0.
        capability = re.fullmatch(r"sm_(\d+)(\d)a?", platform) if isinstance(platform, str) else None
        if capability:
            return Target(platform, (_Gpu(platform, ".".join(capability.groups())),))
        if platform in ("cuda", "gpu"):
            # Local GPUs need the CUDA library of this installation. For GPUs elsewhere the library is assumed.
            missing = local and not _ffi.has_cuda_kernels()
            return Target("cuda", local, "jaxfp8 was installed without its CUDA library" if missing else None)
        if platform in _OTHERS:
            return Target(platform, (), f"{platform} has no FP8 GEMM: codes are widened, exactly, and multiplied")
        raise ValueError(
            f'gemms: platform: expected None, "cuda", a compute capability such as "sm_90", or one of {_OTHERS}, '
            f"got {platform!r}"
        )

    def why_not(self, eqn) -> str | None:
        """Return why an equation does not run in FP8; None where it does.

        The equation is one of `GEMM_OPS`, or a plain product of two FP8 operands, which is left to XLA.
        """
        name = eqn.primitive.name.removeprefix("jaxfp8_")
        types, implementation = [var.aval for var in eqn.invars], eqn.params.get("implementation", "xla")
        # 1. Ask the platform: it may have no FP8 GEMM at all, GPUs without FP8, or no cuBLASLt.
        if self.lacks:
            return self.lacks
        missing = _support.missing_on(self.gpus, cublaslt=name in ("scaled_matmul", "block_scaled_matmul"))
        if missing and (missing.hardware or implementation != "xla"):
            return missing.reason
        # 2. Ask the implementation that was selected while tracing.
        if implementation == "reference":
            return 'implementation("reference") is selected'
        if name in ("scaled_matmul", "dot_general") and types[0].dtype == types[1].dtype == E5M2.dtype:
            return "no tensor core multiplies two float8_e5m2"
        if implementation == "xla":
            is_rewritten = name == "dot_general" or (name == "scaled_matmul" and not eqn.params["vmap_dims"])
            return None if is_rewritten else f'implementation("xla"): XLA has no FP8 product for this {name}'
        # 3. Ask the op itself whether it has a kernel for the operands on these GPUs.
        capabilities = set(map(_support.capability, self.gpus)) - {()}
        return _primitive.not_on(eqn.primitive, capabilities, *types, **eqn.params)


def are_fp8(*dtypes) -> bool:
    """Return whether all dtypes are FP8."""
    return all(dtype in FP8_DTYPES for dtype in dtypes)
