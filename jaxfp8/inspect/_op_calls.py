"""A call of each op in the variants of its options, on numbers of many octaves, with
NaN and infinities among them.
"""

import functools
import math
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
_QUARTERS = np.r_[-4:0, 1:5] / 4


class Kind(NamedTuple):
    """The variant of a call of an op, and the numbers of its arguments.

    Attributes:
        shape: `(*groups, m, n, k)`: matrices are `[m, n]`, products contract k; each
            group has operands of its own.
        dtype: the dtype of tensors to quantize, and of results in high precision.
        form: the format of codes.
        index: the number of the case, by which options of the op take turns.
        hard: whether NaN, infinities and subnormals are among the numbers.
        rng: what `call` draws the numbers from.
    """

    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(jnp.bfloat16)
    form: Format = E4M3
    index: int = 0
    hard: bool = False
    rng: Any = None

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of a matrix."""
        return self.shape[:2]

    def turn(self, options: tuple) -> Any:
        """Return the option whose turn `index` is."""
        return options[self.index % len(options)]


# The call of each op by the name of its custom call: a function `(kind, *operands)`,
# and for each operand, a tree of arrays, a function of a kind that draws it.
OPS = {}


def call(op: str, kind: Kind) -> tuple:
    """Return `(function, arguments)`, a new function that takes the leaves of the
    operands: JAX does not lower the same function twice.
    """
    *groups, m, n, k = kind.shape
    kind = kind._replace(shape=(m, n, k), rng=np.random.default_rng(kind.index))
    function, draws = OPS[op]
    drawn = []
    for _ in range(math.prod(groups)):
        drawn.append([draw(kind) for draw in draws])

    def stack(*arrays):
        return np.stack(arrays).reshape(*groups, *arrays[0].shape)

    arguments, tree = jax.tree.flatten(jax.tree.map(stack, *drawn))

    def run(*arguments):
        return function(kind, *tree.unflatten(arguments))

    for _ in groups:
        run = jax.vmap(run)
    return run, arguments


def _given(*draws):
    """Make a function the call of the op of its name."""

    def decorated(function):
        OPS[function.__name__] = function, draws
        return function

    return decorated


def _numbers(kind, shape, dtype=_F32, octaves: float = 1.0) -> np.ndarray:
    """Return normal numbers times powers of two."""
    values, spread = kind.rng.standard_normal((2, *shape), np.float32)
    return (values * 2.0 ** (octaves * spread)).astype(dtype)


def _hard_numbers(kind, shape, dtype=_F32) -> np.ndarray:
    """Return numbers of more octaves; with `hard` NaN, infinities, subnormals and large
    numbers are among them.
    """
    values = _numbers(kind, shape, octaves=4.0)
    if kind.hard:
        places = kind.rng.permutation(values.size)[: _HARD.size]
        values.flat[places] = _HARD[: values.size]
    with np.errstate(over="ignore", invalid="ignore"):  # float16
        return values.astype(dtype)


def _tensor(kind):
    return _hard_numbers(kind, kind.matrix, kind.dtype)


def _activation(kind):
    return _numbers(kind, kind.matrix, kind.dtype)


def _preactivation(kind):
    m, n = kind.matrix
    is_gated = ops.is_gated(kind.turn(_ACTIVATIONS))
    return _numbers(kind, (m, 2, n) if is_gated else (m, n), kind.dtype)


def _vector(kind):
    return _numbers(kind, kind.matrix[1:], kind.dtype)


def _history(kind):
    """Every other history is below zero, which makes scales NaN."""
    values = _hard_numbers(kind, kind.matrix[1:])
    return kind.turn((np.abs(values), values))


def _factors(kind, shape=1, octaves: float = 1.0) -> np.ndarray:
    """Return positive f32 numbers between `2**-octaves` and `2**octaves`."""
    return np.exp2(kind.rng.uniform(-octaves, octaves, shape)).astype(np.float32)


def _scale(kind):
    """Every other scale may be very large or small."""
    return _factors(kind, octaves=kind.turn((4, 126)))


def _any_codes(kind):
    return kind.rng.integers(0, 256, kind.matrix, np.uint8).view(kind.form.dtype)


def _moment(kind):
    values = 28 * _numbers(kind, kind.matrix)
    data = np.clip(values, -E4M3.max, E4M3.max).astype(E4M3.dtype)
    blocks = _blocks.count((1, ops.MOMENT_BLOCK), *kind.matrix)
    exponents = kind.rng.integers(-1, 2, blocks).astype(np.int8)
    return data, _factors(kind, blocks), exponents


def _quarters(kind, shape) -> np.ndarray:
    """Return numbers whose products have exact sums, in any order, in the 13 bits of a
    tensor core too: each wrong term shows. `hard` puts a NaN in. None is 0, because the
    sign of a sum of zeros is free.
    """
    values = kind.rng.choice(_QUARTERS, shape)
    if kind.hard:
        values.flat[values.size // 3] = np.nan
    return values


def _operands(kind, a, b, a_block=None, b_block=None) -> list[np.ndarray]:
    """Return codes of a and b in these shapes, of `_quarters`, and for each the scales
    of blocks, or with None the one scale.

    b is in E4M3, because no tensor core multiplies E5M2 by E5M2.
    """
    codes, scales = [], []
    for shape, form, block in ((a, kind.form, a_block), (b, E4M3, b_block)):
        count = (*shape[:-2], *_blocks.count(block, *shape[-2:])) if block else 1
        scale = np.exp2(kind.rng.integers(0, 2, count))
        codes.append(_quarters(kind, shape).astype(form.dtype))
        scales.append(scale.astype(_blocks.E8M0 if block == _MX else _F32))
    return [*codes, *scales]


@_given(_tensor)
def amax(kind, x):
    return ops.amax(x)


@_given(_history, _history)
def amax_to_scale(kind, *histories):
    function = functools.partial(ops.amax_to_scale, fp8_max=kind.form.max)
    return jax.vmap(function)(*histories)


@_given(_history, _factors)
def delayed_scales(kind, history, scale_inv):
    return ops.delayed_scales(
        [history, history[:1]],
        [scale_inv] * 2,
        fp8_max=[kind.form.max] * 2,
        algo=kind.turn(("max", "most_recent")),
    )


@_given(_history, _factors)
def read_histories(kind, history, scale):
    product = [(history, scale), (history[:1], scale)]
    return ops.read_histories([product], fp8_max=[[kind.form.max, 448.0]])


@_given(_history, _factors)
def read_rows(kind, history, scale):
    pair = jnp.stack([history] * 2), jnp.stack([scale] * 2)
    return ops.read_rows([pair], fp8_max=[kind.form.max])


@_given(_history, lambda kind: _factors(kind, 12))
def write_histories(kind, history, recorded):
    product = [(history, history[:1]), (history[:1], history[:1])]
    numbers = [jnp.split(pair, 2) for pair in jnp.split(recorded[:4], 2)]
    if kind.turn((True, False)):
        return ops.write_histories([product], [recorded])
    return [ops.write_quantizers(product, numbers)]


@_given(_history, lambda kind: _factors(kind, 4))
def write_rows(kind, history, recorded):
    pair = jnp.stack([history] * 2), jnp.ones((2, 1))
    rows = [jnp.pad(x, (0, 4)) for x in jnp.split(recorded, 2)]
    return ops.write_rows([pair], rows)


@_given(_tensor, _scale, _factors)
def quantize(kind, x, scale, amax, op=ops.quantize):
    # The amax starts from 0, is raised from a given amax, or is no result: the custom
    # call has a form for each.
    amax, with_amax = kind.turn(((None, True), (amax, True), (None, False)))
    return op(x, scale, kind.form.dtype, amax=amax, with_amax=with_amax)


@_given(_tensor, _scale, _factors)
def quantize_transpose(kind, *operands):
    return quantize(kind, *operands, op=ops.quantize_transpose)


@_given(_preactivation, _factors)
def quantize_activation(kind, *operands, op=ops.quantize_activation):
    activation = kind.turn(_ACTIVATIONS)
    return op(*operands, kind.form.dtype, activation=activation)


@_given(_preactivation, _activation, _factors)
def quantize_activation_grad(kind, *operands):
    return quantize_activation(kind, *operands, op=ops.quantize_activation_grad)


@_given(_activation, _vector, _vector, _factors)
def quantize_norm(kind, x, gamma, beta, scale):
    name, beta = kind.turn((("rms", None), ("layer", beta)))
    return ops.quantize_norm(
        x, gamma, beta, scale, kind.form.dtype, kind=name, epsilon=1e-6
    )


@_given(_tensor, _tensor, _scale)
def quantize_pair(kind, *operands):
    return ops.quantize_pair(*operands, kind.form.dtype)


@_given(_tensor)
def quantize_blocks_transpose(kind, x):
    op = kind.turn((ops.quantize_blocks_transpose, ops.quantize_blocks))
    return op(x, dtype=kind.form.dtype, **kind.turn(_QUANTIZED_BLOCKS))


@_given(_any_codes, _scale)
def dequantize(kind, codes, scale):
    return ops.dequantize(codes, scale, dtype=kind.dtype)


def _adam_leaf(kind):
    data, *scales = _moment(kind)
    nu = np.abs(data), *scales
    grads, params = _hard_numbers(kind, kind.matrix), _hard_numbers(kind, kind.matrix)
    keys = kind.rng.integers(0, 2**32, (2, *scales[0].shape), np.uint32)
    hyper = np.float32([0.9, 0.1, 0.99, 0.01, 1.6, 9.0, 1e-12, 1e-8, 1e-3, 0.1, 0.5])
    params = kind.turn((None, params))
    return ops.AdamLeaf(grads, params, _moment(kind), nu, keys, hyper)


# Two leaves in one call, with or without parameters.
@_given(_adam_leaf, _adam_leaf)
def adam_update(kind, *leaves):
    return ops.adam_update(leaves, [1, 1])


@_given(_moment)
def decode_moment(kind, moment):
    return ops.decode_moment(*moment, axis=1)


def _next_moment(kind):
    data, *scales = _moment(kind)
    after = _hard_numbers(kind, kind.matrix)
    # The first row of the moment does not change.
    data[:1] = after[:1] = 0
    keys = kind.rng.integers(0, 2**32, scales[0].shape, np.uint32)
    return data, *scales, after, kind.turn((None, keys))


@_given(_next_moment)
def encode_moment(kind, arrays):
    return ops.encode_moment(*arrays, squared=kind.turn((False, True)), axis=1)


@_given(_history, _factors)
def join_recorded(kind, history, scale_inv):
    return ops.join_recorded([(history[:1], scale_inv)] * kind.turn((1, 3)))


@_given(lambda kind: _factors(kind, 6 * kind.turn((1, 3))))
def split_reading(kind, reading):
    return ops.split_reading(reading)


def _factored_state(kind):
    history, scale = np.abs(_history(kind)), np.ones(1, _F32)
    after = np.roll(history, -1) * np.float32(kind.turn((1, 2, 0.75)))
    return history, scale, after, scale


@_given(_factored_state)
def undo_factors(kind, state):
    return ops.undo_factors(*state)


def _matrices(kind, blocks=()):
    m, n, k = kind.shape
    return _operands(kind, (m, k), (n, k), *blocks)


def _bias(kind):
    return _quarters(kind, kind.shape[1]).astype(kind.dtype)


@_given(_matrices, _bias)
def scaled_matmul(kind, operands, bias):
    return ops.scaled_matmul(
        *operands,
        bias=kind.turn((None, bias)),
        out_dtype=kind.dtype,
        precise=kind.turn((False, True)),
    )


@_given(lambda kind: _matrices(kind, kind.turn(_MULTIPLIED_BLOCKS)))
def block_scaled_matmul(kind, operands):
    a_block, b_block = kind.turn(_MULTIPLIED_BLOCKS)
    return ops.block_scaled_matmul(
        *operands, a_block=a_block, b_block=b_block, out_dtype=kind.dtype
    )


def _ragged_operands(kind):
    m, n, k = kind.shape
    ragged, *blocks = kind.turn(_RAGGED)
    shapes = ((m, k), (3, n, k)) if ragged == "rows" else ((k, m), (n, m))
    # The second group is empty, like the group of an expert without tokens.
    return *_operands(kind, *shapes, *blocks), np.int32([m // 3, 0, m - m // 3])


@_given(_ragged_operands)
def ragged_matmul(kind, operands):
    ragged, a_block, b_block = kind.turn(_RAGGED)
    return ops.ragged_matmul(
        *operands,
        ragged=ragged,
        a_block=a_block,
        b_block=b_block,
        out_dtype=kind.dtype,
    )


@_given(_any_codes)
def transpose_codes(kind, codes):
    return ops.transpose_codes(codes)
