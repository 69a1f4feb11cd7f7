"""The equations of a traced program with the place of each, and the FP8 GEMMs of the
platform that it runs on.
"""

import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from ..dot import _contexts
from ..numerics import E5M2
from ..ops import _ffi, _support

# Scopes that transforms add, and that of a whole model, which do not name modules.
_SCOPES_OF_TRANSFORMS = ("", "rematted_computation", "checkpoint")
_SCOPES_OF_PRODUCTS = (
    "Fp8DotGeneral_",
    "Fp8Einsum_",
    "Fp8RaggedDot_",
    "dot_general",
    "ragged_dot",
)
# The folders of Python's library, of JAX with all that is installed beside it, and of
# this package.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(path), "")
    for path in (os.__file__, os.path.dirname(jax.__file__), os.path.dirname(__file__))
)


class Place(NamedTuple):
    """The place from which an equation came.

    Attributes:
        layer: the scopes around the equation, joined by `/`: the path of the module,
            where the library names scopes.
        is_backward: whether the equation belongs to a gradient.
        gemm: `"fprop"`, `"dgrad"` or `"wgrad"` of a product of jaxfp8; else None.
        reason: why jaxfp8 keeps the equation in high precision; None where jaxfp8 left
            no reason.
        line: `file.py:12`, the innermost source line outside of libraries; "" where
            there is none.
    """

    layer: str
    is_backward: bool
    gemm: str | None
    reason: str | None
    line: str


def equations(jaxpr, outer=()) -> Iterator[tuple]:
    """Yield `(equation, Place)` for every equation of a jaxpr that holds no other
    equation.
    """
    for eqn in jaxpr.eqns:
        stack = (*outer, *eqn.source_info.name_stack.stack)
        inner = list(jaxprs_in_params(eqn.params))
        # Of calls, loops and branches only the inner equations are listed.
        for inner_jaxpr in inner:
            yield from equations(inner_jaxpr, stack)
        if not inner:
            yield eqn, _place(stack, eqn)


def _place(stack, eqn) -> Place:
    reason = gemm = None
    is_backward = False
    path = []
    for item in stack:
        kind, _, text = item.name.partition(": ")
        if type(item).__name__ == "Transform":
            is_backward |= item.name == "transpose"
        elif kind == _contexts.HIGH_PRECISION:
            reason = reason or text
        elif kind == _contexts.GEMM:
            gemm = gemm or text
        elif item.name not in _SCOPES_OF_TRANSFORMS:
            path.append(item.name)
    line = _line(eqn.source_info.traceback)
    return Place(_joined(path), is_backward, gemm, reason, line)


def _joined(scopes) -> str:
    """Join scopes to one path, without the scopes that nested transforms repeat; NNX
    scopes are whole paths.
    """
    path = []
    for scope in scopes:
        # an equation is one name
        parts = [scope] if "->" in scope else scope.split("/")
        path = parts if parts[: len(path)] == path else path + parts
    # Drop a repeated prefix, and the names that jaxfp8's products add to the layer that
    # holds them.
    for size in range(len(path) // 2, 0, -1):
        if path[:size] == path[size : 2 * size]:
            path = path[size:]
    while len(path) > 1 and path[-1].startswith(_SCOPES_OF_PRODUCTS):
        path = path[:-1]
    return "/".join(path)


def _line(traceback) -> str:
    # The first frame is the innermost one.
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


_WITHOUT_FP8_GEMMS = ("cpu", "tpu", "rocm")
# The primitives of the FP8 GEMMs of `jaxfp8.ops`.
GEMM_OPS = (
    "jaxfp8_scaled_matmul",
    "jaxfp8_block_scaled_matmul",
    "jaxfp8_ragged_matmul",
)


class Target(NamedTuple):
    """A platform.

    Attributes:
        name: the name of the platform, for messages.
        capabilities: the compute capabilities of its NVIDIA GPUs; an empty set stands
            for GPUs with all FP8 GEMMs.
        lacks: why the platform has no FP8 GEMM at all; None where it has some.
    """

    name: str
    capabilities: set
    lacks: str | None

    @staticmethod
    def parse(platform: str | None) -> "Target":
        """Return the target that an argument `platform` of `gemms` and `assert_fp8`
        names.

        Raises:
            ValueError: `platform` is unknown.
        """
        gpus, lacks = _support.local_gpus(), None
        # On a CPU models are developed, to run on GPUs later.
        if platform is None:
            platform = _support.backend()
            platform = "cuda" if platform == "cpu" else platform
        # The last digit is the minor version: `sm_90` is 9.0, and `sm_100` is 10.0.
        capability = re.fullmatch(r"sm_(\d+)(\d)a?", str(platform))
        if capability:
            version = ".".join(capability.groups())
            gpus = [SimpleNamespace(device_kind=platform, compute_capability=version)]
        elif platform in ("cuda", "gpu"):
            platform = "cuda"
            # Local GPUs need the CUDA library of this installation. For GPUs elsewhere
            # the library is assumed.
            if gpus and not _ffi.has_cuda_kernels():
                lacks = "jaxfp8 was installed without its CUDA library"
        elif platform in _WITHOUT_FP8_GEMMS:
            lacks = (
                f"{platform} has no FP8 GEMM: codes are widened, exactly, and "
                "multiplied"
            )
        else:
            raise ValueError(
                'gemms: platform: expected None, "cuda", a compute capability such as '
                f'"sm_90", or one of {_WITHOUT_FP8_GEMMS}, got {platform!r}'
            )
        lacks = lacks or _support.lacks_fp8(gpus)
        return Target(platform, _support.capabilities(gpus), lacks)

    def why_not(self, eqn) -> str | None:
        """Return why an equation does not run in FP8; None where it does.

        The equation is one of `GEMM_OPS`, or a plain product of two FP8 operands, which
        is left to XLA.
        """
        name = eqn.primitive.name.removeprefix("jaxfp8_")
        types = [var.aval for var in eqn.invars]
        op = eqn.params.get("op")
        implementation = getattr(op, "implementation", "xla")
        # 1. Ask the platform: it may have no FP8 GEMM at all, or no cuBLASLt.
        missing = self.lacks
        if name != "ragged_matmul" and implementation != "xla":
            missing = missing or _support.lacks_cublaslt()
        if missing:
            return missing
        # 2. Ask the implementation that was selected while tracing.
        if implementation == "reference":
            return 'implementation("reference") is selected'
        is_tensorwise = name in ("scaled_matmul", "dot_general")
        if is_tensorwise and types[0].dtype == types[1].dtype == E5M2.dtype:
            return "no tensor core multiplies two float8_e5m2"
        if implementation == "xla":
            if is_tensorwise and not getattr(op, "vmap_dims", 0):
                return None
            return f'implementation("xla"): XLA has no FP8 product for this {name}'
        # 3. Ask the op itself whether it has a kernel for the operands on these GPUs.
        return op.why_disabled() or op.not_on(self.capabilities, *types)
