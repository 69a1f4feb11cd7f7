"""Calls every CPU handler with good and with bad buffers; meant to run under sanitizers (tools/sanitize.sh).

    python tests/native/handlers.py MODULE

Good calls are compared, bit for bit, with numpy and ml_dtypes; bad ones must come back as INVALID_ARGUMENT. Needs only
jax: the module is given by path, so that an instrumented build can be tested beside the installed one.
"""

import concurrent.futures
import importlib.util
import itertools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
HIGH_PRECISION, FP8 = (BF16, F16, F32), (E4M3, E5M2)
NAN_CODE = {E4M3: 0x7F, E5M2: 0x7E}
NAN_BITS = {BF16: 0x7FC0, F16: 0x7E00, F32: 0x7FC00000}
ELEMENTWISE = ("amax", "quantize", "quantize_transpose", "dequantize")
OPS = (*ELEMENTWISE, "amax_to_scale", "delayed_scales", "push_amaxes")
VERSIONS = {"quantize": 3, "quantize_transpose": 3}

passed = failed = 0


def report(name, problem=None):
    global passed, failed
    if problem is None:
        passed += 1
    else:
        failed += 1
        print(f"{name}: {problem}", flush=True)


def target(op):
    return f"jaxfp8_{op}_v{VERSIONS.get(op, 1)}"


def call(op, results, *operands, aliases=None, **attributes):
    """A raw custom call; `results` are (shape, dtype)."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return jax.ffi.ffi_call(target(op), shapes, input_output_aliases=aliases)(*operands, **attributes)


def bits(array):
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def codes_of(x, scale, dtype):
    wide = x.astype(np.float32)
    with np.errstate(all="ignore"):
        product = wide * scale
        top = np.float32(ml_dtypes.finfo(dtype).max)
        codes = bits(np.clip(product, -top, top).astype(dtype)).copy()
    codes[~np.isfinite(wide) | np.isnan(product)] = NAN_CODE[dtype]
    return codes


def amax_of(x):
    magnitude = np.abs(x.astype(np.float32))
    magnitude = np.where(np.isnan(magnitude), np.float32(np.inf), magnitude)
    return np.max(magnitude, axis=tuple(range(1, x.ndim)), initial=0)


def values_of(data, scale_inv, dtype):
    with np.errstate(all="ignore"):
        values = (data.astype(np.float32) * scale_inv).astype(dtype)
    result = bits(values).copy()
    result[np.isnan(values.astype(np.float32))] = NAN_BITS[dtype]
    return result


def good(op, dtype, format, shape, scales, random):
    """Calls `op` on random bits of `shape` = (g, ...) and compares."""
    name = f"{op} {dtype.name} {format.name} {shape} scales {len(scales)}"
    g = shape[0]
    scale = scales.reshape(-1, *[1] * (len(shape) - 1)) if len(scales) == g else scales[0]
    itemsize = format.itemsize if op == "dequantize" else dtype.itemsize
    x = random.integers(0, 1 << 8 * itemsize, shape, f"u{itemsize}").view(format if op == "dequantize" else dtype)
    so_far = np.exp2(random.integers(-150, 128, g)).astype(np.float32)
    # In groups of every fourth number there is no amax so far, in others none comes out.
    has_so_far, has_amax = g % 4 != 2, g % 4 != 0
    operands, top = (x, scales, so_far if has_so_far else so_far[:0]), ((g if has_amax else 0,), F32)
    aliases = {2: 1 if op == "quantize" else 2} if g % 2 else None
    raised = bits(np.maximum(amax_of(x), so_far if has_so_far else 0))[: None if has_amax else 0]
    if op == "amax":
        got = call(op, [((g,), F32)], x)
        want = [bits(amax_of(x))]
    elif op == "quantize":
        got = call(op, [(shape, format), top], *operands, aliases=aliases)
        want = [codes_of(x, scale, format), raised]
    elif op == "quantize_transpose":
        parts = -(-shape[1] // 128)
        transposed = (g, shape[2], shape[1])
        results = [(shape, format), (transposed, format), top, ((g, parts, shape[2]), F32)]
        # Random bits have NaN in every long column and overflow in others: how sums round is tested elsewhere.
        got = call(op, results[: 4 - g % 2], *operands, aliases=aliases)[:3]
        codes = codes_of(x, scale, format)
        want = [codes, codes.swapaxes(1, 2), raised]
    else:
        got = call(op, [(shape, dtype)], x, scales)
        want = [values_of(x, scale, dtype)]
    wrong = [i for i, (g_, w) in enumerate(zip(got, want, strict=True)) if not np.array_equal(bits(g_), w)]
    report(name, f"results {wrong} differ" if wrong else None)


def good_calls():
    random = np.random.default_rng(0)
    spans = [(1, 0), (0, 5), (1, 1), (1, 63), (1, 64), (1, 65), (3, 1), (2, 77), (5, 129), (700, 3), (1, 70001)]
    matrices = [(1, 0, 3), (1, 3, 0), (0, 2, 2), (1, 1, 1), (1, 1, 300), (1, 300, 1), (2, 63, 65), (3, 64, 64)]
    matrices += [(2, 130, 515), (1, 128, 1024), (1, 257, 1031), (9, 5, 7)]
    for op, dtype, format in itertools.product(ELEMENTWISE, HIGH_PRECISION, FP8):
        for shape in matrices if op == "quantize_transpose" else spans:
            scales = np.exp2(random.integers(-20, 20, shape[0])).astype(np.float32) * np.float32(1.1)
            good(op, dtype, format, shape, scales, random)
            good(op, dtype, format, shape, scales[:1] if scales.size else np.ones(1, np.float32), random)
        if op != "amax":
            shape = (5, 13, 17) if op == "quantize_transpose" else (5, 200)
            scales = np.array([np.nan, np.inf, 0, -2, 2.0**-130], np.float32)
            good(op, dtype, format, shape, scales, random)


def scales_of(amax, stored, numerator):
    """Divisions in f64, rounded once more to f32: that is the correctly rounded quotient (53 >= 2 * 24 + 2 bits)."""
    low, high = 2.0**-126, 2.0**126
    with np.errstate(all="ignore"):
        has_amax = (amax > 0) & (amax < np.inf)
        has_stored = (stored > 0) & (stored < np.inf)
        smallest, largest = max(numerator / high, low), min(numerator / low, float(np.finfo(F32).max))
        from_amax = np.float64(numerator) / np.clip(amax.astype(np.float64), smallest, largest)
        from_stored = np.where(has_stored, 1 / np.clip(stored.astype(np.float64), low, high), 1)
        scale = np.where(has_amax, from_amax, from_stored).astype(F32)
        return scale, (1 / scale.astype(np.float64)).astype(F32)


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
            a, s = amax[amax.size - size :].view(F32), stored[amax.size - size :].view(F32)
            got = call("amax_to_scale", [((size,), F32)] * 2, a, s, numerator=numerator)
            same = all(np.array_equal(bits(g), bits(w)) for g, w in zip(got, scales_of(a, s, numerator), strict=True))
            report(f"amax_to_scale {numerator} [{size}]", None if same else "results differ")


def history_calls():
    """Histories of several lengths at once, in groups; every kind of entry."""
    random = np.random.default_rng(5)
    strange = np.array([0, -0.0, -1, np.inf, -np.inf, np.nan, 2.0**-149], F32)
    for g, lengths in ((0, (3,)), (1, (1,)), (1, (4, 1024, 2, 1)), (3, (1, 2, 17)), (2, tuple(range(1, 17)))):
        histories = [np.exp2(random.uniform(-140, 100, (g, n))).astype(F32) for n in lengths]
        histories = [np.where(random.random(h.shape) < 0.3, random.choice(strange, h.shape), h) for h in histories]
        stored = [np.exp2(random.uniform(-20, 20, g)).astype(F32) for _ in lengths]
        clean = [np.where((h > 0) & np.isfinite(h), h, F32.type(0)) for h in histories]
        numerators = np.resize(np.float32([448, 57344]), len(lengths))
        results = [(h.shape, F32) for h in histories] + [((g,), F32)] * (3 * len(lengths))
        for most_recent in (False, True):
            attributes = {"numerators": numerators, "most_recent": np.bool_(most_recent)}
            got = call("delayed_scales", results, *histories, *stored, **attributes)
            amaxes = [h[:, 0] if most_recent else h.max(axis=1) for h in clean]
            pairs = [scales_of(*x) for x in zip(amaxes, stored, numerators, strict=True)]
            moved = [np.roll(h, -1, axis=1) * (np.arange(h.shape[1]) > 0).astype(F32) for h in clean]
            want = [*moved, *(p[0] for p in pairs), *(p[1] for p in pairs), *([np.zeros(g, F32)] * len(lengths))]
            same = all(np.array_equal(bits(x), bits(y)) for x, y in zip(got, want, strict=True))
            report(f"delayed_scales [{g}] {lengths} {most_recent}", None if same else "results differ")
        amaxes = [random.choice(np.abs(strange), g).astype(F32) for _ in lengths]
        for aliases in (None, {i: i for i in range(len(lengths))}):
            got = call("push_amaxes", results[: len(lengths)], *moved, *amaxes, aliases=aliases)
            want = [h.copy() for h in moved]
            for h, amax in zip(want, amaxes, strict=True):
                h[:, 0] = np.where(np.isfinite(amax), amax, 0)
            same = all(np.array_equal(bits(x), bits(y)) for x, y in zip(got, want, strict=True))
            report(f"push_amaxes [{g}] {lengths} {aliases}", None if same else "results differ")


def large_calls():
    """Sizes that are streamed and put into huge pages, with ragged ends."""
    random = np.random.default_rng(1)
    one = np.array([0.7], np.float32)
    good("quantize", BF16, E4M3, (1, (1 << 24) + 77), one, random)
    good("dequantize", F32, E5M2, (1, (1 << 22) + 77), one, random)
    good("quantize_transpose", BF16, E5M2, (1, 2048, 2112), one, random)
    good("quantize_transpose", F32, E4M3, (1, 2047, 2113), one, random)


def concurrent_calls():
    """Several handlers at once, each of which wants the thread pool: inside one program, and from several threads."""
    x = np.random.default_rng(2).standard_normal((1, 400_000), np.float32)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    want = codes_of(x, np.float32(1), E4M3)

    @jax.jit
    def many(x):
        calls = [call("quantize", [(x.shape, E4M3), ((1,), F32)], x + i, one, zero)[0] for i in range(6)]
        return calls[0]

    def repeat(_):
        return all(np.array_equal(bits(many(x)), want) for _ in range(10))

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for result in threads.map(repeat, range(6)):
            report("concurrent calls", None if result else "results differ")


def bad_calls():
    x, matrix, one = np.ones((2, 12), BF16), np.ones((2, 3, 4), F32), np.ones(1, np.float32)
    two = np.ones(2, np.float32)
    data, amax = ((2, 12), E4M3), ((2,), F32)
    matrix_data, matrix_t = ((2, 3, 4), E5M2), ((2, 4, 3), E5M2)
    codes, out = np.ones((2, 12), E4M3), ((2, 12), BF16)
    bad_scales = [np.ones(3, np.float32), np.ones((), np.float32), np.ones((1, 1), np.float32), np.ones(0, np.float32)]
    bad_scales += [np.ones(1, BF16), np.ones(1, np.int32)]
    bad_inputs = [x.astype(np.int32), x.astype(E4M3), x.astype(np.complex64), x.astype(bool), x[0], x[None]]
    bad_amaxes = [((3,), F32), ((1,), F32), ((), F32), ((2, 1), F32), ((2,), BF16), ((2,), np.dtype(np.int32))]
    bad_datas = [((2, 11), E4M3), ((2, 13), E4M3), ((24,), E4M3), ((12, 2), E4M3), ((2, 12), BF16), ((1, 12), E4M3)]

    yield from (("amax", [amax], [bad], {}) for bad in bad_inputs)
    yield from (("amax", [bad], [x], {}) for bad in bad_amaxes)
    yield from (("quantize", [data, amax], [bad, one, two], {}) for bad in bad_inputs)
    yield from (("quantize", [data, amax], [x, bad, two], {}) for bad in bad_scales)
    yield from (("quantize", [bad, amax], [x, one, two], {}) for bad in bad_datas)
    yield from (("quantize", [data, bad], [x, one, two], {}) for bad in bad_amaxes)

    bad_so_far = [one, np.ones(3, np.float32), two[None], two[0], two.astype(BF16), two.astype(np.int32)]
    yield from (("quantize", [data, amax], [x, one, bad], {}) for bad in bad_so_far)
    yield from (("quantize_transpose", [matrix_data, matrix_t, amax], [matrix, one, bad], {}) for bad in bad_so_far)

    op = "quantize_transpose"
    yield from ((op, [matrix_data, matrix_t, amax], [bad, one, two], {}) for bad in [matrix[0], matrix.astype(np.int8)])
    yield from ((op, [matrix_data, matrix_t, amax], [matrix, bad, two], {}) for bad in bad_scales)
    for bad in [((2, 4, 3), E5M2), ((3, 4), E5M2), ((2, 3, 5), E5M2), ((2, 3, 4), F32)]:
        yield op, [bad, matrix_t, amax], [matrix, one, two], {}
    for bad in [((2, 3, 4), E5M2), ((2, 4, 2), E5M2), ((1, 4, 3), E5M2), ((2, 4, 3), E4M3), ((2, 4, 3), F32)]:
        yield op, [matrix_data, bad, amax], [matrix, one, two], {}
    yield from ((op, [matrix_data, matrix_t, bad], [matrix, one, two], {}) for bad in bad_amaxes)

    yield from (("dequantize", [out], [bad, one], {}) for bad in [x, codes[0], codes[None], codes.view(np.uint8)])
    yield from (("dequantize", [out], [codes, bad], {}) for bad in bad_scales)
    for bad in [((2, 11), BF16), ((24,), BF16), ((12, 2), BF16), ((2, 12), E4M3), ((2, 12), np.dtype(np.int16))]:
        yield "dequantize", [bad], [codes, one], {}

    numerator = {"numerator": np.float32(448)}
    for bad in [x, two[0], two.astype(BF16), two.astype(np.int32), two.astype(np.float16)]:
        yield "amax_to_scale", [amax, amax], [bad, two], numerator
    for bad in [one, np.ones(3, np.float32), two[None], two.astype(BF16)]:
        yield "amax_to_scale", [amax, amax], [two, bad], numerator
    for bad in bad_amaxes:
        yield "amax_to_scale", [bad, amax], [two, two], numerator
        yield "amax_to_scale", [amax, bad], [two, two], numerator
    for value in np.float32([0, -0.0, -1, 2.0**-127, np.inf, -np.inf, np.nan]):
        yield "amax_to_scale", [amax, amax], [two, two], {"numerator": value}
    # Other values than in any good call: jit's cache takes equal numbers of different types for the same attribute.
    for attributes in [{}, {"numerator": np.float64(5)}, {"numerator": np.int32(6)}, {"extra": np.float32(448)}]:
        yield "amax_to_scale", [amax, amax], [two, two], attributes
    yield "amax_to_scale", [amax, amax], [two, two], numerator | {"extra": np.int32(1)}

    history, options = np.ones((2, 4), F32), {"numerators": np.ones(1, F32), "most_recent": np.bool_(False)}
    next_history = ((2, 4), F32)
    scales = [next_history, amax, amax, amax]
    for bad in [history[0], history[None], history[:, :0], history[:1], history.astype(BF16), history.astype(np.int32)]:
        yield "delayed_scales", scales, [bad, two], options
        yield "push_amaxes", [next_history], [bad, two], {}
    for bad in [one, two[0], two[None], np.ones(3, F32), two.astype(BF16), two.astype(np.int32)]:
        yield "delayed_scales", scales, [history, bad], options
        yield "push_amaxes", [next_history], [history, bad], {}
    for bad in [((2, 3), F32), ((2, 5), F32), ((8,), F32), ((1, 4), F32), ((2, 4), BF16)]:
        yield "delayed_scales", [bad, amax, amax, amax], [history, two], options
        yield "push_amaxes", [bad], [history, two], {}
    for place in (1, 2, 3):
        for bad in bad_amaxes:
            yield "delayed_scales", [*scales[:place], bad, *scales[place + 1 :]], [history, two], options
    for value in np.float32([0, -0.0, -1, 2.0**-127, np.inf, -np.inf, np.nan]):
        yield "delayed_scales", scales, [history, two], options | {"numerators": np.full(1, value)}
    for numerators in (
        np.ones(2, F32),
        np.zeros(0, F32),
        np.full(1, 5, np.float64),
        np.full(1, 6, np.int32),
        np.float32(7),
    ):
        yield "delayed_scales", scales, [history, two], options | {"numerators": numerators}
    seventeen = [history] * 17 + [two] * 17
    yield "delayed_scales", [next_history] * 17 + [amax] * 51, seventeen, options | {"numerators": np.ones(17, F32)}
    yield "push_amaxes", [next_history] * 17, seventeen, {}
    yield "delayed_scales", scales[:3], [history, two], options
    yield "delayed_scales", scales, [history], options
    yield "delayed_scales", scales, [history, two], options | {"most_recent": np.int32(1)}
    yield "delayed_scales", scales, [history, two], {"numerators": np.ones(1, F32)}
    yield "delayed_scales", scales, [history, two], options | {"extra": np.int32(1)}
    yield "push_amaxes", [next_history] * 2, [history, two], {}
    yield "push_amaxes", [next_history], [history], {}
    yield "push_amaxes", [next_history], [history, two], {"extra": np.int32(1)}

    extra = {"extra": np.int32(1)}
    yield "amax", [amax], [x], extra
    yield "quantize", [data, amax], [x, one, two], extra
    yield op, [matrix_data, matrix_t, amax], [matrix, one, two], extra
    yield "dequantize", [out], [codes, one], extra
    # Too few and too many buffers.
    yield "amax", [amax, amax], [x], {}
    yield "quantize", [data, amax], [x, one], {}
    yield "quantize", [data], [x, one, two], {}
    yield "dequantize", [out], [codes, one, one], {}
    yield "amax_to_scale", [amax], [two, two], numerator
    yield "amax_to_scale", [amax, amax], [two], numerator
    yield "amax_to_scale", [amax, amax], [two, two, two], numerator


def check_bad_calls():
    random = np.random.default_rng(3)
    for op, results, operands, attributes in bad_calls():
        described = f"{op} {results} {[(o.shape, o.dtype.name) for o in operands]} {attributes}"
        try:
            jax.block_until_ready(call(op, results, *operands, **attributes))
            report(described, "was accepted")
        except Exception as error:  # XLA's error type differs between releases
            report(described, None if "INVALID_ARGUMENT" in str(error) else repr(error))
        good("quantize", BF16, E4M3, (2, 77), np.ones(1, np.float32), random)


def main():
    spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    targets = module.registrations()
    for name in map(target, OPS):
        jax.ffi.register_ffi_target(name, targets[name], platform="cpu")
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
