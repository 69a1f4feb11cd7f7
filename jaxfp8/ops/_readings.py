"""read_histories and write_histories: the state of delayed scaling, read before a loop
over layers, and written; read_rows and write_rows: that of products which are not in a
loop, but rows of the same arrays; split_reading and join_recorded: the numbers of a
reading as arrays, and what a step records as one.

The state may be that of many layers. Of this state a step needs only a reading, six
numbers for each quantizer, and records as many. A product that is not in a loop reads
its state by `delayed_scales`, and writes it by the same `write_histories`.
"""

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import _scaling
from . import _ffi
from ._amax import MAX_QUANTIZERS, amaxes, history_names
from ._partition import WHOLE
from ._primitive import ONE, SLOTS, Op, OpOfCpus, OpOfUnits, dims, halves

READING_NUMBERS = 6  # of each quantizer, in a reading and in what a step records
# the names of the dimension of a product's reading, and of a pair of amaxes
_NUMBERS, _PAIR = ((), (f"{WHOLE}_number",)), ((), (f"{WHOLE}_pair",))


def read_histories(products, *, fp8_max):
    """Read the amax histories and the scales of products, each of k quantizers.

    For each quantizer the reading has six numbers: the newest entry of its history, the
    largest entry, the scale, a 0 that kernels raise in place, and the scale and
    scale_inv that `delayed_scales` gives for the largest entry. Entries that are not
    finite count as 0. Where an entry or the scale is below zero, which no training step
    makes, both amaxes of the reading are -1, and the results of `delayed_scales` NaN.

    Products with equal batch dimensions are read by one custom call, up to 64
    quantizers.

    Args:
        products: for each product k pairs of a history, f32 `[*batch, H]`, and a scale,
            f32 `[*batch, 1]`, which is the `scale_inv` of the last step. k is 1 to 64;
            the batch dimensions, k and H may differ; slot 0 of a history is the newest
            entry.
        fp8_max: for each product k numbers, the largest values of the FP8 formats.

    Returns:
        For each product f32 `[*batch, 6 * k]`.

    Raises:
        TypeError: the op is differentiated.
    """
    numerators = list(map(_numerators, fp8_max))

    def read(call, histories, scales):
        op = _ReadHistories(tuple(numerators[i] for i in call))
        return op(*histories, *scales)

    return _in_calls(products, read)


def _numerators(fp8_max):
    return tuple(_scaling.scale_numerator(value, 0) for value in fp8_max)


def write_histories(products, recorded):
    """Write the next amax histories and scales of products, from what a step recorded.

    Equivalent to, for each quantizer:

        history = jnp.where((history > 0) & (history < inf), history, 0)
        newest = jnp.where((amax > 0) & (amax < inf), amax, 0)
        next_history = jnp.roll(history, -1).at[0].set(newest)
        stayed = (history < 0) | ((history > 0) & (history < inf))
        staying = jnp.where(stayed, history, 0).at[0].set(amax)
        next_history = jnp.where(stays == 0, next_history, staying)
        next_history = jnp.where(scale_inv == 0, 0, next_history)
        next_scale = scale_inv

    Args:
        products: the same argument as for `read_histories`.
        recorded: for each product f32 `[*batch, 6 * k]`: for each quantizer the amax,
            the scale_inv, `stays` and three numbers that are not read. A scale_inv of 0
            marks a quantizer that was not used: its results are zeros. A step records a
            0 for `stays`; `update_state` sets it where a history has no new entry.

    Returns:
        For each product its k pairs of a history and a scale, in the shapes of the
        arguments.

    Raises:
        TypeError: the op is differentiated.
    """

    def write(call, histories, _):
        counts = tuple(len(products[i]) for i in call)
        op = _WriteHistories(counts, by_quantizer=False)
        written = op(*histories, *(recorded[i] for i in call))
        pairs = zip(*halves(written), strict=True)
        return [list(itertools.islice(pairs, count)) for count in counts]

    return _in_calls(products, write)


def write_quantizers(pairs, recorded):
    """Write the next histories and scales of k quantizers, whose amaxes and scales are
    arrays of their own.

    Args:
        pairs: k pairs, as of a product of `read_histories`.
        recorded: k pairs of an amax and a scale_inv, f32 `[*batch, 1]`; no row stays.

    Returns:
        k pairs of a history and a scale, as of `write_histories`.

    Raises:
        TypeError: the op is differentiated.
    """
    histories, _ = zip(*pairs, strict=True)
    op = _WriteHistories((1,) * len(histories), by_quantizer=True)
    written = op(*histories, *itertools.chain(*zip(*recorded, strict=True)))
    return list(zip(*halves(written), strict=True))


def _in_calls(products, run):
    """Return `run(call, histories, scales)` of all products, which are divided among
    custom calls; a call has the positions of its products.

    The products of one call have the same batch dimensions, so that a mesh can cut all
    of them alike.
    """
    of_shapes, results = {}, {}
    for i, pairs in enumerate(products):
        of_shapes.setdefault(pairs[0][1].shape, []).append(i)
    most = MAX_QUANTIZERS // max(map(len, products), default=1)
    for positions in of_shapes.values():
        for start in range(0, len(positions), most):
            call = positions[start : start + most]
            pairs = itertools.chain.from_iterable(products[i] for i in call)
            of_call = run(call, *zip(*pairs, strict=True))
            results |= zip(call, of_call, strict=True)
    return [results[i] for i in range(len(products))]


def _owners(counts):
    """Return the position of the product of each quantizer."""
    return np.repeat(range(len(counts)), counts).tolist()


def _names(op, ranks, counts):
    """Name the dimensions of the histories, the scales, and the readings of products
    (or the recorded numbers).
    """
    # A batch may be cut, by layers or experts; a window and the numbers of a product
    # stay together.
    batch = dims("batch", ranks[0] - 1)
    histories = [history_names(op, batch, i) for i in range(sum(counts))]
    readings = [(batch, (f"{WHOLE}_number{i}",)) for i in range(len(counts))]
    return histories, [((*batch, "one"),)] * len(histories), readings


def _next_history(history, amax, scale_inv, stays=None):
    """Drop slot 1, the oldest, and record the amax in slot 0; all arrays are bits of
    f32.

    With `stays`, whether each row stays: there the amax takes slot 0 and no other slot
    moves.
    """
    axis = history.ndim - 1
    moved = lax.concatenate([amax, history[..., 2:], history[..., :1]], axis)
    moved = moved[..., : history.shape[-1]]
    if stays is not None:
        stays = stays << 1 != 0
        stayed = lax.concatenate([amax, history[..., 1:]], axis)
        moved = jnp.where(stays, stayed, moved)
    is_entry = moved - jnp.uint32(1) < jnp.uint32(0x7F800000 - 1)  # 0 wraps around
    if stays is not None:
        is_below_zero = moved - jnp.uint32(0x80000001) < jnp.uint32(0x7F800000)
        is_entry |= stays & is_below_zero
    return jnp.where(is_entry & (scale_inv << 1 != 0), moved, jnp.uint32(0))


class _ReadHistories(OpOfUnits):
    """The units are products, with the numerators of the scales of their quantizers."""

    name = "read_histories"

    @property
    def counts(self):
        return tuple(map(len, self.of_units))

    def owners(self, operand_count):
        return _owners(self.counts) * 2, range(len(self.counts))

    def names(self, *ranks):
        histories, scales, readings = _names(self, ranks, self.counts)
        return [*histories, *scales], readings

    def sizes(self, *shapes):
        return {
            f"{WHOLE}_number{i}": READING_NUMBERS * count
            for i, count in enumerate(self.counts)
        }

    def reference(self, *operands):
        histories, scales = halves(operands)
        # The numbers of all quantizers are vectors, so that their scales are computed
        # once.
        columns = *zip(*map(amaxes, histories), strict=True), scales
        newest, largest, scale = (jnp.concatenate(x, axis=-1) for x in columns)
        is_below_zero, below_zero = _scaling.below_zero(scale), jnp.float32(-1)
        newest = jnp.where(is_below_zero, below_zero, newest)
        largest = jnp.where(is_below_zero, below_zero, largest)
        numerators = self.attributes()["numerators"]
        next_scales = _scaling.amax_to_scale(largest, scale, numerators)
        numbers = newest, largest, scale, jnp.zeros_like(scale), *next_scales
        table = jnp.stack(numbers, axis=-1)
        parts = jnp.split(table, np.cumsum(self.counts)[:-1], axis=-2)
        return [x.reshape(*x.shape[:-2], READING_NUMBERS * x.shape[-2]) for x in parts]

    def attributes(self):
        return {"numerators": np.array(sum(self.of_units, ()), np.float32)}


class _WriteHistories(OpOfUnits):
    """The units are products, with the numbers of their quantizers.

    With `by_quantizer` the units are quantizers, and the recorded numbers an array for
    each amax and each scale_inv.
    """

    name = "write_histories"
    by_quantizer: bool

    def owners(self, operand_count):
        quantizers = _owners(self.of_units)
        recorded = range(operand_count - len(quantizers))
        if self.by_quantizer:
            recorded = quantizers * 2
        return [*quantizers, *recorded], quantizers * 2

    def names(self, *ranks):
        histories, scales, readings = _names(self, ranks, self.of_units)
        recorded = scales * 2 if self.by_quantizer else readings
        return [*histories, *recorded], [*histories, *scales]

    def on_one_device_only(self):
        # On a mesh in jnp, which XLA fuses and moves together with the reductions of
        # the amaxes.
        return self.by_quantizer

    def reference(self, *operands):
        # Move bits: XLA's CPU threads treat subnormal floats as zero, also in slices
        # and concatenations.
        bits = [x.astype(jnp.float32).view(jnp.uint32) for x in operands]
        histories, numbers = bits[: sum(self.of_units)], bits[sum(self.of_units) :]
        if self.by_quantizer:
            columns = halves(numbers)
        else:
            numbers = [x for r in numbers for x in jnp.split(r, r.shape[-1], axis=-1)]
            columns = [numbers[i::READING_NUMBERS] for i in range(3)]
        written = map(_next_history, histories, *columns)
        results = *written, *columns[1]
        return [x.view(jnp.float32) for x in results]

    def cpu(self, *operands):
        # The histories of a product that is not in a loop are mostly arguments of the
        # program: XLA would copy them.
        aliases = {}
        if not self.by_quantizer:
            aliases = {i: i for i in range(sum(self.of_units))}
        return self.call_on_groups(*operands, aliases=aliases)


# Products whose state is rows of the same arrays -------------------------------------


def read_rows(pairs, *, fp8_max):
    """Read the state of n products that are rows of the same arrays.

    Args:
        pairs: k pairs of a history, f32 `[n, H]`, and a scale, f32 `[n, 1]`; as a
            product of `read_histories`.
        fp8_max: k numbers, the largest values of the FP8 formats.

    Returns:
        n readings f32 `[6 * k]`, the rows of what `read_histories` returns.

    Raises:
        TypeError: the op is differentiated.
    """
    histories, scales = zip(*pairs, strict=True)
    op = _ReadRows(_ReadHistories((_numerators(fp8_max),)), len(histories[0]))
    return op(*histories, *scales)


def write_rows(pairs, recorded):
    """Write the next state of n products that are rows of the same arrays.

    Args:
        pairs: the same argument as for `read_rows`.
        recorded: n arrays f32 `[6 * k]`, as `write_histories` takes them; `stays` is 0.

    Returns:
        The k pairs of a history and a scale, in the shapes of the arguments.

    Raises:
        TypeError: the op is differentiated.
    """
    histories = [history for history, _ in pairs]
    count = len(pairs)
    op = _WriteRows(_WriteHistories((count,), by_quantizer=False), count)
    written = op(*histories, *recorded)
    return list(zip(*halves(written), strict=True))


class _ReadRows(Op):
    """Give the rows of the one reading that `whole` gives."""

    name = "read_rows"
    custom_call = "read_histories"
    whole: _ReadHistories
    rows: int

    def names(self, *ranks):
        histories, scales = _names_of_rows(len(ranks) // 2)
        return [*histories, *scales], [_NUMBERS] * self.rows

    def sizes(self, *shapes):
        return {f"{WHOLE}_number": READING_NUMBERS * len(shapes) // 2}

    def reference(self, *operands):
        return jnp.unstack(*self.whole(*operands), axis=-2)

    cpu = reference

    def cuda(self, *operands):
        """Give each row as a concatenation of numbers from buffers of their own. XLA
        takes a number from there, where it would make a kernel to take it from an
        array; and it leaves out the call whose numbers no product takes.
        """
        readings = self.reference(*operands)
        if self.vmap_dims:
            return readings
        histories, scales = halves(operands)
        total = len(histories) * self.rows
        numbers = _ffi.call(
            "read_rows",
            [((1,), jnp.float32)] * (3 * total),
            *histories,
            *(scale.reshape(-1) for scale in scales),
            numerators=self.whole.attributes()["numerators"],
        )
        rows = []
        for row, reading in enumerate(readings):
            parts = []
            for i in range(len(histories)):
                scale, scale_inv, zero = numbers[i * self.rows + row :: total]
                first = READING_NUMBERS * i
                parts += [reading[first : first + 3], zero, scale, scale_inv]
            rows.append(lax.concatenate(parts, 0))
        return rows


class _WriteRows(Op):
    """Write what `whole` does, from the rows of what was recorded."""

    name = "write_rows"
    custom_call = "write_histories"
    whole: _WriteHistories
    count: int  # of the product's quantizers

    def names(self, *ranks):
        histories, scales = _names_of_rows(self.count)
        rows = [_NUMBERS] * (len(ranks) - self.count)
        return [*histories, *rows], [*histories, *scales]

    def reference(self, *operands):
        recorded = jnp.stack(operands[self.count :], axis=-2)
        return self.whole(*operands[: self.count], recorded)

    cpu = reference

    def cuda(self, *operands):
        """Take each number from the buffer where a product has left it."""
        if self.vmap_dims:
            return self.reference(*operands)
        count = self.count
        histories, rows = operands[:count], operands[count:]
        numbers = []
        for number in range(2):
            for i in range(number, READING_NUMBERS * count, READING_NUMBERS):
                numbers += [row[i : i + 1] for row in rows]
        results = [(history.shape, jnp.float32) for history in histories]
        results += [((len(rows),), jnp.float32)] * count
        written = _ffi.call("write_rows", results, *histories, *numbers)
        scales = [scale.reshape(-1, 1) for scale in written[count:]]
        return [*written[:count], *scales]


def _names_of_rows(count):
    """Name the dimensions of histories and of scales; no mesh cuts rows."""
    row = (f"{WHOLE}_row",)
    return [(row, (f"{SLOTS}{i}",)) for i in range(count)], [(row, *ONE)] * count


# The numbers of a reading as arrays, and what a step records as one ------------------

# the numbers in each part of a quantizer's reading, `[start, end)`: both amaxes are one
# part
_PARTS = (0, 2), (2, 3), (3, 4), (4, 5), (5, 6)


def split_reading(reading):
    """Return the parts of a reading, each an array.

    Args:
        reading: f32 `[6 * k]`, of a product in one iteration of a loop.

    Returns:
        For each quantizer a history `(2,)`, the newest and the largest entry; and
        stored, a zero, scale and scale_inv, `(1,)`. The history gives the scale and the
        emptiness of the whole.

    Raises:
        TypeError: the op is differentiated.
    """
    count = reading.shape[-1] // READING_NUMBERS
    parts = _SplitReading(count)(reading)
    return [parts[i::count] for i in range(count)]


def join_recorded(recorded, amaxes=None, *, in_loop=True):
    """Put together what a product recorded: f32 `[6 * k]`, with 0 for the others, so
    that no history stays.

    Args:
        recorded: for each quantizer an amax and a scale_inv, f32 `(1,)`.
        amaxes: the first two amaxes once more, as one array f32 `(2,)`; or None. A
            program for one GPU reads it in their place: a loop then stacks one array,
            and XLA drops the two. On a mesh XLA moves the all-reduce of an amax out of
            a loop only where the amax is an array of its own.
        in_loop: whether the result is that of an iteration of a loop; else XLA takes
            the numbers from where they are.

    Raises:
        TypeError: the op is differentiated.
    """
    pairs = zip(*recorded, strict=True)
    operands = list(itertools.chain.from_iterable(pairs))
    if amaxes is not None:
        operands.append(amaxes)
    return _JoinRecorded(len(recorded), in_loop)(*operands)[0]


class _SplitReading(OpOfCpus):
    name = "split_reading"
    count: int  # of the product's quantizers

    def names(self, reading):
        numbers = [ONE] * (self.count * (len(_PARTS) - 1))
        return [_NUMBERS], [_PAIR] * self.count + numbers

    def sizes(self, reading):
        return {f"{WHOLE}_pair": 2}

    def reference(self, reading):
        # Columns of the parts of one quantizer, from which those of the next are six
        # numbers away.
        firsts = range(0, READING_NUMBERS * self.count, READING_NUMBERS)
        return [
            reading[..., first + start : first + end]
            for start, end in _PARTS
            for first in firsts
        ]


class _JoinRecorded(OpOfCpus):
    name = "join_recorded"
    count: int  # of the product's quantizers
    in_loop: bool

    def names(self, *ranks):
        amaxes = [_PAIR] * (len(ranks) - 2 * self.count)
        return [ONE] * (2 * self.count) + amaxes, [_NUMBERS]

    def sizes(self, *shapes):
        return {f"{WHOLE}_number": READING_NUMBERS * self.count}

    def reference(self, *operands):
        (*amaxes, amax), scale_invs = halves(operands[: 2 * self.count])
        axis = amax.ndim - 1
        rest = jnp.zeros((*amax.shape[:-1], READING_NUMBERS - 2), jnp.float32)
        placed = amax
        if self.in_loop:
            placed = jnp.zeros_like(amax)
        pairs = zip((*amaxes, placed), scale_invs, strict=True)
        row = lax.concatenate([x for pair in pairs for x in (*pair, rest)], axis)
        if not self.in_loop:
            return (row,)
        # The amax of the gradient comes last: XLA moves the all-reduce of an amax out
        # of a loop where nothing but updates of slices is between it and the result of
        # the loop.
        last = READING_NUMBERS * (self.count - 1)
        return (lax.dynamic_update_slice_in_dim(row, amax, last, axis),)

    def cuda(self, *operands):
        if len(operands) > 2 * self.count:
            operands = *jnp.split(operands[-1], 2, axis=-1), *operands[2:]
        return self.reference(*operands)

    def cpu(self, *operands):
        return self.call_on_groups(*operands[: 2 * self.count])
