"""Calls every CPU handler with good and with bad buffers; meant to run under sanitizers (tools/sanitize.sh).

    python tests/native/handlers.py MODULE

The calls are those of `tests/ops/targets.py`: good ones are compared, bit for bit, with the oracle, bad ones must come
back as INVALID_ARGUMENT. The module is given by path, so that an instrumented build can be tested beside the
installed one; the package itself is not imported.
"""

import concurrent.futures
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from ops import answers, cases, targets  # noqa: E402
from ops.targets import BF16, E4M3, E5M2, F32, FP8, HIGH, Call  # noqa: E402

OPS = tuple(targets.SPECS)
ALIASES = {"quantize": {2: 1}, "quantize_transpose": {2: 2}}

passed = failed = 0


def target(op):
    return cases.TARGETS[op]


def report(name, problem=None):
    global passed, failed
    if problem is None:
        passed += 1
    else:
        failed += 1
        print(f"{name}: {problem}", flush=True)


def compare(call: Call, **options) -> None:
    try:
        answers.assert_results(call, cases.run_target(call, **options), answers.answer(call))
        report(str(call))
    except AssertionError as error:
        report(str(call), error)


def good(op, dtype, format, shape, scales, random):
    """A call of `op` on random bits of `shape` = (g, ...)."""
    x = ("x", dtype)
    if op == "dequantize":
        x = ("data", format)
    g, itemsize = shape[0], x[1].itemsize
    sides = dict(g=g, m=shape[1], n=shape[-1]) | {"*": shape[1:]}
    # In groups of every fourth number there is no amax so far, in others none comes out.
    absent = {"amax_so_far": g % 4 == 2, "amax": g % 4 == 0 and op != "amax"}
    call = targets.build(op, sides)
    operands = [random.integers(0, 1 << 8 * itemsize, shape, f"u{itemsize}").view(x[1])]
    if op != "amax":
        operands.append(scales)
    if "quantize" in op and op != "dequantize":
        operands.append(np.exp2(random.integers(-150, 128, 0 if absent["amax_so_far"] else g)).astype(F32))
    names = [buffer.name for buffer in targets.table(op)[1]]
    results = []
    for name, (sizes, _) in zip(names, call.results, strict=True):
        result = {"out": dtype, "data": format, "data_t": format}.get(name, F32)
        results.append(((0,) if absent.get(name) else sizes, result))
    if op == "quantize_transpose" and g % 2:
        results.pop()  # no column sums
    is_aliased = g % 2 and op in ALIASES and operands[2].shape == results[ALIASES[op][2]][0]
    compare(Call(op, operands, results, {}), input_output_aliases=ALIASES[op] if is_aliased else None)


def good_calls():
    random = np.random.default_rng(0)
    spans = [(1, 0), (0, 5), (1, 1), (1, 63), (1, 64), (1, 65), (3, 1), (2, 77), (5, 129), (700, 3), (1, 70001)]
    matrices = [(1, 0, 3), (1, 3, 0), (0, 2, 2), (1, 1, 1), (1, 1, 300), (1, 300, 1), (2, 63, 65), (3, 64, 64)]
    matrices += [(2, 130, 515), (1, 128, 1024), (1, 257, 1031), (9, 5, 7)]
    for op, dtype, format in itertools.product(("amax", "quantize", "quantize_transpose", "dequantize"), HIGH, FP8):
        for shape in matrices if op == "quantize_transpose" else spans:
            scales = np.exp2(random.integers(-20, 20, shape[0])).astype(F32) * np.float32(1.1)
            good(op, dtype, format, shape, scales, random)
            good(op, dtype, format, shape, scales[:1] if scales.size else np.ones(1, F32), random)
        if op != "amax":
            shape = (5, 13, 17) if op == "quantize_transpose" else (5, 200)
            good(op, dtype, format, shape, np.float32([np.nan, np.inf, 0, -2, 2.0**-130]), random)


def scale_calls():
    """Every exponent, both signs, subnormals, zeros, infinities and NaN, in either operand; XLA's threads flush."""
    random = np.random.default_rng(4)
    strange = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000], np.uint32)
    strange = np.concatenate([strange, strange | np.uint32(1 << 31)])
    for numerator in np.float32([448, 57344, 448 * 2.0**-20, 57344 * 2.0**30, 448 * 2.0**-64, 57344 * 2.0**64, 3.99]):
        every = np.arange(1 << 9, dtype=np.uint32).repeat(8) << 23 | random.integers(0, 1 << 23, 1 << 12, np.uint32)
        stored = np.concatenate([random.permutation(every), strange, np.tile(strange, strange.size)])
        amax = np.concatenate([every, strange, np.repeat(strange, strange.size)])
        for size in (0, 1, 7, amax.size):
            operands = [amax[amax.size - size :].view(F32), stored[amax.size - size :].view(F32)]
            compare(Call("amax_to_scale", operands, [((size,), F32)] * 2, {"numerator": numerator}))


def history_calls():
    """Histories of several lengths at once, in groups; every kind of entry."""
    random = np.random.default_rng(5)
    strange = np.array([0, -0.0, -1, np.inf, -np.inf, np.nan, 2.0**-149], F32)
    for g, lengths in ((0, (3,)), (1, (1,)), (1, (4, 1024, 2, 1)), (3, (1, 2, 17)), (2, tuple(range(1, 17)))):
        histories = [np.exp2(random.uniform(-140, 100, (g, n))).astype(F32) for n in lengths]
        histories = [np.where(random.random(h.shape) < 0.3, random.choice(strange, h.shape), h) for h in histories]
        stored = [np.exp2(random.uniform(-20, 20, g)).astype(F32) for _ in lengths]
        results = [(h.shape, F32) for h in histories]
        for most_recent in (False, True):
            attributes = {
                "numerators": np.resize(np.float32([448, 57344]), len(lengths)),
                "most_recent": np.bool_(most_recent),
            }
            scalars = [((g,), F32)] * (3 * len(lengths))
            compare(Call("delayed_scales", histories + stored, results + scalars, attributes))
        amaxes = [random.choice(np.abs(strange), g).astype(F32) for _ in lengths]
        for aliases in (None, {i: i for i in range(len(lengths))}):
            compare(Call("push_amaxes", histories + amaxes, results, {}), input_output_aliases=aliases)


def large_calls():
    """Sizes that are streamed and put into huge pages, with ragged ends."""
    random = np.random.default_rng(1)
    one = np.array([0.7], F32)
    good("quantize", BF16, E4M3, (1, (1 << 24) + 77), one, random)
    good("dequantize", F32, E5M2, (1, (1 << 22) + 77), one, random)
    good("quantize_transpose", BF16, E5M2, (1, 2048, 2112), one, random)
    good("quantize_transpose", F32, E4M3, (1, 2047, 2113), one, random)


def concurrent_calls():
    """Several handlers at once, each of which wants the thread pool: inside one program, and from several threads."""
    x = np.random.default_rng(2).standard_normal((1, 400_000), F32)
    call = Call("quantize", [x, np.ones(1, F32), np.zeros(1, F32)], [(x.shape, E4M3), ((1,), F32)], {})
    expected = answers.answer(call)

    @jax.jit
    def many(x):
        calls = [dataclasses.replace(call, operands=[x + i, *call.operands[1:]]) for i in range(6)]
        return [cases.run_target(each) for each in calls][0]

    def repeat(_):
        for _ in range(10):
            answers.assert_results(call, many(x), expected)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(repeat, i) for i in range(6)]:
            report("concurrent calls", done.exception())


def bad_calls():
    for op in OPS:
        for name in targets.names(op):
            yield from targets.bad_buffers(op, name)
        yield from targets.bad_counts(op)
        yield from (call for call, _ in targets.bad_attributes(op))
    yield from (targets.with_quantizers(op, 17) for op in ("delayed_scales", "push_amaxes"))


def check_bad_calls():
    random = np.random.default_rng(3)
    for call in bad_calls():
        try:
            cases.run_target(call)
            report(str(call), "was accepted")
        except Exception as error:  # XLA's error type differs between releases
            report(str(call), None if "INVALID_ARGUMENT" in str(error) else repr(error))
        good("quantize", BF16, E4M3, (2, 77), np.ones(1, F32), random)


def main():
    spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handlers = module.registrations()
    for name in map(target, OPS):
        jax.ffi.register_ffi_target(name, handlers[name], platform="cpu")
    print(f"jax {jax.__version__}")
    good_calls()
    scale_calls()
    history_calls()
    large_calls()
    concurrent_calls()
    check_bad_calls()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
