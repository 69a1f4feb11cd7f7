"""The CPU custom calls as common/README.md has them: random calls, and what each must give.

`answer` says of any call, good or bad, whether it is one that the table allows, and then the result by the oracle.
"""

import dataclasses

import jax
import numpy as np
import oracle
from ops import cases

import jaxfp8 as jaxfp8  # registers the targets

from . import values
from .values import FORMAT_OF, FP8, HIGH

F32 = np.dtype(np.float32)
SUMMED_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Call:
    """One custom call: operands, `(shape, dtype)` of its results, attributes."""

    op: str
    operands: list
    results: list
    attributes: dict

    def __str__(self) -> str:
        def spec(shape, dtype):
            return f"{dtype}{list(shape)}"

        operands = ", ".join(spec(x.shape, x.dtype) for x in self.operands)
        results = ", ".join(spec(*result) for result in self.results)
        return f"{self.op}({operands}) -> ({results}) with {self.attributes}"


# ------------------------------------------------------------------------------------------------------- good calls


def _pick(rng, options):
    return options[rng.integers(len(options))]


def _scale_shape(rng, groups):
    return (groups,) if rng.random() < 0.5 else (1,)


def amax(rng):
    g, n = values.dims(rng, 2)
    return [values.array(rng, (g, n), _pick(rng, HIGH))], [((g,), F32)], {}


def _amax_groups(rng, groups):
    """How many elements an amax has, so far or as a result: none where there is none."""
    return groups if rng.random() < 0.7 else 0


def quantize(rng):
    g, n = values.dims(rng, 2)
    scale, so_far = values.scales(rng, _scale_shape(rng, g)), values.not_negative(rng, _amax_groups(rng, g))
    operands = [values.array(rng, (g, n), _pick(rng, HIGH)), scale, so_far]
    return operands, [((g, n), _pick(rng, FP8)), ((_amax_groups(rng, g),), F32)], {}


def quantize_transpose(rng):
    g, m, n = values.dims(rng, 3)
    fp8 = _pick(rng, FP8)
    operands = [
        values.array(rng, (g, m, n), _pick(rng, HIGH)),
        values.scales(rng, _scale_shape(rng, g)),
        values.not_negative(rng, _amax_groups(rng, g)),
    ]
    sums = [((g, -(-m // SUMMED_ROWS), n), F32)] if rng.random() < 0.3 else []
    return operands, [((g, m, n), fp8), ((g, n, m), fp8), ((_amax_groups(rng, g),), F32), *sums], {}


def dequantize(rng):
    shape = values.dims(rng, int(rng.integers(2, 6)))
    scale = values.scales(rng, _scale_shape(rng, shape[0]))
    return [values.array(rng, shape, _pick(rng, FP8)), scale], [(shape, _pick(rng, HIGH))], {}


def _numerators(rng, count):
    return (2.0 ** rng.uniform(-20, 20, count)).astype(np.float32)


def amax_to_scale(rng):
    (g,) = values.dims(rng, 1)
    operands = [values.array(rng, (g,), F32), values.array(rng, (g,), F32)]
    return operands, [((g,), F32)] * 2, {"numerator": _numerators(rng, 1)[0]}


def _histories(rng):
    count, (g,) = int(rng.integers(1, 17)), values.dims(rng, 1, 64)
    return g, [values.array(rng, (g, int(_pick(rng, (1, 2, 3, 4, 16, 1024)))), F32) for _ in range(count)]


def delayed_scales(rng):
    g, histories = _histories(rng)
    k = len(histories)
    stored = [values.array(rng, (g,), F32) for _ in range(k)]
    results = [(h.shape, F32) for h in histories] + [((g,), F32)] * (3 * k)
    attributes = {"numerators": _numerators(rng, k), "most_recent": np.bool_(rng.integers(2))}
    return histories + stored, results, attributes


def push_amaxes(rng):
    g, histories = _histories(rng)
    operands = histories + [values.array(rng, (g,), F32) for _ in histories]
    return operands, [(h.shape, F32) for h in histories], {}


OPS = (amax, quantize, quantize_transpose, dequantize, amax_to_scale, delayed_scales, push_amaxes)
GOOD = {f.__name__: f for f in OPS}
WITHOUT_ATTRIBUTES = {"amax", "quantize", "quantize_transpose", "dequantize", "push_amaxes"}


# -------------------------------------------------------------------------------------------------------- bad calls


def _other_shape(rng, shape):
    shape, kind = list(shape), rng.integers(6)
    if kind == 0 and shape:
        i = rng.integers(len(shape))
        shape[i] = max(0, shape[i] + int(rng.choice([-1, 1])))
    elif kind == 1:
        shape.insert(int(rng.integers(len(shape) + 1)), 1)
    elif kind == 2 and shape:
        del shape[rng.integers(len(shape))]
    elif kind == 3:
        shape = [shape[i] for i in rng.permutation(len(shape))]
    elif kind == 4:
        shape = [1] * int(rng.integers(0, 25))  # a huge rank
    else:
        shape = list(values.dims(rng, int(rng.integers(0, 5)), 4096))
    return tuple(shape)


def mutate(rng, operands, results, attributes):
    """One thing changed; it may still be a good call."""
    operands, results, attributes = list(operands), list(results), dict(attributes)
    kind = rng.integers(9)
    if kind == 0:
        i = rng.integers(len(operands))
        operands[i] = values.array(rng, _other_shape(rng, operands[i].shape), operands[i].dtype)
    elif kind == 1:
        i = rng.integers(len(operands))
        operands[i] = values.array(rng, operands[i].shape, _pick(rng, values.DTYPES))
    elif kind == 2:
        i = rng.integers(len(results))
        results[i] = (_other_shape(rng, results[i][0]), results[i][1])
    elif kind == 3:
        i = rng.integers(len(results))
        results[i] = (results[i][0], _pick(rng, values.DTYPES))
    elif kind == 4:
        part = operands if rng.random() < 0.5 else results
        if len(part) > 1:
            del part[rng.integers(len(part))]
    elif kind == 5:
        part = operands if rng.random() < 0.5 else results
        part.insert(int(rng.integers(len(part) + 1)), part[rng.integers(len(part))])
    elif kind == 6:
        part = operands if rng.random() < 0.5 else results
        i, j = rng.integers(len(part), size=2)
        part[i], part[j] = part[j], part[i]
    elif kind == 7 and attributes and rng.random() < 0.5:
        del attributes[_pick(rng, sorted(attributes))]
    else:
        # A name it has, or one that it has not.
        name = _pick(rng, [*sorted(attributes), "numerator", "numerators", "most_recent", "surprise"])
        attributes[name] = _pick(rng, ODD_ATTRIBUTES)
    return operands, results, attributes


ODD_ATTRIBUTES = (
    np.bool_(True),
    np.int32(3),
    np.int64(-1),
    np.float32(2.5),
    np.float32(0),
    np.float32(-1),
    np.float32(np.nan),
    np.float32(np.inf),
    np.float32(2.0**-140),
    np.float64(3),
    "max",
    "",
    np.float32([1.5]),
    np.float32([1, np.nan]),
    np.float32([]),
    np.int32([1, 2]),
    np.ones(17, np.float32),
)


def random_call(rng) -> Call:
    op = _pick(rng, sorted(GOOD))
    parts = GOOD[op](rng)
    for _ in range(rng.choice([0, 1, 2, 3], p=[0.3, 0.5, 0.1, 0.1])):
        parts = mutate(rng, *parts)
    return Call(op, *parts)


# ---------------------------------------------------------------------------------------------------- what they give


def _is(spec, shape, *dtypes) -> bool:
    return tuple(spec[0]) == tuple(shape) and np.dtype(spec[1]) in dtypes


def _is_scale(x, groups) -> bool:
    return x.dtype == F32 and x.ndim == 1 and len(x) in (1, groups)


def _is_numerator(value) -> bool:
    return isinstance(value, np.float32) and np.isfinite(value) and value >= np.finfo(np.float32).tiny


def answer(call: Call) -> list | None:
    """The results by the oracle; None where the call must be refused."""
    if call.op in WITHOUT_ATTRIBUTES and call.attributes:
        return None
    return globals()[f"_{call.op}_answer"](call.operands, call.results, call.attributes)


def _raised(x, so_far):
    """None where a sign is set: an amax so far is not negative, and what comes of one that is says nobody."""
    if np.signbit(so_far).any():
        return None
    return np.float32([max(top, oracle.amax(row)) for row, top in zip(x, so_far, strict=True)])


def _amax_answer(operands, results, attributes):
    if len(operands) != 1 or len(results) != 1:
        return None
    (x,) = operands
    if x.dtype not in HIGH or x.ndim != 2 or not _is(results[0], x.shape[:1], F32):
        return None
    return [_raised(x, np.zeros(len(x), np.float32))]


def _scaled(function, x, scale, dtype):
    """Group by group."""
    out = np.empty(x.shape, dtype)
    for i in range(len(x)):
        out[i] = function(x[i], scale[i % len(scale)])
    return out


def _quantized(x, scale, so_far, data, top):
    """Codes and amaxes as the results `data` and `top` ask for them."""
    fmt = FORMAT_OF[np.dtype(data[1])]
    codes = _scaled(lambda row, s: oracle.quantize(row, s, fmt)[0], x, scale, data[1])
    if top[0] == (0,):
        return codes, np.zeros(0, np.float32)
    return codes, _raised(x, so_far if so_far.size else np.zeros(len(x), np.float32))


def _is_amax(spec, groups) -> bool:
    return _is(spec, (groups,), F32) or _is(spec, (0,), F32)


def _is_quantize(operands, rank) -> bool:
    if len(operands) != 3:
        return False
    x, scale, so_far = operands
    if x.dtype not in HIGH or x.ndim != rank or not _is_scale(scale, len(x)):
        return False
    return _is_amax((so_far.shape, so_far.dtype), len(x))


def _quantize_answer(operands, results, attributes):
    if not _is_quantize(operands, 2) or len(results) != 2:
        return None
    x = operands[0]
    if not _is(results[0], x.shape, *FP8) or not _is_amax(results[1], len(x)):
        return None
    return list(_quantized(*operands, *results))


def _quantize_transpose_answer(operands, results, attributes):
    if not _is_quantize(operands, 3) or len(results) not in (3, 4):
        return None
    x, (g, m, n) = operands[0], operands[0].shape
    is_good = _is(results[0], x.shape, *FP8) and _is(results[1], (g, n, m), np.dtype(results[0][1]))
    is_good &= _is_amax(results[2], g)
    parts = -(-m // SUMMED_ROWS)
    if not is_good or (len(results) == 4 and not _is(results[3], (g, parts, n), F32)):
        return None
    data, top = _quantized(*operands, results[0], results[2])
    return [data, np.ascontiguousarray(data.swapaxes(1, 2)), top, *([x] if len(results) == 4 else [])]


def _dequantize_answer(operands, results, attributes):
    if len(operands) != 2 or len(results) != 1:
        return None
    data, scale = operands
    if data.dtype not in FP8 or data.ndim < 2 or not _is_scale(scale, len(data)):
        return None
    if not _is(results[0], data.shape, *HIGH):
        return None
    dtype = np.dtype(results[0][1])
    return [_scaled(lambda row, s: oracle.dequantize(row, s, dtype), data, scale, dtype)]


def _amax_to_scale_answer(operands, results, attributes):
    if len(operands) != 2 or len(results) != 2 or set(attributes) != {"numerator"}:
        return None
    (top, stored), numerator = operands, attributes["numerator"]
    if not _is_numerator(numerator) or top.dtype != F32 or top.ndim != 1:
        return None
    if not all(_is(spec, top.shape, F32) for spec in ((stored.shape, stored.dtype), *results)):
        return None
    return list(oracle.scale_pair(top, stored, numerator))


def _are_histories(histories, results) -> bool:
    """k histories `[g, H]` of one g, and results like them."""
    shapes = [h.shape for h in histories]
    if any(len(shape) != 2 or shape[1] == 0 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        return False
    return all(h.dtype == F32 for h in histories) and all(map(lambda r, s: _is(r, s, F32), results, shapes))


def _delayed_scales_answer(operands, results, attributes):
    k = len(operands) // 2
    if set(attributes) != {"numerators", "most_recent"} or not 1 <= k <= 16 or len(operands) != 2 * k:
        return None
    numerators, most_recent = attributes["numerators"], attributes["most_recent"]
    if not isinstance(numerators, np.ndarray) or numerators.dtype != F32 or len(numerators) != k:
        return None
    if not isinstance(most_recent, np.bool_) or not all(map(_is_numerator, numerators)) or len(results) != 4 * k:
        return None
    histories, stored = operands[:k], operands[k:]
    if not _are_histories(histories, results[:k]):
        return None
    g = len(histories[0])
    if not all(_is(spec, (g,), F32) for spec in [*((s.shape, s.dtype) for s in stored), *results[k:]]):
        return None
    moved = [h.copy() for h in histories]
    scale, scale_inv = np.empty((k, g), np.float32), np.empty((k, g), np.float32)
    for q in range(k):
        for i in range(g):
            moved[q][i], scale[q, i], scale_inv[q, i] = oracle.delayed_scale(
                histories[q][i], stored[q][i], numerators[q], bool(most_recent)
            )
    return [*moved, *scale, *scale_inv, *np.zeros((k, g), np.float32)]


def _push_amaxes_answer(operands, results, attributes):
    k = len(operands) // 2
    if not 1 <= k <= 16 or len(operands) != 2 * k or len(results) != k:
        return None
    histories, tops = operands[:k], operands[k:]
    if not _are_histories(histories, results):
        return None
    g = len(histories[0])
    if not all(_is((top.shape, top.dtype), (g,), F32) for top in tops):
        return None
    pushed = [h.copy() for h in histories]
    for q in range(k):
        for i in range(g):
            pushed[q][i] = oracle.push_amax(histories[q][i], tops[q][i])
    return pushed


# ----------------------------------------------------------------------------------------------------------- running


def run(call: Call):
    """The results of the custom call. Raises what XLA raises."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.results]
    ffi_call = jax.ffi.ffi_call(cases.TARGETS[call.op], shapes)
    return [
        np.asarray(out)
        for out in jax.block_until_ready(jax.jit(lambda *xs: ffi_call(*xs, **call.attributes))(*call.operands))
    ]


def check(seed: int) -> str:
    """Runs one random call: "right", "refused" or "nothing to see".

    Raises:
        AssertionError: the answer is wrong, a bad call is accepted, a good one refused, or the error does not name
            the op.
    """
    call = random_call(np.random.default_rng(seed))
    wanted = answer(call)
    try:
        got = run(call)
    except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        assert wanted is None, f"{call}: a good call is refused: {error}"
        assert call.op in str(error), f"{call}: an error that does not name the op: {error}"
        return "refused"
    if not any(out.size for out in got):
        return "nothing to see"  # XLA removes a call whose results have no elements
    assert wanted is not None, f"{call}: a bad call is accepted"
    for i, (out, expected) in enumerate(zip(got, wanted, strict=True)):
        if expected is None:
            continue
        if call.op == "quantize_transpose" and i == 3:
            for group, part in np.ndindex(out.shape[:2]):
                rows = expected[group, part * SUMMED_ROWS : (part + 1) * SUMMED_ROWS]
                # Where magnitudes add up to more than f32 holds, some orders of additions overflow and others do not.
                fits = np.abs(rows.astype(np.float64)).sum(axis=0) < np.finfo(np.float32).max
                oracle.assert_column_sums(out[group, part][fits], rows[:, fits], f"{call}: column sums")
            continue
        oracle.assert_bitwise(out, expected, f"{call}: result {i}")
    return "right"
