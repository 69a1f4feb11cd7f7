"""The checks: the native library, a few training steps, and for each op values, a
recorded launch and speed.
"""

import pathlib
import re
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..dot import dot_general
from ..inspect import _op_calls
from ..numerics import E4M3
from ..ops import _ffi, _support
from ..recipes import DelayedScaling, init_state
from . import _cases

# With these options XLA records custom calls that allow it into CUDA graphs, also a
# single custom call.
_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}
_BF16 = np.dtype(jnp.bfloat16)
# The bounds of the speed of ops: a function, how many arguments it has, and their
# dtype.
BASELINES = {
    "copy": (jnp.invert, 1, np.uint32),
    "bf16 product": (jnp.matmul, 2, jnp.bfloat16),
}


def library() -> dict[str, Any]:
    """Check that the native library of this platform is loaded and has code for its
    devices.
    """
    platform = _support.backend()
    library = next((row for row in _ffi.libraries() if row.platform == platform), None)
    missing = (
        _support.missing_on(_support.local_gpus(), cublaslt=True)
        if platform == "cuda"
        else None
    )
    if library is None:
        return _row(None, f"{platform} has none, jnp runs")
    return _row(library.error or (missing and missing.reason), library.built_for)


def values(op: str, *, quick: bool = False) -> dict[str, Any]:
    """Check every case of an op against the reference, or a product against the exact
    one.

    On a TPU numbers below 2**-126 count as zeros, in operands and results, and a
    product that is refused has no check.
    """
    problems, reasons, count, calls, refused, without = [], [], 0, 0, 0, 0
    on_tpu = _support.backend() == "tpu"
    for case in _cases.cases(op, quick):
        case = case.on_tpu() if on_tpu else case
        try:
            with _support.listening() as why:
                lowered = jax.jit(case.function).lower(*case.arguments)
        except NotImplementedError:
            if not on_tpu:
                raise
            without += 1
            continue
        calls, reasons, count = calls + _has_call(lowered, op), reasons + why, count + 1
        # After the results are right, the comparison must refuse a wrong answer that is
        # made from them.
        got, comparison = (
            _numpy(lowered.compile()(*case.arguments)),
            case.comparison(_on_tensor_cores()),
        )
        expected = _reference(case, comparison)
        if on_tpu:
            got, expected = (
                [*map(_cases.on_tpu, results or [])] for results in (got, expected)
            )
        problem = comparison.problem(got, expected)
        if not problem and (control := comparison.control(got)) is not None:
            refused += 1
            problem = (
                None
                if comparison.problem(control, got)
                else "the comparison does not refuse a wrong answer"
            )
        problems += [f"{case.name}: {problem}"] if problem else []
    detail = (
        f"{count} cases, {calls} by the custom call; {refused} wrong answers refused"
    )
    detail += f"; {without} cases have no product on a TPU" if without else ""
    row = _row("; ".join(problems[:3]), detail)
    return row | {
        "custom_calls": calls,
        "why": "" if calls else "; ".join(dict.fromkeys(reasons)),
    }


def graph(op: str) -> dict[str, Any]:
    """Check that an op's first launch in this process can be recorded into a graph,
    which replays it.
    """
    index = _with_kernel(op)
    if index is None:
        return _row(None, "no kernel to record")
    case = _cases.case(op, _kind(op, 256, index))
    compiled, recorded = record(case.function, case.arguments)
    # each run has its own buffers, which update the graph
    runs = [compiled(*case.arguments) for _ in range(3)]
    comparison = case.comparison(_on_tensor_cores())
    expected = _reference(case, comparison)
    problems = [
        problem
        for got in runs
        if (problem := comparison.problem(_numpy(got), expected))
    ]
    return _row(
        "; ".join(problems) or (None if recorded else "XLA did not record it"),
        "recorded, replayed twice",
    )


def record(function, arguments):
    """Return the function compiled with graphs, and whether every custom call is in a
    graph.

    The thunks that XLA dumps tell the second.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = _GRAPHS | {"xla_dump_to": folder}
        compiled = (
            jax.jit(function, compiler_options=options).lower(*arguments).compile()
        )
        thunks = "".join(
            path.read_text()
            for path in pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes*")
        )
    return compiled, "kCommandBuffer" in thunks and not re.search(
        r"^\d+: kCustomCall", thunks, re.MULTILINE
    )


def training() -> dict[str, Any]:
    """Check that the state of a layer after six steps equals the reference's state to
    the bit.
    """

    def run():
        @jax.jit
        def step(x, kernel, grad, state):
            def product(x, kernel, state):
                return dot_general(
                    x, kernel, (((1,), (0,)), ((), ())), recipe=recipe, state=state
                )

            out, vjp = jax.vjp(product, x, kernel, state)
            return out, vjp(grad)[2]

        # Operands grow and gradients shrink, so scales change; there are more steps
        # than slots, so amaxes drop out.
        state = init_state(recipe)
        for i in range(6):
            out, state = step(x * 2**i, kernel, grad / 3**i, state)
        return out, _numpy(state)

    recipe, rng = DelayedScaling(amax_history_len=4), np.random.default_rng(0)
    x, kernel, grad = (
        jnp.asarray(rng.standard_normal((256, 256)), jnp.bfloat16) for _ in range(3)
    )
    out, state = run()
    with ops.implementation("reference"):
        right, expected = run()
    # A product may add up in another order than the reference. State is made of maxima
    # and has to be equal.
    error = float(
        jnp.linalg.norm((out - right).astype(jnp.float32))
        / jnp.linalg.norm(right.astype(jnp.float32))
    )
    problem = _cases.BITS.problem(state, expected)
    return _row(
        problem or (f"outputs differ by {error:.2%}" if not error < 0.01 else None),
        "state equal to the bit",
    )


def speed(op: str) -> dict[str, Any]:
    """Measure an op on large arrays, or for "copy" and "bf16 product" the bound of the
    machine.
    """
    n = 1024 if _support.backend() == "cpu" else 8192
    if op in BASELINES:
        function, count, dtype = BASELINES[op]
        arguments = [np.ones((n, n), dtype)] * count
    else:
        function, arguments, *_ = _op_calls.call(
            op, _kind(op, n, _with_kernel(op) or 0)
        )
    # more than a cache holds
    sets = [jax.device_put(list(arguments)) for _ in range(4)]
    run = jax.jit(lambda sets: [function(*arguments) for arguments in sets])
    seconds = _seconds(run, sets) / len(sets)
    # The bytes that any kernel moves at least: each operand is read once, each result
    # is written once.
    arrays = jax.tree.leaves((sets[0], jax.eval_shape(function, *arguments)))
    nbytes = sum(x.size * x.dtype.itemsize for x in arrays)
    row = _row(None, f"n = {n}") | {
        "us": seconds * 1e6,
        "gb_per_s": nbytes / seconds / 1e9,
    }
    return row | (
        {"tflops": 2 * n**3 / seconds / 1e12}
        if op in (*_op_calls.PRODUCTS, "bf16 product")
        else {}
    )


def _seconds(run, sets) -> float:
    """Return the seconds of a call: the median of five rounds of calls that do not wait
    for each other.
    """

    def seconds(count):
        start = time.perf_counter()
        # A device runs calls in their order, so the last one is done last.
        jax.block_until_ready([run(sets) for _ in range(count)][-1])
        return (time.perf_counter() - start) / count

    # The first call compiles; the second tells how many fit into a tenth of a second.
    seconds(1)
    count = max(1, min(20, int(0.1 / seconds(1))))
    return statistics.median(seconds(count) for _ in range(5))


def _with_kernel(op) -> int | None:
    """Return the index of the first options of an op with which its custom call runs
    here.
    """
    for index in range(_op_calls.MOST_OPTIONS):
        function, arguments, *_ = _op_calls.call(op, _kind(op, 256, index))
        if _has_call(jax.jit(function).lower(*arguments), op):
            return index
    return None


def _kind(op, n, index):
    return _op_calls.Kind(
        (n,) * (3 if op in _op_calls.PRODUCTS else 2), _BF16, E4M3, index
    )


def _on_tensor_cores() -> bool:
    return _support.backend() == "cuda"


def _has_call(lowered, op) -> bool:
    return f"custom_call @jaxfp8_{op}_v" in lowered.as_text()


def _reference(case, comparison):
    if not comparison.has_reference:
        return None
    with ops.implementation("reference"):
        return _numpy(jax.jit(case.function)(*case.arguments))


def _numpy(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def _row(problem, detail):
    return {"status": "failed" if problem else "passed", "detail": problem or detail}
