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
    """With another rank, in another order, or of other sizes."""
    shapes = [
        (*shape, 1),
        shape[1:],
        shape[::-1],
        (1,) * 24,
        values.dims(rng, len(shape), 4096),
    ]
    return tuple(_pick(rng, shapes))


def mutate(rng, operands, results, attributes):
    """One thing changed; it may still be a good call."""
    operands, results, attributes = list(operands), list(results), dict(attributes)
    part = _pick(rng, (operands, results))
    i = rng.integers(len(part))
    is_array = part is operands
    shape, dtype = (part[i].shape, part[i].dtype) if is_array else part[i]
    kind = _pick(rng, ("shape", "dtype", "none", "twice", "attribute", "no attribute"))
    if kind in ("shape", "dtype"):
        shape = _other_shape(rng, shape) if kind == "shape" else shape
        dtype = _pick(rng, values.DTYPES) if kind == "dtype" else dtype
        part[i] = values.array(rng, shape, dtype) if is_array else (shape, dtype)
    elif kind == "none" and len(part) > 1:
        del part[i]
    elif kind == "twice":
        part.insert(i, part[-1])
    elif kind == "no attribute" and attributes:
        del attributes[_pick(rng, sorted(attributes))]
    else:
        # a name that it has, or one that it has not
        name = _pick(rng, [*sorted(attributes), "surprise"])
        attributes[name] = _pick(rng, ODD_ATTRIBUTES)
    return operands, results, attributes


ODD_ATTRIBUTES = (
    np.bool_(True),
    np.int32(3),
    np.int64(-1),
    *np.float32([2.5, 0, -1, np.nan, np.inf, 2.0**-140]),
    np.float64(3),
    "max",
    "",
    np.float32([1, np.nan]),
    np.float32([]),
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
