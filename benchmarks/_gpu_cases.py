"""The cases of the GPU benchmark.

A case takes `Options` and returns `(rows, errors)`: a row for each candidate by name,
with `us` and the figures that the goals (_gpu_goals.py) read; and for each missing peer
the reason. A long case yields them again and again as they grow.
"""

import dataclasses
from collections.abc import Callable

from _gpu_ceilings import ceilings, launches
from _gpu_layers import dense, gated_mlp, small_dense, torch_linear
from _gpu_ops import gemm
from _gpu_optimizers import adamw
from _gpu_training import losses, model, scan
from kernels import KERNELS, kernels


@dataclasses.dataclass(frozen=True)
class Case:
    """Candidates that are built, checked and timed together, in a process of their own.

    Attributes:
        run: `(options) -> (rows, errors)`, or an iterator of them; with parts
            `(options, part) -> (rows, errors)`.
        seconds: the seconds that the case may take on a GPU.
        xla_flags: XLA's flags of the process.
        parts: the names of the parts, for each of which `run` is called; after a part
            that fails, a new process goes on with the rest.
    """

    run: Callable
    seconds: int = 120
    xla_flags: str = ""
    parts: tuple[str, ...] = ()


NO_GRAPHS = "--xla_gpu_enable_command_buffer="
# The order is that of importance: if the budget runs out, the last cases are left out.
CASES = {
    "ceilings": Case(ceilings, 60),
    "kernels": Case(kernels, 120, parts=tuple(KERNELS)),
    "gemm": Case(gemm),
    "dense": Case(dense, 180),
    "small_dense": Case(small_dense, 180),
    "launches": Case(launches, 60),
    "launches, no graphs": Case(launches, 60, NO_GRAPHS),
    "gated_mlp": Case(gated_mlp, 180),
    "model": Case(model, 150),
    "losses": Case(losses, 120),
    "scan": Case(scan, 150),
    "torch_linear": Case(torch_linear, 180),
    "adamw": Case(adamw, 60),
    "small_dense, no graphs": Case(small_dense, 120, NO_GRAPHS),
    "small_dense, skip temp": Case(
        small_dense, 60, "--xla_gpu_command_buffer_update_mode=SKIP_TEMP"
    ),
}
