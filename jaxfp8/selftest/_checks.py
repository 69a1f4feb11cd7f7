"""The checks: the machine, a few training steps, and the values of each op."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..dot import einsum
from ..inspect import _machine
from ..ops import _support
from ..recipes import DelayedScaling, init_state
from . import _cases

# With these options XLA records custom calls that allow it into CUDA graphs, also a
# single one.
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}


def machine() -> dict[str, Any]:
    """Check that the devices answer, and that the native library of their platform is
    loaded and has code for them; `environment` is what `python -m jaxfp8 --json` says.
    """
    about = _machine.about()
    devices = about["devices"]
    if "error" in devices:
        return _row(devices["error"], "") | {"environment": about}
    problem = None
    for library in about["libraries"]:
        if library["platform"] == about["platform"]:
            problem = library["error"]
    if about["platform"] == "cuda":
        gpus = _support.local_gpus()
        problem = problem or _support.lacks_fp8(gpus) or _support.lacks_cublaslt()
    detail = ", ".join(f"{row['count']} x {row['kind']}" for row in devices)
    return _row(problem, detail) | {"environment": about}


def values(op: str) -> dict[str, Any]:
    """Check every case of an op against the reference.

    On a GPU every other case runs in a CUDA graph. The first one does, so that the op's
    first launch in the process is recorded.

    On a TPU numbers below 2**-126 count as zeros, in operands and results, and a
    product that is refused has no check.
    """
    backend = _support.backend()
    problems, calls = [], 0
    cases = list(_cases.cases(op))
    with _support.listening() as reasons:
        for i, case in enumerate(cases):
            case = case._replace(arguments=_numpy(case.arguments))
            try:
                lowered = jax.jit(case.function).lower(*case.arguments)
            except NotImplementedError as error:
                if backend != "tpu":
                    raise
                reasons.append(f"refused: {error}")
                continue
            calls += f"custom_call @jaxfp8_{op}_v" in lowered.as_text()
            is_recorded = backend == "cuda" and i % 2 == 0
            compiled = lowered.compile(GRAPHS if is_recorded else None)
            expected = _numpy(case.reference())
            # The second run replays the graph, with buffers of its own.
            for _ in range(1 + is_recorded):
                got = _numpy(compiled(*case.arguments))
                if problem := case.problem(got, expected):
                    problems.append(f"{case.name}: {problem}")
    detail = [f"{len(cases)} cases, {calls} by the custom call"]
    if not calls:
        detail += reasons
    row = _row("; ".join(problems[:3]), "; ".join(detail))
    return row | {"custom_calls": calls}


def training() -> dict[str, Any]:
    """Check that the state of a layer after six steps equals the reference's state to
    the bit.
    """
    recipe = DelayedScaling(amax_history_len=4)
    numbers = np.random.default_rng(0).standard_normal((3, 256, 256))
    x, kernel, grad = jnp.asarray(numbers, jnp.bfloat16)

    def loss(state, size):
        y = einsum("mk,kn->mn", x * size, kernel, recipe=recipe, state=state)
        return jnp.vdot(y, grad / size)

    def run():
        step, state = jax.jit(jax.grad(loss)), init_state(recipe)
        # Operands grow and gradients shrink, so scales change; there are more steps
        # than slots, so amaxes drop out.
        for i in range(6):
            state = step(state, jnp.bfloat16(2**i))
        return _numpy(state)

    state = run()
    with ops.implementation("reference"):
        return _row(_cases.bit_problem(state, run()), "state equal to the bit")


def _numpy(tree):
    """Return the arrays of a tree as the devices read them: to a TPU numbers below
    2**-126 are zeros in float32 and bfloat16.
    """
    arrays = list(map(np.asarray, jax.tree.leaves(tree)))
    if _support.backend() == "tpu":
        for i, x in enumerate(arrays):
            if x.dtype in (np.float32, jnp.bfloat16):
                is_zero = np.abs(x) < np.float32(2.0**-126)
                arrays[i] = np.where(is_zero, np.zeros_like(x), x)
    return arrays


def _row(problem, detail):
    return {"status": "failed" if problem else "passed", "detail": problem or detail}
