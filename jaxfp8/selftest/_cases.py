"""The cases of ops: each op at several shapes, dtypes and formats."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..numerics import E4M3, E5M2, Format
from ..ops import _blocks, _moments
from . import _comparisons, _values

_F32 = np.dtype(np.float32)
_PAIRS = tuple(itertools.product((np.dtype(jnp.bfloat16), np.dtype(np.float16), _F32), (E4M3, E5M2)))
# The shapes are tiny, odd, empty, aligned, in groups by vmap, or of many tiles. Their number, 7, is prime to that of
# _PAIRS, 6, so that every shape meets every pair.
_MATRICES = ((1, 1), (7, 129), (217, 41), (0, 5), (256, 512), (3, 33, 65), (2048, 4096))
_PRODUCTS = ((1, 1, 1), (7, 5, 33), (48, 80, 112), (0, 5, 16), (256, 384, 512), (3, 33, 17, 65), (512, 512, 1024))
_ROW, _MX, _TILE, _SQUARE = (1, None), (1, 32), (1, 128), (128, 128)
_QUANTIZED_BLOCKS = (
    *({"block": _TILE}, {"block": _SQUARE, "power_2_scale": True}, {"block": _MX, "scale": "e8m0"}),
    *({"block": _ROW}, {"block": _MX, "scale": "e8m0", "rounding": "floor"}),
)
_MULTIPLIED_BLOCKS = ((_TILE, _TILE), (_TILE, _SQUARE), (_MX, _MX), (_ROW, _ROW), (_SQUARE, _TILE))
MOST_OPTIONS = 5  # the largest number of options that an op has


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


class Case(NamedTuple):
    """A call of an op.

    Attributes:
        name: the name of the case, for people.
        function: the function to call.
        arguments: its arguments, numpy arrays, for all groups.
        comparison: a function of whether tensor cores multiply, which returns the Comparison.
    """

    name: str
    function: Callable
    arguments: tuple
    comparison: Callable[[bool], _comparisons.Comparison]

    def on_tpu(self) -> "Case":
        """Return the case with arguments that a TPU reads as they are."""
        return self._replace(arguments=tuple(map(_values.on_tpu, self.arguments)))


def cases(op: str, quick: bool = False) -> Iterator[Case]:
    """Yield the cases of an op, which take shapes, and pairs of dtype and format, in turn; with `quick` five fewer."""
    shapes = _PRODUCTS if op in PRODUCTS else _MATRICES
    count = len(shapes) + (0 if quick else 5)
    turns = zip(itertools.cycle(shapes), itertools.cycle(_PAIRS), range(count), strict=False)
    for shape, pair, index in turns:
        yield case(op, Kind(shape, *pair, index, hard=100 < np.prod(shape) < 10**5))


def call(op: str, kind: Kind, group: int = 0) -> tuple:
    """Return `(function, arguments)`, and for a product `terms`: `_comparisons.product(*terms(*arguments), ...)`."""
    return OPS[op](kind, np.random.default_rng([kind.index, group]))


def case(op: str, kind: Kind) -> Case:
    """Return one case; an additional leading dimension counts groups, each with arguments of its own."""
    rank = 3 if op in PRODUCTS else 2
    groups = kind.shape[:-rank]
    each = [call(op, kind._replace(shape=kind.shape[-rank:]), group) for group in range(*groups or (1,))]
    function, arguments, *terms = each[0]
    if groups:
        function, arguments = jax.vmap(function), tuple(map(np.stack, zip(*(parts[1] for parts in each), strict=True)))

    def comparison(tensor_cores):
        if terms:
            return _comparisons.product(*terms[0](*arguments), kind.dtype, tensor_cores)
        if op == "dequantize":
            return _comparisons.NUMBERS
        return _comparisons.CODES if op in COMPUTED else _comparisons.BITS

    name = f"{kind.dtype.name}[{','.join(map(str, kind.shape))}] {kind.form}, {kind.index}"
    return Case(name, function, tuple(arguments), comparison)


def _amax(kind, rng):
    return ops.amax, [_numbers(kind, rng)]


def _quantize(kind, rng, op=ops.quantize):
    # The amax starts from 0, is raised from a given amax, or is no result: the custom call has a form for each.
    options = kind.turn(({"amax": None}, {}, {"amax": None, "with_amax": False}))

    def function(x, scale, least):
        return op(x, scale, kind.form.dtype, **{"amax": least} | options)

    return function, (_numbers(kind, rng), _values.scale(rng), _values.factors(rng, 1))


def _quantize_transpose(kind, rng):
    return _quantize(kind, rng, ops.quantize_transpose)


def _quantize_activation(kind, rng):
    name = kind.turn(ops.ACTIVATIONS)
    shape = (kind.shape[0], 2, kind.shape[1]) if ops.is_gated(name) else kind.shape
    arguments = _values.numbers(rng, shape, kind.dtype, octaves=1), _values.factors(rng, 1, 1)
    return lambda x, scale: ops.quantize_activation(x, scale, kind.form.dtype, activation=name), arguments


def _quantize_activation_grad(kind, rng):
    name, grad = kind.turn(ops.ACTIVATIONS), _values.numbers(rng, kind.shape, kind.dtype, octaves=1)
    _, (x, scale) = _quantize_activation(kind, rng)

    def function(x, grad, scale):
        return ops.quantize_activation_grad(x, grad, scale, kind.form.dtype, activation=name)

    return function, (x, grad, scale)


def _quantize_norm(kind, rng):
    def function(x, gamma, beta, scale):
        options = kind.turn(({"beta": None, "kind": "rms"}, {"beta": beta, "kind": "layer"}))
        return ops.quantize_norm(x, gamma, scale=scale, dtype=kind.form.dtype, epsilon=1e-6, **options)

    shapes = kind.shape, kind.shape[1], kind.shape[1]
    x, gamma, beta = (_values.numbers(rng, shape, kind.dtype, octaves=1) for shape in shapes)
    return function, (x, gamma, beta, _values.factors(rng, 1, 1))


def _quantize_blocks_transpose(kind, rng):
    op, options = kind.turn((ops.quantize_blocks_transpose, ops.quantize_blocks)), kind.turn(_QUANTIZED_BLOCKS)
    return lambda x: op(x, kind.form.dtype, **options), [_numbers(kind, rng)]


def _transpose_blocks(kind, rng):
    (m, n), data = kind.shape, _values.codes(rng, kind.shape, kind.form, hard=kind.hard)
    scales = np.exp2(rng.integers(-4, 4, (m, *_blocks.count(_MX, m, n)[1:]))).astype(kind.turn((_blocks.E8M0, _F32)))
    return lambda data, scales: ops.transpose_blocks(data, scales, block=_MX), [data, scales]


def _dequantize(kind, rng):
    arguments = rng.integers(0, 256, kind.shape, np.uint8).view(kind.form.dtype), _values.scale(rng)
    return lambda data, scale_inv: ops.dequantize(data, scale_inv, kind.dtype), arguments


def _decode_moment(kind, rng):
    m, n = kind.shape
    data = _values.codes(rng, kind.shape, E4M3, hard=kind.hard)
    blocks = m, *_blocks.count((1, _moments.BLOCK), m, n)[1:]
    arguments = data, _values.factors(rng, blocks), rng.integers(-1, 2, blocks).astype(np.int8)
    return lambda *moment: (_moments.decode_moment(*moment, axis=1),), arguments


def _encode_moment(kind, rng):
    squared, (_, (data, amax, exponent)) = kind.turn((False, True)), _decode_moment(kind, rng)
    after, keys = _values.numbers(rng, kind.shape, _F32, hard=kind.hard), rng.integers(0, 2**32, amax.shape, np.uint32)
    # The first row of the moment does not change.
    data[:1], after[:1] = 0, 0

    def function(*operands):
        operands = (*operands[:4], operands[4] if squared else None)
        return _moments.encode_moment(*operands, squared=squared, axis=1)

    return function, (data, amax, exponent, after, keys)


def _amax_to_scale(kind, rng):
    function = jax.vmap(lambda amax, scale_inv: ops.amax_to_scale(amax, scale_inv, fp8_max=kind.form.max))
    return function, [_history(kind, rng), _history(kind, rng)]


def _delayed_scales(kind, rng):
    def function(history, scale_inv):
        options = {"fp8_max": [kind.form.max] * 2, "algo": kind.turn(("max", "most_recent"))}
        return ops.delayed_scales([history, history[:1]], [scale_inv] * 2, **options)

    return function, [_history(kind, rng), _values.factors(rng, 1)]


def _read_histories(kind, rng):
    function = lambda history, scale: ops.read_histories([[(history, scale), (history[:1], scale)]])  # noqa: E731
    return function, [_history(kind, rng), _values.factors(rng, 1)]


def _write_histories(kind, rng):
    def function(history, recorded):
        pairs = [(history, history[:1]), (history[:1], history[:1])]
        numbers = [(recorded[:1], recorded[1:2]), (recorded[2:3], recorded[3:4])]
        return ops.write_histories([pairs], [kind.turn((recorded, numbers))])

    return function, [_history(kind, rng), _values.factors(rng, 8)]


def _scaled_matmul(kind, rng):
    m, n, k = kind.shape
    bias, accumulator = (_values.numbers(rng, shape, _F32, octaves=1) for shape in ((n,), (m, n)))
    # Add one summand at a time: with both a bias and an accumulator the kernel itself adds neither.
    summands = kind.turn(({}, {"bias": bias.astype(kind.dtype)}, {"accumulator": accumulator}))

    def function(a, b, a_scale, b_scale, *added):
        options = dict(zip(summands, added, strict=True)) | {"precise": kind.turn((False, True))}
        return ops.scaled_matmul(a, b, a_scale, b_scale, out_dtype=kind.dtype, **options)

    def terms(a, b, a_scale, b_scale, *added):
        added = [_wide(x[..., None, :] if "bias" in summands else x) for x in added]
        return [(_wide(a, a_scale[..., None]), _wide(b, b_scale[..., None]))], added

    return function, [*_operands(kind, rng, (m, k), (n, k)), *_scales(kind, rng, 1, 1), *summands.values()], terms


def _block_scaled_matmul(kind, rng):
    (m, n, k), blocks = kind.shape, kind.turn(_MULTIPLIED_BLOCKS)
    scales = _scales(kind, rng, *(_blocks.count(block, size, k) for block, size in zip(blocks, (m, n), strict=True)))
    # MX scales are powers of two. Round them here, so that the exact product has the same scales.
    if blocks[0] == _MX:
        scales = [np.exp2(np.round(np.log2(scale))).astype(_blocks.E8M0) for scale in scales]

    def function(a, b, *scales):
        a_block, b_block = blocks
        return ops.block_scaled_matmul(a, b, *scales, a_block=a_block, b_block=b_block, out_dtype=kind.dtype)

    def terms(a, b, *scales):
        sides = []
        for codes, scale, block in zip((a, b), scales, blocks, strict=True):
            # Blocks at the edges are smaller: repeat scales for whole blocks, and cut off the part outside the matrix.
            rows, cols = _blocks.shape(block, *codes.shape[-2:])
            spread = _wide(scale).repeat(rows, -2).repeat(cols, -1)
            sides.append(_wide(codes, spread[..., : codes.shape[-2], : codes.shape[-1]]))
        return [sides], []

    return function, [*_operands(kind, rng, (m, k), (n, k)), *scales], terms


def _ragged_matmul(kind, rng):
    (m, n, k), ragged = kind.shape, kind.turn(("rows", "contraction"))
    # The second group is empty, like the group of an expert without tokens.
    is_rows, ends = ragged == "rows", [0, m // 3, m // 3, m]

    def function(a, b, a_scale, b_scale, sizes):
        out = ops.ragged_matmul(a, b, a_scale, b_scale, sizes, ragged=ragged, out_dtype=kind.dtype)
        return out.reshape(-1, n)

    def terms(a, b, a_scale, b_scale, sizes):
        a, b = _wide(a, a_scale[..., None]), _wide(b, b_scale[..., None, None] if is_rows else b_scale[..., None])
        return [
            (a[..., i:j, :], b[..., group, :, :]) if is_rows else (a[..., i:j], b[..., i:j])
            for group, (i, j) in enumerate(itertools.pairwise(ends))
        ], []

    operands = _operands(kind, rng, *(((m, k), (3, n, k)) if is_rows else ((k, m), (n, m))))
    return function, [*operands, *_scales(kind, rng, 1, 1), np.diff(ends).astype(np.int32)], terms


def _numbers(kind, rng):
    return _values.numbers(rng, kind.shape, kind.dtype, hard=kind.hard)


def _history(kind, rng):
    return _values.numbers(rng, kind.shape[-1], _F32, hard=kind.hard)


def _operands(kind, rng, *shapes):
    """Return codes of a and b; b is in E4M3, because no tensor core multiplies E5M2 by E5M2."""
    forms = kind.form, E4M3
    return [_values.codes(rng, shape, form, hard=kind.hard) for shape, form in zip(shapes, forms, strict=True)]


def _scales(kind, rng, *shapes):
    """Return scales that make the terms of a product about 1."""
    tops = kind.form.max, E4M3.max
    return [_values.factors(rng, shape, 1) * _F32.type(16 / top) for shape, top in zip(shapes, tops, strict=True)]


def _wide(x, factor=1.0):
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64) * factor


# The cases of each op, by the name of its custom call.
_FUNCTIONS = (
    *(_amax, _amax_to_scale, _delayed_scales, _read_histories, _write_histories),
    *(_quantize, _quantize_transpose, _quantize_activation, _quantize_activation_grad, _quantize_norm),
    *(_quantize_blocks_transpose, _transpose_blocks, _dequantize, _decode_moment, _encode_moment),
    *(_scaled_matmul, _block_scaled_matmul, _ragged_matmul),
)
OPS = {function.__name__.removeprefix("_"): function for function in _FUNCTIONS}
PRODUCTS = ("scaled_matmul", "block_scaled_matmul", "ragged_matmul")
# The ops that compute values themselves, with rounding errors of their own.
COMPUTED = ("quantize_activation", "quantize_activation_grad", "quantize_norm")
