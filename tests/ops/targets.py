"""The custom calls as data: the buffers and attributes of each, and good calls.

CPU handlers, emulated CUDA handlers, the fuzzer and the sanitizers all read this table;
numpy alone.
"""

import dataclasses
import itertools
import math
import re

import numpy as np
import oracle

F32, BF16, F16 = np.dtype(np.float32), oracle.BF16, oracle.F16
E4M3, E5M2 = oracle.E4M3.dtype, oracle.E5M2.dtype
S32, U8 = np.dtype(np.int32), np.dtype(np.uint8)
HIGH, FP8 = (BF16, F16, F32), (E4M3, E5M2)
KINDS = {
    "high": HIGH,
    "wide": HIGH[::-1],
    "half": HIGH[:2],
    "fp8": FP8,
    "f32": (F32,),
    "s32": (S32,),
    "u8": (U8,),
}
KINDS |= {"e4m3": (E4M3,), "s8": (np.dtype(np.int8),), "u32": (np.dtype(np.uint32),)}

# `name dtypes[sides]` for each buffer, as in common/README.md. A dtype `=data` is that
# of the buffer `data`; `1|g` is one side or another and `0/g n` one shape or another,
# of which a good call has the last; an upper-case side is not 0; `*` are any sides, `?`
# is any side, `g%` any divisor of g, `2*g` a product; a `g?` of 1 may be left out, in
# all buffers of a call or in none; `name?` may be absent; buffers with `#` are there
# once for each of k quantizers, with `##` for each of the two rows of each.
_MOMENT = "{0} data 0 e4m3[g n], {0} amax 0 f32[g n/128], {0} exponent 0 s8[g n/128]"
_MU, _NU, _NEXT_MU, _NEXT_NU = map(_MOMENT.format, ("mu", "nu", "next mu", "next nu"))
_STEPPED = (
    f"{_MU}, {_NU}, hyper 0 f32[g% 11], keys u32[2*g*n/128] -> out 0 f32[g n], "
    f"{_NEXT_MU}, {_NEXT_NU}"
)
SPECS = {
    "amax": "x high[g n] -> amax f32[g]",
    "quantize": (
        "x high[g n], scale f32[1|g], amax_so_far f32[0|1|g] -> data fp8[g n], amax "
        "f32[0|1|g]"
    ),
    "quantize_transpose": (
        "x high[g? m n], scale f32[1|g], amax_so_far f32[0|1|g] -> data fp8[g? m n], "
        "data_t =data[g? n m], amax f32[0|1|g], column_sums? f32[g? m/128 n]"
    ),
    "quantize_blocks_transpose": (
        "x high[g m n] -> data fp8[g m n], scale_inv f32[g m n/128], data_t? =data[g "
        "n m], scale_inv_t? f32[g n m/128]"
    ),
    "quantize_blocks_transpose, MX": (
        "x high[g m n] -> data fp8[g m n], scale_inv u8[g m n/32], data_t? =data[g n "
        "m], scale_inv_t? u8[g n m/32]"
    ),
    "dequantize": "data fp8[g *], scale_inv f32[1|g] -> out high[g *]",
    "decode_moment": (
        "data e4m3[g n], amax f32[g n/128], exponent s8[g n/128] -> out f32[g n]"
    ),
    "encode_moment": (
        "data e4m3[g n], amax f32[g n/128], exponent s8[g n/128], after f32[g n], "
        "keys u32[0/g n/128] -> next data e4m3[g n], next amax f32[g n/128], next "
        "exponent s8[g n/128]"
    ),
    "adam_update": f"grads 0 f32[g n], params 0 f32[g n], {_STEPPED}",
    "adam_update, no params": f"grads 0 f32[g n], {_STEPPED}",
    "amax_to_scale": "amax f32[g], stored f32[g] -> scale f32[g], scale_inv f32[g]",
    "delayed_scales": (
        "history # f32[g? H#], stored # f32[g] -> scale # f32[g], scale_inv # f32[g], "
        "amax # f32[g]"
    ),
    "read_histories": "history # f32[g? H#], stored # f32[g] -> reading 0 f32[g 6k]",
    "write_histories": (
        "history # f32[g? H#], recorded 0 f32[g 6k] -> next history # f32[g? H#], "
        "next scale # f32[g]"
    ),
    "write_histories, a product": (
        "history # f32[g? H#], amax # f32[g], scale_inv # f32[g] -> next history # "
        "f32[g? H#], next scale # f32[g]"
    ),
    "split_reading": (
        "reading f32[g 6k] -> history # f32[g 2], stored # f32[g], amax # f32[g], "
        "scale # f32[g], scale_inv # f32[g]"
    ),
    "join_recorded": "amax # f32[g], scale_inv # f32[g] -> recorded f32[g 6k]",
    "undo_factors": (
        "history f32[g? H0], scale f32[g], new history f32[g? H0], new scale f32[g] -> "
        "amax f32[g], scale_inv f32[g], stays f32[g], factor f32[g]"
    ),
}
NOT_OF_CUDA = (
    "quantize_blocks_transpose",
    "decode_moment",
    "join_recorded",
    "split_reading",
    "undo_factors",
)
CUDA_SPECS = {
    op: spec for op, spec in SPECS.items() if not op.startswith(NOT_OF_CUDA)
} | {
    "scaled_matmul": (
        "a fp8[g? m k], b fp8[g? n k], a_scale_inv f32[1/1 4/g 4], b_scale_inv "
        "f32[1/1 4/g 4], bias half[n], accumulator f32[g? m n] -> out f32[g? m n], "
        "workspace u8[w]"
    ),
    "block_scaled_matmul": (
        "a fp8[g? m k], b fp8[g? n k], a_scale_inv f32[g k/128 m], b_scale_inv f32[g "
        "n/128 4] -> out wide[g? m n], workspace u8[w]"
    ),
    "ragged_matmul": (
        "a fp8[g m k], b fp8[g ? n k], a_scale_inv f32[1|g], b_scale_inv f32[1|g], "
        "group_sizes s32[g ?] -> out high[g m n]"
    ),
    "ragged_matmul, contraction": (
        "a fp8[g m k], b fp8[g n k], a_scale_inv f32[1|g], b_scale_inv f32[1|g], "
        "group_sizes s32[g e] -> out high[g e m n]"
    ),
    "ragged_matmul, blocks": (
        "a fp8[g m k], b fp8[g ? n k], a_scale_inv f32[g k/128 m], b_scale_inv f32[g "
        "? n/128 k/128], group_sizes s32[g ?] -> out high[g m n]"
    ),
    "ragged_matmul, contraction of blocks": (
        "a fp8[g m k], b fp8[g n k], a_scale_inv f32[g k/128 m], b_scale_inv f32[g "
        "k/128 n], group_sizes s32[g e] -> out high[g e m n]"
    ),
    "read_rows": (
        "history # f32[g H#], stored # f32[g] -> scale ## f32[1], scale_inv ## f32[1], "
        "amax ## f32[1]"
    ),
    "write_rows": (
        "history # f32[g H#], amax ## f32[1], scale_inv ## f32[1] -> next history # "
        "f32[g H#], next scale # f32[g]"
    ),
    "transpose_codes": "data fp8[g m n] -> data_t =data[g n m]",
    "quantize_activation": "x high[g m 2 n], scale f32[1|g], amax_so_far f32[0|1|g] -> "
    "data fp8[g m n], amax f32[0|1|g], data_t? =data[g n m]",
    "quantize_activation_grad": (
        "x high[g m 1 n], scale f32[1|g], amax_so_far f32[0|1|g], grad =x[g m n] -> "
        "data fp8[g m n], amax f32[0|1|g], data_t? =data[g n m], column_sums? f32[g "
        "m/128 n]"
    ),
    "quantize_blocks_transpose, stored": (
        "x high[g m n] -> data fp8[g m n], scale_inv f32[g n/128 m], amaxes f32[g 0], "
        "data_t =data[g n m], scale_inv_t f32[g m/128 n]"
    ),
    "quantize_norm": (
        "x high[g m n], scale f32[1|g], amax_so_far f32[0|1|g], statistics f32[g m "
        "1|2], gamma f32[1|g n], beta f32[0/g n] -> data fp8[g m n], amax f32[0|1|g], "
        "data_t? =data[g n m]"
    ),
    "quantize_pair": (
        "x high[g m n], scale f32[1|g], amax_so_far f32[0|1|g], second =x[g m n] -> "
        "data fp8[g m 2*n], amax f32[0|1|g], data_t? =data[g 2*n m]"
    ),
}
SIZES = dict(g=2, m=3, n=4, H0=4, H1=1, w=1024) | {"*": (3, 4)}
EMPTY = {"m": 0, "*": (0, 4)}, {"n": 0, "*": (3, 0)}
CUDA_SIZES = {
    "scaled_matmul": dict(m=16, n=32, k=48),
    "block_scaled_matmul": dict(m=16, n=32, k=160),
    "ragged_matmul": {"m": 4, "?": 4, "n": 5, "k": 6},
    "ragged_matmul, contraction": dict(m=5, e=3, n=6, k=4),
    "ragged_matmul, blocks": {"m": 4, "?": 4, "n": 5, "k": 134},
    "ragged_matmul, contraction of blocks": dict(m=5, e=3, n=6, k=130),
    "quantize_blocks_transpose, stored": dict(m=3, n=40),
}
ATTRIBUTES = {
    "amax_to_scale": {"numerator": np.float32(1)},
    "delayed_scales": {
        "numerators": np.ones(2, np.float32),
        "most_recent": np.bool_(False),
    },
    "read_histories": {"numerators": np.ones(2, np.float32)},
    "read_rows": {"numerators": np.ones(2, np.float32)},
    "scaled_matmul": {
        "precise": np.bool_(False),
        "has_bias": np.bool_(True),
        "has_accumulator": np.bool_(True),
    },
    "block_scaled_matmul": {
        "precise": np.bool_(True),
        "a_scales": "1x128",
        "b_scales": "128x128",
    },
    "ragged_matmul": {"precise": np.bool_(True)},
    "ragged_matmul, contraction": {"precise": np.bool_(True)},
    "ragged_matmul, blocks": {"precise": np.bool_(True)},
    "ragged_matmul, contraction of blocks": {"precise": np.bool_(True)},
    "quantize_activation": {"activation": "gelu_gated"},
    "quantize_activation_grad": {"activation": "relu"},
    "quantize_blocks_transpose": {"block": np.int64([1, 128]), "scaling": "f32"},
    "quantize_blocks_transpose, MX": {
        "block": np.int64([1, 32]),
        "scaling": "e8m0_ceil",
    },
    "quantize_blocks_transpose, stored": {"block": "1x128", "scaling": "f32"},
    "encode_moment": {"squared": np.bool_(True)},
    "adam_update": {"apply": np.bool_(True)},
    "adam_update, no params": {"apply": np.bool_(False)},
}
# Calls that have all of the buffers that may be absent, or none of them.
ALL_OR_NONE = ("quantize_blocks_transpose", "quantize_blocks_transpose, MX")
# Where the amax is among the results; the amax so far is the third operand.
AMAXES = {
    "quantize": 1,
    "quantize_transpose": 2,
    "quantize_activation": 1,
    "quantize_activation_grad": 1,
    "quantize_norm": 1,
    "quantize_pair": 1,
}
# Where results may lie in the place of operands: operand -> result. Beside histories,
# as many as there are.
IN_PLACE = {
    "quantize": {2: 1},
    "quantize_transpose": {2: 2},
    "encode_moment": {0: 0, 1: 1, 2: 2},
    "adam_update": {result + 1: result for result in range(7)},
    "adam_update, no params": {result: result for result in range(7)},
}
# The most quantizers of one call.
LARGEST_K = dict.fromkeys(
    (
        "delayed_scales",
        "read_histories",
        "write_histories",
        "write_histories, a product",
        "split_reading",
        "join_recorded",
    ),
    64,
)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A line of the table: `shapes` are alternatives, each a tuple of sides, each of
    those a tuple of alternatives.
    """

    name: str
    dtypes: str
    shapes: tuple
    is_optional: bool

    @property
    def may_lack_g(self) -> bool:
        """Whether the side of the groups may be left out where it is 1."""
        return self.shapes[0][:1] == (("g?",),)


@dataclasses.dataclass(frozen=True)
class Call:
    """One custom call: `(shape, dtype)` of operands and results, or operands that are
    arrays, and attributes.
    """

    op: str
    operands: list
    results: list
    attributes: dict

    @property
    def target(self) -> str:
        """The op without the kind of call that it is."""
        return self.op.split(",")[0]

    def __str__(self) -> str:
        operands, results = (
            ", ".join(
                f"{np.dtype(dtype)}{list(shape)}" for shape, dtype in map(spec, part)
            )
            for part in (self.operands, self.results)
        )
        return f"{self.op}({operands}) -> ({results}) with {self.attributes}"

    def changed(self, place: str, index: int, buffer) -> "Call":
        """With another buffer among "operands" or "results"."""
        part = list(getattr(self, place))
        part[index] = buffer
        return dataclasses.replace(self, **{place: part})


def spec(buffer) -> tuple:
    """`(shape, dtype)` of an array, or as given."""
    return buffer if isinstance(buffer, tuple) else (buffer.shape, buffer.dtype)


def table(op: str, k: int = 2) -> tuple[list[Buffer], list[Buffer]]:
    """Operands and results of a target, for k quantizers."""

    def parse(text):
        name, dtypes, sides = re.fullmatch(r"(.+) (\S+)\[(.*)\]", text.strip()).groups()
        shapes = tuple(
            tuple(tuple(side.split("|")) for side in shape.split())
            for shape in re.split(r"/(?!128|32)", sides)
        )
        return Buffer(name.rstrip("?"), dtypes, shapes, name.endswith("?"))

    def expand(part):
        buffers = []
        for text in part.split(", "):
            times = k if "#" in text else 1
            times *= 1 + ("##" in text)
            text = text.replace("##", "#").replace("6k", str(6 * k))
            buffers += [parse(text.replace("#", str(i))) for i in range(times)]
        return buffers

    operands, results = (SPECS | CUDA_SPECS)[op].split(" -> ")
    return expand(operands), expand(results)


def side_of(side: str, sizes: dict) -> int:
    if "*" in side:
        return math.prod(side_of(factor, sizes) for factor in side.split("*"))
    name, _, part = side.replace("g?", "g").rstrip("%").partition("/")
    size = int(name) if name.isdigit() else sizes[name]
    return -(-size // int(part)) if part else size


def build(
    op: str,
    sizes: dict,
    k: int = 2,
    choose=lambda options, last=True: options[-1 if last else 0],
) -> Call:
    """A good call; `choose(options, last)` takes one of shapes or sides (the last), or
    of the dtypes (the first).
    """
    dtypes, (operands, results) = {}, table(op, k)
    # A call with one group may lack its side.
    lacks_g = (
        sizes["g"] == 1
        and any(b.may_lack_g for b in operands)
        and choose((True, False))
    )

    def make(buffer):
        kind = buffer.dtypes
        dtypes[buffer.name] = (
            dtypes[kind[1:]] if kind[0] == "=" else choose(KINDS[kind], last=False)
        )
        shape = []
        for options in choose(buffer.shapes)[lacks_g and buffer.may_lack_g :]:
            side = choose(options)
            shape += sizes["*"] if side == "*" else [side_of(side, sizes)]
        return tuple(shape), dtypes[buffer.name]

    attributes = {
        n: np.resize(v, k) if n == "numerators" else v
        for n, v in ATTRIBUTES.get(op, {}).items()
    }
    call = Call(op, [make(b) for b in operands], [make(b) for b in results], attributes)
    if not amaxes_fit(call):
        call = call.changed("results", AMAXES[op], call.operands[2])
    return call


def amaxes_fit(call: Call) -> bool:
    """Whether the amax and that so far are as many, unless one of them is none."""
    if call.op not in AMAXES:
        return True
    so_far, amax = call.operands[2], call.results[AMAXES[call.op]]
    shapes = [spec(so_far)[0], spec(amax)[0]]
    return (0,) in shapes or shapes[0] == shapes[1]


def good(op: str) -> Call:
    return build(op, SIZES | CUDA_SIZES.get(op, {}))


def every_choice(op: str, sizes: dict):
    """Good calls with every combination of alternative shapes and sides."""
    calls = {}
    for picks in itertools.product((0, 1, -1), repeat=4):
        rest = iter(picks)
        call = build(
            op,
            sizes,
            choose=lambda o, last=True, r=rest: o[
                next(r, -1) if last and len(o) > 1 else -last
            ],
        )
        calls[str(call)] = call
    return calls.values()


def with_groups(call: Call) -> Call:
    """A good call with the side of its one group in all buffers that may lack it."""

    def grouped(given, buffer):
        shape, dtype = spec(given)
        if not buffer.may_lack_g or len(shape) == len(buffer.shapes[0]):
            return given
        return ((1, *shape), dtype) if isinstance(given, tuple) else given[None]

    parts = zip(
        (call.operands, call.results), table(call.op, quantizers(call)), strict=True
    )
    operands, results = (
        [grouped(*pair) for pair in zip(part, buffers, strict=False)]
        for part, buffers in parts
    )
    return dataclasses.replace(call, operands=operands, results=results)


def in_place(call: Call) -> dict:
    """`IN_PLACE` of a filled call, where shapes agree."""
    places = IN_PLACE.get(call.op, {})
    if call.target == "write_histories":
        places = {i: i for i in range(quantizers(call))}
    return {
        operand: result
        for operand, result in places.items()
        if call.operands[operand].shape == call.results[result][0]
    }


def with_quantizers(op: str, k: int) -> Call:
    return build(op, SIZES | {f"H{i}": 1 + i % 4 for i in range(k)}, k)


def quantizers(call: Call) -> int:
    """k, as the handlers count it."""
    if call.op == "split_reading":
        return len(call.results) // 5
    return len(call.results if call.op.startswith("write_") else call.operands) // 2


def filled(call: Call, values=np.ones) -> Call:
    """With arrays for operands: `values(shape, dtype)`."""
    return dataclasses.replace(
        call, operands=[values(*operand) for operand in call.operands]
    )


def fault(call: Call) -> str | None:
    """The first buffer that is not as in the table; "" where there is another number of
    them; None for a good call.
    """
    k = quantizers(call)
    if call.op in LARGEST_K and not 1 <= k <= LARGEST_K[call.op]:
        return ""
    sizes, dtypes = {}, {}
    for part, buffers in zip(
        (call.operands, call.results), table(call.op, k), strict=True
    ):
        least = sum(not b.is_optional for b in buffers)
        if not least <= len(part) <= len(buffers) or (
            call.op in ALL_OR_NONE and least < len(part) < len(buffers)
        ):
            return ""
        for given, buffer in zip(part, buffers, strict=False):
            shape, dtype = spec(given)
            dtypes[buffer.name] = np.dtype(dtype)
            allowed = (
                (dtypes[buffer.dtypes[1:]],)
                if buffer.dtypes[0] == "="
                else KINDS[buffer.dtypes]
            )
            if dtype not in allowed or not any(
                fits(shape, sides, sizes) for sides in buffer.shapes
            ):
                return buffer.name
    return None if amaxes_fit(call) else "amax"


def fits(shape, sides, sizes: dict) -> bool:
    """Whether a shape is one of the table; sides that come for the first time are put
    into `sizes`.
    """
    if sides[:1] == (("g?",),):
        # The first of the buffers that may lack the side says whether all of them do.
        lacks_g = sizes.setdefault("g?", len(shape) + 1 == len(sides))
        shape, sides = (1, *shape) if lacks_g else shape, (("g",), *sides[1:])
    if ("*",) in sides:
        if len(shape) < 2 or sizes.setdefault("*", shape[1:]) != shape[1:]:
            return False
        shape, sides = shape[:1], sides[:1]
    if len(shape) != len(sides):
        return False
    for size, options in zip(shape, sides, strict=True):
        if options == ("?",) or (
            options == ("g%",) and size and sizes["g"] % size == 0
        ):
            continue
        first = len(options) == 1 and options[0].isalpha() or options[0][0] == "H"
        if (
            first
            and sizes.setdefault(options[0], size) != size
            or (options[0][0].isupper() and not size)
        ):
            return False
        if not first and size not in [side_of(side, sizes) for side in options]:
            return False
    return True


def names(op: str) -> list[str]:
    return list(dict.fromkeys(buffer.name for part in table(op) for buffer in part))
