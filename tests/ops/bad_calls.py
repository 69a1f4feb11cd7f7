"""Every way a custom call can be bad, as data: buffers that are not as in `targets`,
their number, and attributes.
"""

import dataclasses
import itertools

import numpy as np

from .targets import BF16, E4M3, E5M2, F32, S32, Call, fault, good, table

STRANGE_DTYPES = (
    F32,
    BF16,
    E4M3,
    E5M2,
    S32,
    np.dtype(np.uint32),
    np.dtype(np.complex64),
    np.dtype(bool),
)


def variants(call: Call, place: str, index: int):
    """Another dtype of each kind, another rank, and each side longer or shorter by
    one.
    """
    shape, dtype = getattr(call, place)[index]
    for other in STRANGE_DTYPES:
        yield call.changed(place, index, (shape, other))
    shapes = [
        (),
        (0,),
        (1,),
        shape[1:],
        (*shape, 1),
        (1, *shape),
        (int(np.prod(shape)),),
        shape[::-1],
        (0, *shape),
    ]
    for axis, by in itertools.product(range(len(shape)), (-1, 1)):
        shapes.append((*shape[:axis], max(0, shape[axis] + by), *shape[axis + 1 :]))
    for other in dict.fromkeys(shapes):
        yield call.changed(place, index, (other, dtype))


def bad_buffers(op: str, name: str):
    """Calls in which a buffer is not as in the table, and is the first that is not."""
    call, parts = good(op), table(op)
    for place, buffers in zip(("operands", "results"), parts, strict=True):
        for index, buffer in enumerate(buffers):
            if buffer.name == name:
                bad = [
                    bad for bad in variants(call, place, index) if fault(bad) == name
                ]
                # XLA removes a call whose results have no elements.
                yield from (
                    bad
                    for bad in bad
                    if any(np.prod(shape) for shape, _ in bad.results)
                )
    for place, index, other in RELATED.get((op, name), []):
        yield call.changed(place, index, other)


# What the table does not say: `(op, buffer that is named) -> (place, index, buffer)`s.
RELATED = {
    # there is a beta, and no mean
    ("quantize_norm", "beta"): [("operands", 3, ((2, 3, 1), F32))],
    # as many experts as group sizes
    ("ragged_matmul", "b"): [("operands", 1, ((2, 3, 5, 6), E5M2))],
}


def bad_counts(op: str):
    """Calls with a buffer too many or too few."""
    call, one = good(op), ((1,), F32)
    for place, part in (("operands", call.operands), ("results", call.results)):
        for changed in ([*part, one], part[:-1]):
            bad = dataclasses.replace(call, **{place: changed})
            # XLA removes a call without results before it can be refused
            if changed and fault(bad) == "":
                yield bad


CLAMPED = {"activation": "clamped_swiglu"}
BAD_NUMERATORS = np.float32([0, -0.0, -1, 2.0**-127, np.inf, -np.inf, np.nan])
POSITIVE = "expected a positive normal F32"
# `(attributes, message)`: what the error says after the op's name, or None where it is
# XLA's own without one. Numbers of another type are others than in good calls, because
# jit's cache takes 1.0 of one type for 1.0 of another.
BAD_ATTRIBUTES = {
    "amax_to_scale": [
        *(({"numerator": x}, f"numerator: {POSITIVE}") for x in BAD_NUMERATORS),
        ({"numerator": np.float64(5)}, None),
    ],
    "delayed_scales": [
        *(
            ({"numerators": np.float32([1, x])}, f"numerator 1: {POSITIVE}")
            for x in BAD_NUMERATORS
        ),
        *(
            (
                {"numerators": np.ones(n, np.float32)},
                "expected 2 operands, 3 results and a numer",
            )
            for n in (0, 1, 65)
        ),
        ({"numerators": np.full(2, 5, np.float64)}, None),
        ({"most_recent": np.int32(1)}, None),
    ],
    "read_histories": [
        ({"numerators": np.float32([1, -1])}, f"numerator 1: {POSITIVE}"),
        (
            {"numerators": np.ones(3, np.float32)},
            "expected 2 operands and a numerator",
        ),
        ({"numerators": np.full(2, 5, np.float64)}, None),
    ],
    "scaled_matmul": [
        (
            {"has_bias": np.bool_(bias), "has_accumulator": np.bool_(sum_)},
            r"expected [45] operands .*, got 6",
        )
        for bias, sum_ in ((False, True), (True, False), (False, False))
    ],
    # Also two that cuBLASLt does not multiply.
    "block_scaled_matmul": [
        ({"a_scales": a, "b_scales": b}, f"a_scales, .* got {a} by {b}")
        for a, b in (
            ("128x128", "128x128"),
            ("rows", "1x128"),
            ("1x32", "1x128"),
            ("", "rows"),
        )
    ],
    # Also one that does not go with x.
    **{
        op: [
            (
                {"activation": name},
                f"{'x' if name == other else 'activation'}: expected .*got",
            )
            for name in ("tanh", other)
        ]
        + [
            (CLAMPED, "expected the attribute activation, limit, .* got 1"),
            ({"limit": np.float32(1)}, "expected the attribute activation alone"),
            (CLAMPED | dict.fromkeys(("limit", "alpha", "beta"), np.float32(1)), None),
        ]
        for op, other in (
            ("quantize_activation", "gelu"),
            ("quantize_activation_grad", "silu_gated"),
        )
    },
    "quantize_blocks_transpose": [
        *(
            ({"block": np.int64(b)}, "block: expected .*got")
            for b in ([], [1], [1, -1], [-128, 1], [1, 1, 128])
        ),
        *(
            ({"block": block}, None)
            for block in ("1x128", np.int32([1, 128]), np.int64(128))
        ),
        ({"scaling": "e8m0"}, "scaling: expected .*got"),
        ({"scaling": "e8m0_floor"}, "scale_inv: expected .*got"),
    ],
    "quantize_blocks_transpose, stored": [
        ({name: "1x64"}, f"{name}: expected .*got") for name in ("block", "scaling")
    ],
}
BAD_ATTRIBUTES["read_rows"] = BAD_ATTRIBUTES["read_histories"]


def bad_attributes(op: str):
    """`(call, message)`, a pattern: values, each attribute missing, and one that nobody
    knows.
    """
    call = good(op)
    for change, message in [
        *BAD_ATTRIBUTES.get(op, []),
        ({"surprise": np.int32(1)}, ""),
    ]:
        message = "" if message is None else rf"\b{call.target}: {message}"
        yield dataclasses.replace(call, attributes=call.attributes | change), message
    for name in call.attributes:
        rest = {
            other: value for other, value in call.attributes.items() if other != name
        }
        yield dataclasses.replace(call, attributes=rest), rf"\b{call.target}: "
