"""Calls every CPU handler with good and with bad buffers; meant to run under sanitizers
(tools/sanitize.sh).

    python tests/native/handlers.py MODULE

The calls are those of `tests/ops/targets.py` and `tests/bad_days/fuzz`: good ones are
compared, bit for bit, with the oracle, bad ones must come back as INVALID_ARGUMENT. The
module is given by path, so that an instrumented build can be tested beside the
installed one; the package itself is not imported.
"""

import concurrent.futures
import dataclasses
import importlib.util
import os
import pathlib
import sys
import types

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
# which the fuzzer imports to register the installed module
sys.modules["jaxfp8"] = types.ModuleType("jaxfp8")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from bad_days.fuzz import values  # noqa: E402
from bad_days.fuzz.targets import good_call  # noqa: E402
from ops import answers, bad_calls, cases, targets  # noqa: E402
from ops.targets import E4M3, F32, Call  # noqa: E402

CALLS = 80  # random ones of each op

passed = failed = 0


def report(name, problem=None):
    global passed, failed
    if problem is None:
        passed += 1
    else:
        failed += 1
        print(f"{name}: {problem}", flush=True)


def compare(call: Call) -> None:
    """Run a call, and again with results in the place of operands."""
    for aliases in ({}, targets.in_place(call)):
        try:
            got = cases.run_target(call, input_output_aliases=aliases)
            answers.assert_results(call, got, answers.answer(call))
            report(str(call))
        except AssertionError as error:
            report(str(call), error)


# An op, its sizes, and which of the dtypes: the first or the last.
LARGE = (
    ("quantize", {"n": (1 << 24) + 77}, 0),
    ("dequantize", {"*": ((1 << 22) + 77,)}, -1),
    ("quantize_transpose", {"m": 2048, "n": 2112}, 0),
    ("quantize_transpose", {"m": 2047, "n": 2113}, -1),
    ("quantize_blocks_transpose", {"m": 1032, "n": 1025}, -1),
)


def large_calls():
    """Sizes that are streamed and put into huge pages, with ragged ends."""
    rng = np.random.default_rng(1)
    for op, sizes, dtype in LARGE:
        call = targets.build(
            op,
            targets.SIZES | {"g": 1} | sizes,
            choose=lambda options, last=True, d=dtype: options[-1 if last else d],
        )
        yield targets.filled(
            call,
            lambda shape, dtype: (
                np.ones(shape, dtype)
                if shape == (1,)
                else values.array(rng, shape, dtype)
            ),
        )


def concurrent_calls():
    """Several handlers at once, each of which wants the thread pool: inside one
    program, and from several threads.
    """
    x = np.random.default_rng(2).standard_normal((1, 400_000), F32)
    call = Call(
        "quantize",
        [x, np.ones(1, F32), np.zeros(1, F32)],
        [(x.shape, E4M3), ((1,), F32)],
        {},
    )
    expected = answers.answer(call)

    @jax.jit
    def many(x):
        calls = [
            dataclasses.replace(call, operands=[x + i, *call.operands[1:]])
            for i in range(6)
        ]
        return [cases.run_target(each) for each in calls][0]

    def repeat(_):
        for _ in range(10):
            answers.assert_results(call, many(x), expected)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(repeat, i) for i in range(6)]:
            report("concurrent calls", done.exception())


def every_bad_call():
    for op in targets.SPECS:
        for name in targets.names(op):
            yield from bad_calls.bad_buffers(op, name)
        yield from bad_calls.bad_counts(op)
        yield from (call for call, _ in bad_calls.bad_attributes(op))
    yield from (
        targets.with_quantizers(op, most + 1) for op, most in targets.LARGEST_K.items()
    )


def main():
    spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handlers = module.registrations()
    for name in cases.TARGETS.values():
        jax.ffi.register_ffi_target(name, handlers[name], platform="cpu")
    print(f"jax {jax.__version__}")
    random = np.random.default_rng(0)
    for op in targets.SPECS:
        for _ in range(CALLS):
            compare(good_call(random, op))
    for call in large_calls():
        compare(call)
    concurrent_calls()
    for call in every_bad_call():
        try:
            cases.run_target(call)
            report(str(call), "was accepted")
        except Exception as error:  # XLA's error type differs between releases
            report(str(call), None if "INVALID_ARGUMENT" in str(error) else repr(error))
        compare(targets.filled(targets.good("quantize")))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
