"""Random calls of the CPU custom calls, good and bad, as the table of `ops/targets.py`
has them.
"""

import jax
import numpy as np
from ops import targets
from ops.answers import answer, assert_results
from ops.cases import run_target as run
from ops.targets import Call

import jaxfp8 as jaxfp8  # registers the targets

from . import values

# --------------------------------------------------------------------------- good calls


LENGTHS = (1, 2, 3, 4, 16, 1024)  # of a history


def _pick(rng, options):
    return options[rng.integers(len(options))]


def _sizes(rng, op) -> tuple[dict, int]:
    """Sides by name, and how many quantizers."""
    if "#" in targets.SPECS[op]:
        k = int(rng.integers(1, targets.LARGEST_K[op] + 1))
        lengths = {f"H{i}": int(_pick(rng, LENGTHS)) for i in range(k)}
        return {"g": values.dims(rng, 1, 64)[0]} | lengths, k
    rank = {
        "amax": 2,
        "quantize": 2,
        "dequantize": int(rng.integers(2, 6)),
        "decode_moment": 2,
        "encode_moment": 2,
    }.get(op, 3 if "transpose" in op else 1)
    # the oracle is slow
    g, *rest = values.dims(
        rng, rank, 2**12 if op in targets.ALL_OR_NONE else values.LARGEST
    )
    return {
        "g": g,
        "m": rest[0] if rest else 0,
        "n": rest[-1] if rest else 0,
        "*": rest,
        "H0": int(_pick(rng, LENGTHS)),
    }, 2


def _numerators(rng, count):
    return (2.0 ** rng.uniform(-20, 20, count)).astype(np.float32)


def good_call(rng, op: str) -> Call:
    sizes, k = _sizes(rng, op)
    call = targets.build(op, sizes, k, lambda options, last=True: _pick(rng, options))
    operands = []
    (buffers, _) = targets.table(op, k)
    for buffer, (shape, dtype) in zip(buffers, call.operands, strict=True):
        make = {
            "scale": values.scales,
            "scale_inv": values.scales,
            "amax_so_far": values.not_negative,
        }.get(buffer.name)
        operands.append(
            make(rng, shape)
            if make and dtype == np.float32
            else values.array(rng, shape, dtype)
        )
    if op == "quantize_transpose" and rng.random() < 0.7:
        del call.results[3:]  # no column sums
    if op in targets.ALL_OR_NONE and rng.random() < 0.3:
        del call.results[2:]  # one layout
    attributes = dict(call.attributes)
    if op == "amax_to_scale":
        attributes["numerator"] = _numerators(rng, 1)[0]
    if op == "delayed_scales":
        attributes |= {
            "numerators": _numerators(rng, k),
            "most_recent": np.bool_(rng.integers(2)),
        }
    return Call(op, operands, call.results, attributes)


# ---------------------------------------------------------------------------- bad calls


def _other_shape(rng, shape):
    shape = list(shape)
    kind = rng.integers(6)
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
    operands = list(operands)
    results = list(results)
    attributes = dict(attributes)
    kind = rng.integers(9)
    if kind == 0:
        i = rng.integers(len(operands))
        operands[i] = values.array(
            rng, _other_shape(rng, operands[i].shape), operands[i].dtype
        )
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
        name = _pick(
            rng,
            [*sorted(attributes), "numerator", "numerators", "most_recent", "surprise"],
        )
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
    call = good_call(rng, _pick(rng, sorted(targets.SPECS)))
    for _ in range(rng.choice([0, 1, 2, 3], p=[0.3, 0.5, 0.1, 0.1])):
        call = Call(call.op, *mutate(rng, call.operands, call.results, call.attributes))
    return call


def check(seed: int) -> str:
    """Runs one random call: "right", "refused" or "nothing to see".

    Raises:
        AssertionError: the answer is wrong, a bad call is accepted, a good one refused,
            or the error does not name the op.
    """
    call = random_call(np.random.default_rng(seed))
    expected = answer(call)
    try:
        got = run(call)
    except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        assert expected is None, f"{call}: a good call is refused: {error}"
        assert call.target in str(error), (
            f"{call}: an error that does not name the op: {error}"
        )
        return "refused"
    if not any(out.size for out in got):
        return "nothing to see"  # XLA removes a call whose results have no elements
    assert expected is not None, f"{call}: a bad call is accepted"
    assert_results(call, got, expected)
    return "right"
