"""A call of each op in the variants of its options, on numbers of many octaves, with
NaN and infinities among them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..numerics import E4M3, Format
from ..ops import _blocks

_F32 = np.dtype(np.float32)
_ROW, _MX, _TILE, _SQUARE = (1, None), (1, 32), (1, 128), (128, 128)
_QUANTIZED_BLOCKS = (
    {"block": _TILE},
    {"block": _SQUARE, "power_2_scale": True},
    {"block": _MX, "scale": "e8m0"},
    {"block": _ROW},
    {"block": _MX, "scale": "e8m0", "rounding": "floor"},
)
_MULTIPLIED_BLOCKS = (
    (_TILE, _TILE),
    (_TILE, _SQUARE),
    (_MX, _MX),
    (_ROW, _ROW),
    (_SQUARE, _TILE),
)
# What the groups of a ragged product cut, and the blocks of its operands.
_RAGGED = (
    ("rows", None, None),
    ("contraction", None, None),
    ("rows", _TILE, _SQUARE),
    ("contraction", _TILE, _TILE),
)
_ACTIVATIONS = *ops.ACTIVATIONS, ops.ClampedSwiGLU(2.0, alpha=1.702, offset=1.0)
_HARD = np.float32(
    "inf -inf nan 0 -0 1e-45 -1e-45 1.1754944e-38 -3e38 6e4 448 0.0009765625".split()
)
_QUARTERS = np.float32([-1, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1])
# Larger arrays repeat this many numbers; it is a prime, so that no two tiles are alike.
_PERIOD = 999_983


class Kind(NamedTuple):
    """The variant of a call of an op, and the numbers of its arguments.

    Attributes:
        shape: `(m, n)`, or `(m, n, k)` of a product.
        dtype: the dtype of tensors to quantize, and of results in high precision.
        form: the format of codes.
        index: the number of the case, by which options of the op take turns.
        hard: whether NaN, infinities and subnormals are among the numbers.
        rng: what `call` draws the numbers from.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    form: Format
    index: int = 0
    hard: bool = False
    rng: Any = None

    def turn(self, options: tuple) -> Any:
        """Return the option whose turn `index` is."""
        return options[self.index % len(options)]

    def numbers(self, shape, dtype, octaves: float = 1.0) -> np.ndarray:
        """Return normal numbers times powers of two."""
        count = min(int(np.prod(shape)), _PERIOD)
        values, spread = self.rng.standard_normal((2, count))
        values = np.float32(values * 2.0 ** (octaves * spread))
        return np.resize(values, shape).astype(dtype)

    def hard_numbers(self, shape, dtype) -> np.ndarray:
        """Return numbers of more octaves; with `hard` NaN, infinities, subnormals and
        large numbers are among them.
        """
        values = self.numbers(shape, _F32, 4.0)
        if self.hard:
            places = self.rng.permutation(values.size)[: _HARD.size]
            values.flat[places] = _HARD[: values.size]
        with np.errstate(over="ignore", invalid="ignore"):  # float16
            return values.astype(dtype)

    def tensor(self) -> np.ndarray:
        """Return a tensor to quantize."""
        return self.hard_numbers(self.shape, self.dtype)

    def history(self) -> np.ndarray:
        """Return a history; every other one is below zero, which makes scales NaN."""
        values = self.hard_numbers(self.shape[-1], _F32)
        return self.turn((np.abs(values), values))

    def factors(self, shape, octaves: float = 4.0) -> np.ndarray:
        """Return positive f32 numbers between `2**-octaves` and `2**octaves`."""
        return np.exp2(self.rng.uniform(-octaves, octaves, shape)).astype(np.float32)

    def scale(self) -> np.ndarray:
        """Return a scale f32[1]; every other one may be very large or small."""
        return self.factors(1, self.turn((4, 126)))

    def any_codes(self) -> np.ndarray:
        """Return FP8 codes of any bits."""
        bits = self.rng.integers(0, 256, self.shape, np.uint8)
        return bits.view(self.form.dtype)

    def quarters(self, shape) -> np.ndarray:
        """Return numbers whose products have exact sums, in any order, in the 13 bits
        of a tensor core too: each wrong term shows. `hard` puts a NaN in. None is 0,
        because the sign of a sum of zeros is free.
        """
        values = self.rng.choice(_QUARTERS, shape)
        if self.hard:
            values.flat[values.size // 3] = np.nan
        return values

    def operands(self, a, b, a_block=None, b_block=None) -> list[np.ndarray]:
        """Return codes of a and b in these shapes, of `quarters`, and for each the
        scales of blocks, or with None the one scale.

        b is in E4M3, because no tensor core multiplies E5M2 by E5M2.
        """
        codes, scales = [], []
        for shape, form, block in ((a, self.form, a_block), (b, E4M3, b_block)):
            count = (*shape[:-2], *_blocks.count(block, *shape[-2:])) if block else 1
            scale = np.exp2(self.rng.integers(0, 2, count))
            codes.append(self.quarters(shape).astype(form.dtype))
            scales.append(scale.astype(_blocks.E8M0 if block == _MX else _F32))
        return [*codes, *scales]


def call(op: str, kind: Kind, group: int = 0) -> tuple:
    """Return `(function, arguments)`."""
    return OPS[op](kind._replace(rng=np.random.default_rng([kind.index, group])))


def _call(op, *arrays, **options) -> tuple:
    return functools.partial(op, **options), list(arrays)


def _amax(kind):
    return _call(ops.amax, kind.tensor())


def _quantize(kind, op=ops.quantize):
    def function(x, scale, amax):
        # The amax starts from 0, is raised from a given amax, or is no result: the
        # custom call has a form for each.
        amax, with_amax = kind.turn(((None, True), (amax, True), (None, False)))
        return op(x, scale, kind.form.dtype, amax=amax, with_amax=with_amax)

    return function, [kind.tensor(), kind.scale(), kind.factors(1)]


def _quantize_transpose(kind):
    return _quantize(kind, ops.quantize_transpose)


def _quantize_activation(kind, op=ops.quantize_activation):
    name = kind.turn(_ACTIVATIONS)
    m, n = kind.shape
    x = kind.numbers((m, 2, n) if ops.is_gated(name) else (m, n), kind.dtype)
    scale = kind.factors(1, 1)
    return _call(op, x, scale, dtype=kind.form.dtype, activation=name)


def _quantize_activation_grad(kind):
    function, (x, scale) = _quantize_activation(kind, ops.quantize_activation_grad)
    return function, [x, kind.numbers(kind.shape, kind.dtype), scale]


def _quantize_norm(kind):
    def function(x, gamma, beta, scale):
        name, beta = kind.turn((("rms", None), ("layer", beta)))
        return ops.quantize_norm(
            x, gamma, beta, scale, kind.form.dtype, kind=name, epsilon=1e-6
        )

    shapes = kind.shape, kind.shape[1], kind.shape[1]
    operands = [kind.numbers(shape, kind.dtype) for shape in shapes]
    return function, [*operands, kind.factors(1, 1)]


def _quantize_pair(kind):
    arrays = kind.tensor(), kind.tensor(), kind.scale()
    return _call(ops.quantize_pair, *arrays, dtype=kind.form.dtype)


def _quantize_blocks_transpose(kind):
    op = kind.turn((ops.quantize_blocks_transpose, ops.quantize_blocks))
    options = kind.turn(_QUANTIZED_BLOCKS)
    return _call(op, kind.tensor(), dtype=kind.form.dtype, **options)


def _transpose_codes(kind):
    return _call(ops.transpose_codes, kind.any_codes())


def _dequantize(kind):
    return _call(ops.dequantize, kind.any_codes(), kind.scale(), dtype=kind.dtype)


def _decode_moment(kind):
    values = kind.numbers(kind.shape, _F32) * np.float32(E4M3.max / 16)
    data = np.clip(values, -E4M3.max, E4M3.max).astype(E4M3.dtype)
    blocks = _blocks.count((1, ops.MOMENT_BLOCK), *kind.shape)
    exponents = kind.rng.integers(-1, 2, blocks).astype(np.int8)
    return _call(ops.decode_moment, data, kind.factors(blocks), exponents, axis=1)


def _encode_moment(kind):
    _, moment = _decode_moment(kind)
    after = kind.hard_numbers(kind.shape, _F32)
    # The first row of the moment does not change.
    moment[0][:1] = after[:1] = 0
    values = *moment, after
    if kind.turn((True, False)):
        return _call(ops.encode_moment, *values, keys=None, squared=False, axis=1)
    keys = kind.rng.integers(0, 2**32, moment[1].shape, np.uint32)
    return _call(ops.encode_moment, *values, keys, squared=True, axis=1)


def _adam_update(kind):
    # Two leaves in one call, with or without parameters.
    applies = kind.turn((False, True))
    hyper = np.float32([0.9, 0.1, 0.99, 0.01, 1.6, 9.0, 1e-12, 1e-8, 1e-3, 0.1, 0.5])
    leaves = []
    for _ in range(2):
        _, mu = _decode_moment(kind)
        _, (data, *scales) = _decode_moment(kind)
        nu = np.abs(data), *scales
        grads = kind.hard_numbers(kind.shape, _F32)
        params = kind.hard_numbers(kind.shape, _F32) if applies else None
        keys = kind.rng.integers(0, 2**32, (2, *mu[1].shape), np.uint32)
        leaves.append(ops.AdamLeaf(grads, params, mu, nu, keys, hyper))
    arguments, treedef = jax.tree.flatten(leaves)

    def function(*arguments):
        return ops.adam_update(treedef.unflatten(arguments), [1, 1])

    return function, arguments


def _amax_to_scale(kind):
    histories = kind.history(), kind.history()
    function, arrays = _call(ops.amax_to_scale, *histories, fp8_max=kind.form.max)
    return jax.vmap(function), arrays


def _of_state(count: int):
    """Return a decorator for a function `(kind, history, factors)`, which calls an op
    with a history and so many factors.
    """

    def decorated(function):
        @functools.wraps(function)
        def call(kind):
            arguments = [kind.history(), kind.factors(count)]
            return functools.partial(function, kind), arguments

        return call

    return decorated


@_of_state(1)
def _delayed_scales(kind, history, scale_inv):
    return ops.delayed_scales(
        [history, history[:1]],
        [scale_inv] * 2,
        fp8_max=[kind.form.max] * 2,
        algo=kind.turn(("max", "most_recent")),
    )


@_of_state(1)
def _read_histories(kind, history, scale):
    product = [(history, scale), (history[:1], scale)]
    return ops.read_histories([product], fp8_max=[[kind.form.max, 448.0]])


@_of_state(12)
def _write_histories(kind, history, recorded):
    product = [(history, history[:1]), (history[:1], history[:1])]
    numbers = [(recorded[:1], recorded[1:2]), (recorded[2:3], recorded[3:4])]
    if kind.turn((True, False)):
        return ops.write_histories([product], [recorded])
    return [ops.write_quantizers(product, numbers)]


@_of_state(1)
def _read_rows(kind, history, scale):
    pair = jnp.stack([history] * 2), jnp.stack([scale] * 2)
    return ops.read_rows([pair], fp8_max=[kind.form.max])


@_of_state(4)
def _write_rows(kind, history, recorded):
    pair = jnp.stack([history] * 2), jnp.ones((2, 1))
    rows = [jnp.pad(x, (0, 4)) for x in jnp.split(recorded, 2)]
    return ops.write_rows([pair], rows)


def _split_reading(kind):
    return _call(ops.split_reading, kind.factors(6 * kind.turn((1, 3))))


def _join_recorded(kind):
    count = kind.turn((1, 3))
    arguments = [kind.history()[:1], kind.factors(1)]
    return lambda *numbers: ops.join_recorded([numbers] * count), arguments


def _undo_factors(kind):
    history = np.abs(kind.history())
    after = np.roll(history, -1) * np.float32(kind.turn((1, 2, 0.75)))
    scale = np.ones(1, _F32)
    return _call(ops.undo_factors, history, scale, after, scale)


def _scaled_matmul(kind):
    m, n, k = kind.shape

    def function(a, b, a_scale_inv, b_scale_inv, bias):
        return ops.scaled_matmul(
            a,
            b,
            a_scale_inv,
            b_scale_inv,
            bias=kind.turn((None, bias)),
            out_dtype=kind.dtype,
            precise=kind.turn((False, True)),
        )

    bias = kind.quarters(n).astype(kind.dtype)
    return function, [*kind.operands((m, k), (n, k)), bias]


def _block_scaled_matmul(kind):
    m, n, k = kind.shape
    blocks = kind.turn(_MULTIPLIED_BLOCKS)
    return _product(ops.block_scaled_matmul, kind, (m, k), (n, k), blocks)


def _ragged_matmul(kind):
    m, n, k = kind.shape
    ragged, *blocks = kind.turn(_RAGGED)
    shapes = ((m, k), (3, n, k)) if ragged == "rows" else ((k, m), (n, m))
    function, arrays = _product(ops.ragged_matmul, kind, *shapes, blocks, ragged=ragged)
    # The second group is empty, like the group of an expert without tokens.
    return function, [*arrays, np.int32([m // 3, 0, m - m // 3])]


def _product(op, kind, a, b, blocks, **options):
    a_block, b_block = blocks
    options |= {"a_block": a_block, "b_block": b_block, "out_dtype": kind.dtype}
    return _call(op, *kind.operands(a, b, *blocks), **options)


# The call of each op, by the name of its custom call.
_FUNCTIONS = (
    _amax,
    _amax_to_scale,
    _delayed_scales,
    _read_histories,
    _read_rows,
    _write_histories,
    _write_rows,
    _quantize,
    _quantize_transpose,
    _quantize_activation,
    _quantize_activation_grad,
    _quantize_norm,
    _quantize_pair,
    _quantize_blocks_transpose,
    _transpose_codes,
    _dequantize,
    _adam_update,
    _decode_moment,
    _encode_moment,
    _join_recorded,
    _split_reading,
    _undo_factors,
    _scaled_matmul,
    _block_scaled_matmul,
    _ragged_matmul,
)
OPS = {function.__name__.removeprefix("_"): function for function in _FUNCTIONS}
PRODUCTS = ("scaled_matmul", "block_scaled_matmul", "ragged_matmul")
