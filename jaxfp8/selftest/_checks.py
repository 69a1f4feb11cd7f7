"""The checks: the machine, a few training steps, and for each op values and a recorded
launch.
"""

import pathlib
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..dot import dot_general
from ..inspect import _machine
from ..ops import _support
from ..recipes import DelayedScaling, init_state
from . import _cases

# With these options XLA records custom calls that allow it into CUDA graphs, also a
# single custom call.
_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}


def machine() -> dict[str, Any]:
    """Check that the devices answer, and that the native library of their platform is
    loaded and has code for them; `environment` is what `python -m jaxfp8 --json` says.
    """
    about = _machine.about()
    devices, versions = about["devices"], about["versions"]
    if "error" in devices:
        return _row(devices["error"], "") | {"environment": about}
    problem = None
    for library in about["libraries"]:
        if library["platform"] == about["platform"]:
            problem = library["error"]
    if about["platform"] == "cuda" and not problem:
        problem = _support.lacks_fp8(_support.local_gpus())
        problem = problem or _support.lacks_cublaslt()
    kinds = ", ".join(f"{row['count']} x {row['kind']}" for row in devices)
    detail = f"{kinds}; jaxfp8 {versions['jaxfp8']}, jax {versions['jax']}"
    return _row(problem, detail) | {"environment": about}


def values(op: str) -> dict[str, Any]:
    """Check every case of an op against the reference.

    On a TPU numbers below 2**-126 count as zeros, in operands and results, and a
    product that is refused has no check.
    """
    problems, reasons = [], []
    count = calls = without = 0
    for case in _cases.cases(op):
        case = case._replace(arguments=_numpy(case.arguments))
        count += 1
        try:
            with _support.listening() as why:
                lowered = jax.jit(case.function).lower(*case.arguments)
        except NotImplementedError:
            if _support.backend() != "tpu":
                raise
            without += 1
            continue
        calls += _has_call(lowered, op)
        reasons += why
        got = _numpy(lowered.compile()(*case.arguments))
        if problem := case.problem(got, _numpy(case.reference()), _on_tensor_cores()):
            problems.append(f"{case.name}: {problem}")
    detail = [f"{count} cases, {calls} by the custom call"]
    if without:
        detail.append(f"{without} cases have no product on a TPU")
    if not calls:
        detail += dict.fromkeys(reasons)
    row = _row("; ".join(problems[:3]), "; ".join(detail))
    return row | {"custom_calls": calls}


def graph(op: str) -> dict[str, Any]:
    """Check that an op's first launch in this process can be recorded into a graph,
    which replays it.
    """
    case = _cases.Case(op, op, *_machine.OPS[op])
    if not _has_call(jax.jit(case.function).lower(*case.arguments), op):
        return _row(None, "no kernel to record")
    compiled, recorded = record(case.function, case.arguments)
    # each run has its own buffers, which update the graph
    runs = [compiled(*case.arguments) for _ in range(3)]
    expected = _numpy(case.reference())
    problems = [] if recorded else ["XLA did not record it"]
    for got in runs:
        problems.append(case.problem(_numpy(got), expected, _on_tensor_cores()))
    return _row("; ".join(filter(None, problems)), "recorded, replayed twice")


def record(function, arguments):
    """Return the function compiled with graphs, and whether every custom call is in a
    graph.

    The thunks that XLA dumps tell the second.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = _GRAPHS | {"xla_dump_to": folder}
        jitted = jax.jit(function, compiler_options=options)
        compiled = jitted.lower(*arguments).compile()
        paths = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes*")
        thunks = "".join(map(pathlib.Path.read_text, paths))
    left = re.search(r"^\d+: kCustomCall", thunks, re.MULTILINE)
    return compiled, "kCommandBuffer" in thunks and not left


def training() -> dict[str, Any]:
    """Check that the state of a layer after six steps equals the reference's state to
    the bit.
    """
    recipe = DelayedScaling(amax_history_len=4)
    numbers = np.random.default_rng(0).standard_normal((3, 256, 256))
    x, kernel, grad = jnp.asarray(numbers, jnp.bfloat16)

    def step(state, size):
        def loss(state):
            y = dot_general(
                x * size, kernel, (((1,), (0,)), ((), ())), recipe=recipe, state=state
            )
            return jnp.vdot(y, grad / size)

        return jax.grad(loss)(state), None

    def run():
        # Operands grow and gradients shrink, so scales change; there are more steps
        # than slots, so amaxes drop out.
        sizes = jnp.asarray(2.0 ** np.arange(6), jnp.bfloat16)
        return _numpy(jax.lax.scan(step, init_state(recipe), sizes)[0])

    state = run()
    with ops.implementation("reference"):
        return _row(_cases.bit_problem(state, run()), "state equal to the bit")


def _on_tensor_cores() -> bool:
    return _support.backend() == "cuda"


def _has_call(lowered, op) -> bool:
    return f"custom_call @jaxfp8_{op}_v" in lowered.as_text()


def _numpy(tree):
    """Return the arrays of a tree as the devices read them."""
    read = _cases.on_tpu if _support.backend() == "tpu" else np.asarray
    return [read(np.asarray(x)) for x in jax.tree.leaves(tree)]


def _row(problem, detail):
    return {"status": "failed" if problem else "passed", "detail": problem or detail}
