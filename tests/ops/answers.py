"""What the custom calls of the CPU give, by the oracle: codes, amaxes, scales and
histories to the bit.
"""

import numpy as np
import oracle
from oracle import (
    adam as oracle_adam,
    blocks as oracle_blocks,
    moments as oracle_moments,
)

from .targets import ATTRIBUTES, F32, Call, fault, quantizers, with_groups

FORMAT_OF = {fmt.dtype: fmt for fmt in oracle.FORMATS.values()}
SUMMED_ROWS = 128


def answer(call: Call) -> list | None:
    """The results; None where the call must be refused. A result that is None may be
    anything.
    """
    if fault(call) is not None or not _attributes_are_good(call):
        return None
    whole = with_groups(call)
    results = ANSWERS[call.target](
        *whole.operands, results=whole.results, **call.attributes
    )
    # A result without the side of its one group has the elements of one with it.
    lacks_g = [
        given != grouped
        for given, grouped in zip(call.results, whole.results, strict=True)
    ]
    return [
        out[0] if lacks else out for out, lacks in zip(results, lacks_g, strict=True)
    ]


def _attributes_are_good(call: Call) -> bool:
    right = ATTRIBUTES.get(call.op, {})
    return set(call.attributes) == set(right) and all(
        _is_good(call, name, right[name]) for name in right
    )


def _is_good(call: Call, name: str, right) -> bool:
    value = call.attributes[name]
    if name == "numerator":
        return _is_numerator(value)
    if name == "numerators":
        is_array = isinstance(value, np.ndarray) and value.dtype == F32
        return (
            is_array
            and len(value) == quantizers(call)
            and all(map(_is_numerator, value))
        )
    if name in ("squared", "most_recent"):
        return isinstance(value, np.bool_)
    return repr(value) == repr(right)  # the table has the sizes of these alone


def _is_numerator(value) -> bool:
    return (
        isinstance(value, np.float32)
        and np.isfinite(value)
        and value >= np.finfo(np.float32).tiny
    )


def _raised(x, so_far):
    """None where a sign is set: an amax so far is not negative, and what comes of one
    that is says nobody.
    """
    if np.signbit(so_far).any():
        return None
    groups = x[None] if len(so_far) == 1 else x
    return np.float32(
        [max(top, oracle.amax(rows)) for rows, top in zip(groups, so_far, strict=True)]
    )


def _scaled(function, x, scale, dtype):
    """Group by group."""
    out = np.empty(x.shape, dtype)
    for i in range(len(x)):
        out[i] = function(x[i], scale[i % len(scale)])
    return out


def _amax(x, results):
    return [_raised(x, np.zeros(len(x), F32))]


def _quantize(x, scale, so_far, results):
    data, top = np.dtype(results[0][1]), results[-1]
    codes = _scaled(
        lambda row, s: oracle.quantize(row, s, FORMAT_OF[data])[0], x, scale, data
    )
    if top[0] == (0,):
        return [codes, np.zeros(0, F32)]
    return [codes, _raised(x, so_far if so_far.size else np.zeros(top[0], F32))]


def _quantize_transpose(x, scale, so_far, results):
    codes, top = _quantize(x, scale, so_far, [results[0], results[2]])
    # Column sums are compared by `assert_results`, with the rows that they are of.
    return [codes, np.ascontiguousarray(codes.swapaxes(1, 2)), top, x][: len(results)]


def _quantize_pair(x, scale, so_far, second, results):
    both = np.concatenate([x, second], axis=2)
    codes, top = _quantize(both, scale, so_far, results[:2])
    return [codes, top, np.ascontiguousarray(codes.swapaxes(1, 2))][: len(results)]


def _quantize_blocks_transpose(x, results, block, scaling):
    fmt, scale = FORMAT_OF[np.dtype(results[0][1])], scaling.split("_")[0]
    layouts = (x, x.swapaxes(1, 2))[: len(results) // 2]
    answers = [
        [
            oracle_blocks.quantize(matrix, fmt, tuple(block), scale=scale)
            for matrix in each
        ]
        for each in layouts
    ]
    return [
        np.array([part[i].view(dtype) for part in parts], dtype).reshape(shape)
        for parts, pair in zip(answers, (results[:2], results[2:]), strict=False)
        for i, (shape, dtype) in enumerate(pair)
    ]


def _transpose_codes(data, results):
    return [np.ascontiguousarray(data.swapaxes(1, 2))]


def _dequantize(data, scale_inv, results):
    dtype = np.dtype(results[0][1])
    return [
        _scaled(lambda row, s: oracle.dequantize(row, s, dtype), data, scale_inv, dtype)
    ]


def _decode_moment(data, amax, exponent, results):
    # as every amax is
    return [
        oracle_moments.decode(data, amax, exponent) if np.isfinite(amax).all() else None
    ]


def _encode_moment(data, amax, exponent, after, keys, results, squared):
    if not np.isfinite(amax).all() or np.signbit(amax).any():  # no amax is negative
        return [None] * 3
    keys = keys if keys.shape == amax.shape else None
    return list(oracle_moments.encode(data, amax, exponent, after, keys, squared))


def _adam_update(grads, *operands, results, apply):
    *params, mu, mu_amax, mu_exponent, nu, nu_amax, nu_exponent, hyper, keys = operands
    mu_keys, nu_keys = keys.reshape(2, *mu_amax.shape)
    mu, nu = (mu, mu_amax, mu_exponent), (nu, nu_amax, nu_exponent)
    # as every amax is
    if not (np.isfinite(mu_amax).all() and np.isfinite(nu_amax).all()):
        return [None] * 7
    out, mu, nu = oracle_adam.step(
        grads, params[0] if params else None, mu, nu, mu_keys, nu_keys, hyper
    )
    # a NaN has the bits of its platform
    return [None if np.isnan(out).any() else out, *mu, *nu]


def _amax_to_scale(amax, stored, results, numerator):
    return list(oracle.scale_pair(amax, stored, numerator))


def _delayed_scales(*operands, results, numerators, most_recent):
    k, g = len(operands) // 2, len(operands[0])
    scale, scale_inv = np.empty((k, g), F32), np.empty((k, g), F32)
    for q, i in np.ndindex(k, g):
        scale[q, i], scale_inv[q, i] = oracle.delayed_scale(
            operands[q][i], operands[k + q][i], numerators[q], bool(most_recent)
        )
    return [*scale, *scale_inv, *np.zeros((k, g), F32)]


def _read_histories(*operands, results, numerators):
    k, g = len(operands) // 2, len(operands[0])
    numbers = [
        [
            oracle.reading(operands[q][i], operands[k + q][i], numerators[q])
            for q in range(k)
        ]
        for i in range(g)
    ]
    return [np.reshape(np.float32(numbers), (g, 6 * k))]


def _write_histories(*operands, results):
    k, g = len(results) // 2, len(operands[0])
    histories, numbers = operands[:k], operands[k:]
    recorded = (
        numbers[0]
        if len(numbers) == 1
        else np.stack([x for i in range(k) for x in numbers[i::k]], axis=-1)
    )
    each = recorded.shape[1] // k
    written, scales = [history.copy() for history in histories], np.empty((k, g), F32)
    for q, i in np.ndindex(k, g):
        written[q][i], scales[q, i] = oracle.write_history(
            histories[q][i], recorded[i, each * q : each * (q + 1)]
        )
    return [*written, *scales]


def _split_reading(reading, results):
    k = reading.shape[1] // 6
    rows = reading.reshape(-1, k, 6)
    return [
        *(rows[:, i, :2] for i in range(k)),
        *(rows[:, i, j] for j in range(2, 6) for i in range(k)),
    ]


def _join_recorded(*operands, results):
    k = len(operands) // 2
    recorded = np.zeros((len(operands[0]), k, 6), F32)
    for i, numbers in enumerate(operands):
        recorded[:, i % k, i // k] = numbers
    return [recorded.reshape(len(recorded), 6 * k)]


def _undo_factors(*operands, results):
    # ops/test_undo_factors.py compares the custom call with the reference
    return [None] * 4


ANSWERS = {
    function.__name__[1:]: function
    for function in (
        _transpose_codes,
        _amax,
        _quantize,
        _quantize_blocks_transpose,
        _quantize_pair,
        _quantize_transpose,
        _dequantize,
        _amax_to_scale,
        _adam_update,
        _decode_moment,
        _encode_moment,
        _delayed_scales,
        _read_histories,
        _write_histories,
        _split_reading,
        _join_recorded,
        _undo_factors,
    )
}


def assert_results(call: Call, got, expected) -> None:
    """Bitwise, but for sums, which have a bound."""
    for i, (out, wanted) in enumerate(zip(got, expected, strict=True)):
        if wanted is None:
            continue
        if call.op != "quantize_transpose" or i < 3:
            oracle.assert_bitwise(out, wanted, f"{call}: result {i}")
            continue
        # A call without the side of its one group has neither sums nor rows with that
        # side.
        for *group, part in np.ndindex(*out.shape[:-1]):
            rows = wanted[(*group, slice(part * SUMMED_ROWS, (part + 1) * SUMMED_ROWS))]
            # Where magnitudes add up to more than f32 holds, some orders of additions
            # overflow and others do not.
            with np.errstate(invalid="ignore"):
                fits = (
                    np.abs(oracle.widen(rows, np.float64)).sum(axis=0)
                    < np.finfo(F32).max
                )
            oracle.assert_column_sums(
                np.asarray(out)[(*group, part)][fits],
                rows[:, fits],
                f"{call}: column sums",
            )
