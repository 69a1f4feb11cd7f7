"""A call of each op in the variants of its options, on numbers of many octaves, with
NaN and infinities among them.
"""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import ops
from ..numerics import E4M3, Format
from ..ops import _blocks

_F32 = np.dtype(np.float32)
_ROW, _MX, _TILE, _SQUARE = (1, None), (1, 32), (1, 128), (128, 128)
_QUANTIZED_BLOCKS = (
    *(
        {"block": _TILE},
        {"block": _SQUARE, "power_2_scale": True},
        {"block": _MX, "scale": "e8m0"},
    ),
    *({"block": _ROW}, {"block": _MX, "scale": "e8m0", "rounding": "floor"}),
)
_MULTIPLIED_BLOCKS = (
    (_TILE, _TILE),
    (_TILE, _SQUARE),
    (_MX, _MX),
    (_ROW, _ROW),
    (_SQUARE, _TILE),
)
MOST_OPTIONS = 5  # the largest number of options that an op has
_TINY = 2.0**-149
_HARD = np.float32(
    [
        np.inf,
        -np.inf,
        np.nan,
        0.0,
        -0.0,
        _TINY,
        -_TINY,
        2.0**-126,
        -3e38,
        6e4,
        448.0,
        2.0**-10,
    ]
)
_SCALES = np.float32([1, 3.7, 2.0**-7, 2.0**40, 2.0**-126, 2.0**126])
# Larger arrays repeat this many numbers; it is a prime, so that no two tiles are alike.
_PERIOD = 999_983


def numbers(
    rng, shape, dtype, *, hard: bool = False, octaves: float = 4.0
) -> np.ndarray:
    """Return normal numbers times powers of two; `hard` puts NaN, infinities,
    subnormals and large numbers in.
    """
    size = int(np.prod(shape))
    spread = 2.0 ** (octaves * rng.standard_normal(min(size, _PERIOD)))
    values = np.resize(
        (rng.standard_normal(spread.size) * spread).astype(np.float32), size
    )
    if hard:
        values[rng.permutation(size)[: _HARD.size]] = _HARD[:size]
    with np.errstate(over="ignore", invalid="ignore"):  # float16
        return values.reshape(shape).astype(dtype)


def codes(rng, shape, form, *, hard: bool = False) -> np.ndarray:
    """Return FP8 codes of normal numbers that use the range of the format; `hard` puts
    a NaN in.
    """
    values = numbers(
        rng, min(int(np.prod(shape)), _PERIOD), np.float32, octaves=1
    ) * np.float32(form.max / 16)
    if hard:
        values[values.size // 3] = np.nan
    return np.resize(np.clip(values, -form.max, form.max).astype(form.dtype), shape)


def random_scale(rng) -> np.ndarray:
    """Return a random scale f32[1] that may be ordinary, large or small."""
    return rng.choice(_SCALES, 1)


def factors(rng, shape, octaves: float = 4.0) -> np.ndarray:
    """Return positive f32 numbers between `2**-octaves` and `2**octaves`."""
    return np.exp2(rng.uniform(-octaves, octaves, shape)).astype(np.float32)


class Kind(NamedTuple):
    """The variant of a call of an op.

    Attributes:
        shape: `(m, n)`, or `(m, n, k)` of a product.
        dtype: the dtype of tensors to quantize, and of results in high precision.
        form: the format of codes.
        index: the number of the case, by which options of the op take turns.
        hard: whether NaN, infinities and subnormals are among the numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    form: Format
    index: int = 0
    hard: bool = False

    def turn(self, options: tuple) -> Any:
        """Return the option whose turn `index` is."""
        return options[self.index % len(options)]


def call(op: str, kind: Kind, group: int = 0) -> tuple:
    """Return `(function, arguments)`, and for a product `terms`, which give the exact
    product.

    `terms(*arguments)` is `(pieces, added)`: pairs `(a [..., m, k], b [..., n, k])` in
    float64, scaled, whose products are stacked by rows, and arrays `[..., 1 or m, n]`
    that are added.
    """
    return OPS[op](kind, np.random.default_rng([kind.index, group]))


def _amax(kind, rng):
    return ops.amax, [_numbers(kind, rng)]


def _quantize(kind, rng, op=ops.quantize):
    # The amax starts from 0, is raised from a given amax, or is no result: the custom
    # call has a form for each.
    options = kind.turn(({"amax": None}, {}, {"amax": None, "with_amax": False}))

    def function(x, scale, least):
        return op(x, scale, kind.form.dtype, **{"amax": least} | options)

    return function, (_numbers(kind, rng), random_scale(rng), factors(rng, 1))


def _quantize_transpose(kind, rng):
    return _quantize(kind, rng, ops.quantize_transpose)


def _quantize_activation(kind, rng):
    name = kind.turn(ops.ACTIVATIONS)
    shape = (kind.shape[0], 2, kind.shape[1]) if ops.is_gated(name) else kind.shape
    arguments = numbers(rng, shape, kind.dtype, octaves=1), factors(rng, 1, 1)
    return lambda x, scale: ops.quantize_activation(
        x, scale, kind.form.dtype, activation=name
    ), arguments


def _quantize_activation_grad(kind, rng):
    name, grad = (
        kind.turn(ops.ACTIVATIONS),
        numbers(rng, kind.shape, kind.dtype, octaves=1),
    )
    _, (x, scale) = _quantize_activation(kind, rng)

    def function(x, grad, scale):
        return ops.quantize_activation_grad(
            x, grad, scale, kind.form.dtype, activation=name
        )

    return function, (x, grad, scale)


def _quantize_norm(kind, rng):
    def function(x, gamma, beta, scale):
        options = kind.turn(
            ({"beta": None, "kind": "rms"}, {"beta": beta, "kind": "layer"})
        )
        return ops.quantize_norm(
            x, gamma, scale=scale, dtype=kind.form.dtype, epsilon=1e-6, **options
        )

    shapes = kind.shape, kind.shape[1], kind.shape[1]
    x, gamma, beta = (numbers(rng, shape, kind.dtype, octaves=1) for shape in shapes)
    return function, (x, gamma, beta, factors(rng, 1, 1))


def _quantize_blocks_transpose(kind, rng):
    op, options = (
        kind.turn((ops.quantize_blocks_transpose, ops.quantize_blocks)),
        kind.turn(_QUANTIZED_BLOCKS),
    )
    return lambda x: op(x, kind.form.dtype, **options), [_numbers(kind, rng)]


def _transpose_blocks(kind, rng):
    (m, n), data = kind.shape, codes(rng, kind.shape, kind.form, hard=kind.hard)
    scales = np.exp2(rng.integers(-4, 4, (m, *_blocks.count(_MX, m, n)[1:]))).astype(
        kind.turn((_blocks.E8M0, _F32))
    )
    return lambda data, scales: ops.transpose_blocks(data, scales, block=_MX), [
        data,
        scales,
    ]


def _dequantize(kind, rng):
    arguments = (
        rng.integers(0, 256, kind.shape, np.uint8).view(kind.form.dtype),
        random_scale(rng),
    )
    return lambda data, scale_inv: ops.dequantize(
        data, scale_inv, kind.dtype
    ), arguments


def _decode_moment(kind, rng):
    m, n = kind.shape
    data = codes(rng, kind.shape, E4M3, hard=kind.hard)
    blocks = m, *_blocks.count((1, ops.MOMENT_BLOCK), m, n)[1:]
    arguments = data, factors(rng, blocks), rng.integers(-1, 2, blocks).astype(np.int8)
    return lambda *moment: (ops.decode_moment(*moment, axis=1),), arguments


def _encode_moment(kind, rng):
    squared, (_, (data, amax, exponent)) = (
        kind.turn((False, True)),
        _decode_moment(kind, rng),
    )
    after, keys = (
        numbers(rng, kind.shape, _F32, hard=kind.hard),
        rng.integers(0, 2**32, amax.shape, np.uint32),
    )
    # The first row of the moment does not change.
    data[:1], after[:1] = 0, 0

    def function(*operands):
        operands = (*operands[:4], operands[4] if squared else None)
        return ops.encode_moment(*operands, squared=squared, axis=1)

    return function, (data, amax, exponent, after, keys)


def _adam_update(kind, rng):
    # Two leaves in one call, with or without parameters.
    applies, leaves = kind.turn((False, True)), []
    for _ in range(2):
        (_, mu), (_, (data, *scales)) = (
            _decode_moment(kind, rng),
            _decode_moment(kind, rng),
        )
        squares = data.view(np.uint8) & 0x7F
        grads, params = (
            numbers(rng, kind.shape, _F32, hard=kind.hard) for _ in range(2)
        )
        keys = rng.integers(0, 2**32, (2, *mu[1].shape), np.uint32)
        hyper = np.float32(
            [0.9, 0.1, 0.99, 0.01, 1.6, 9.0, 1e-12, 1e-8, 1e-3, 0.1, 0.5]
        )
        nu = squares.view(data.dtype), *scales
        leaves.append(
            ops.AdamLeaf(grads, params if applies else None, mu, nu, keys, hyper)
        )

    arguments, treedef = jax.tree.flatten(leaves)

    def function(*arguments):
        stepped = ops.adam_update(treedef.unflatten(arguments), [1, 1])
        return [out for out, *_ in stepped] + [
            x for _, *moments in stepped for x in jax.tree.leaves(moments)
        ]

    return function, arguments


def _amax_to_scale(kind, rng):
    function = jax.vmap(
        lambda amax, scale_inv: ops.amax_to_scale(
            amax, scale_inv, fp8_max=kind.form.max
        )
    )
    return function, [_history(kind, rng), _history(kind, rng)]


def _delayed_scales(kind, rng):
    def function(history, scale_inv):
        options = {
            "fp8_max": [kind.form.max] * 2,
            "algo": kind.turn(("max", "most_recent")),
        }
        return ops.delayed_scales([history, history[:1]], [scale_inv] * 2, **options)

    return function, [_history(kind, rng), factors(rng, 1)]


def _read_histories(kind, rng):
    def function(history, scale):
        return ops.read_histories(
            [[(history, scale), (history[:1], scale)]], fp8_max=[[kind.form.max, 448.0]]
        )

    return function, [_history(kind, rng), factors(rng, 1)]


def _write_histories(kind, rng):
    def function(history, recorded):
        pairs = [(history, history[:1]), (history[:1], history[:1])]
        numbers = [(recorded[:1], recorded[1:2]), (recorded[2:3], recorded[3:4])]
        return ops.write_histories([pairs], [kind.turn((recorded, numbers))])

    return function, [_history(kind, rng), factors(rng, 12)]


def _split_reading(kind, rng):
    return ops.split_reading, [factors(rng, 6 * kind.turn((1, 3)))]


def _join_recorded(kind, rng):
    count = kind.turn((1, 3))
    return lambda *numbers: ops.join_recorded([numbers] * count), [
        _history(kind, rng)[:1],
        factors(rng, 1),
    ]


def _undo_factors(kind, rng):
    history, factor = np.abs(_history(kind, rng)), np.float32(kind.turn((1, 2, 0.75)))
    after = np.roll(history, -1) * factor
    return ops.undo_factors, [history, np.ones(1, _F32), after, np.ones(1, _F32)]


def _scaled_matmul(kind, rng):
    m, n, k = kind.shape
    bias, accumulator = (
        numbers(rng, shape, _F32, octaves=1) for shape in ((n,), (m, n))
    )
    # Add one summand at a time: with both a bias and an accumulator the kernel itself
    # adds neither.
    summands = kind.turn(
        ({}, {"bias": bias.astype(kind.dtype)}, {"accumulator": accumulator})
    )

    def function(a, b, a_scale, b_scale, *added):
        options = dict(zip(summands, added, strict=True)) | {
            "precise": kind.turn((False, True))
        }
        return ops.scaled_matmul(
            a, b, a_scale, b_scale, out_dtype=kind.dtype, **options
        )

    def terms(a, b, a_scale, b_scale, *added):
        added = [_wide(x[..., None, :] if "bias" in summands else x) for x in added]
        return [(_wide(a, a_scale[..., None]), _wide(b, b_scale[..., None]))], added

    return (
        function,
        [
            *_operands(kind, rng, (m, k), (n, k)),
            *_scales(kind, rng, 1, 1),
            *summands.values(),
        ],
        terms,
    )


def _block_scaled_matmul(kind, rng):
    (m, n, k), blocks = kind.shape, kind.turn(_MULTIPLIED_BLOCKS)
    scales = _scales(
        kind,
        rng,
        *(
            _blocks.count(block, size, k)
            for block, size in zip(blocks, (m, n), strict=True)
        ),
    )
    # MX scales are powers of two. Round them here, so that the exact product has the
    # same scales.
    if blocks[0] == _MX:
        scales = [
            np.exp2(np.round(np.log2(scale))).astype(_blocks.E8M0) for scale in scales
        ]

    def function(a, b, *scales):
        a_block, b_block = blocks
        return ops.block_scaled_matmul(
            a, b, *scales, a_block=a_block, b_block=b_block, out_dtype=kind.dtype
        )

    def terms(a, b, *scales):
        sides = []
        for codes, scale, block in zip((a, b), scales, blocks, strict=True):
            # Blocks at the edges are smaller: repeat scales for whole blocks, and cut
            # off the part outside the matrix.
            rows, cols = _blocks.shape(block, *codes.shape[-2:])
            spread = _wide(scale).repeat(rows, -2).repeat(cols, -1)
            sides.append(
                _wide(codes, spread[..., : codes.shape[-2], : codes.shape[-1]])
            )
        return [sides], []

    return function, [*_operands(kind, rng, (m, k), (n, k)), *scales], terms


def _ragged_matmul(kind, rng):
    (m, n, k), ragged = kind.shape, kind.turn(("rows", "contraction"))
    # The second group is empty, like the group of an expert without tokens.
    is_rows, ends = ragged == "rows", [0, m // 3, m // 3, m]

    def function(a, b, a_scale, b_scale, sizes):
        out = ops.ragged_matmul(
            a, b, a_scale, b_scale, sizes, ragged=ragged, out_dtype=kind.dtype
        )
        return out.reshape(-1, n)

    def terms(a, b, a_scale, b_scale, sizes):
        a, b = (
            _wide(a, a_scale[..., None]),
            _wide(b, b_scale[..., None, None] if is_rows else b_scale[..., None]),
        )
        return [
            (a[..., i:j, :], b[..., group, :, :])
            if is_rows
            else (a[..., i:j], b[..., i:j])
            for group, (i, j) in enumerate(itertools.pairwise(ends))
        ], []

    operands = _operands(
        kind, rng, *(((m, k), (3, n, k)) if is_rows else ((k, m), (n, m)))
    )
    return (
        function,
        [*operands, *_scales(kind, rng, 1, 1), np.diff(ends).astype(np.int32)],
        terms,
    )


def _numbers(kind, rng):
    return numbers(rng, kind.shape, kind.dtype, hard=kind.hard)


def _history(kind, rng):
    return numbers(rng, kind.shape[-1], _F32, hard=kind.hard)


def _operands(kind, rng, *shapes):
    """Return codes of a and b; b is in E4M3, because no tensor core multiplies E5M2 by
    E5M2.
    """
    forms = kind.form, E4M3
    return [
        codes(rng, shape, form, hard=kind.hard)
        for shape, form in zip(shapes, forms, strict=True)
    ]


def _scales(kind, rng, *shapes):
    """Return scales that make the terms of a product about 1."""
    tops = kind.form.max, E4M3.max
    return [
        factors(rng, shape, 1) * _F32.type(16 / top)
        for shape, top in zip(shapes, tops, strict=True)
    ]


def _wide(x, factor=1.0):
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64) * factor


# The call of each op, by the name of its custom call.
_FUNCTIONS = (
    *(_amax, _amax_to_scale, _delayed_scales, _read_histories, _write_histories),
    *(
        _quantize,
        _quantize_transpose,
        _quantize_activation,
        _quantize_activation_grad,
        _quantize_norm,
    ),
    *(_quantize_blocks_transpose, _transpose_blocks, _dequantize),
    *(_adam_update, _decode_moment, _encode_moment),
    *(_join_recorded, _split_reading, _undo_factors),
    *(_scaled_matmul, _block_scaled_matmul, _ragged_matmul),
)
OPS = {function.__name__.removeprefix("_"): function for function in _FUNCTIONS}
PRODUCTS = ("scaled_matmul", "block_scaled_matmul", "ragged_matmul")
