"""Read FP8 weights and their scales from a safetensors file; this file needs numpy only, so it works on its own."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence

import numpy as np

# Codes and bfloat16 are kept as unsigned integers: numpy has no such floats.
_KEPT_AS = {"F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
_KEPT_AS |= {"BOOL": "?", "U8": "u1", "I8": "i1"} | {f"{k}{8 * n}": f"<{k.lower()}{n}" for k in "UI" for n in (2, 4, 8)}
# Some writers have no E8M0, and store its codes as uint8.
_E8M0 = ("F8_E8M0", "U8")
_OF_SCALES = (*_E8M0, "BF16", "F16", "F32")
_MAX_HEADER = 100_000_000  # bytes, the format's limit


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, in the file's dtype, with the scales that belong to the tensor.

    Attributes:
        data: codes and bfloat16 numbers as unsigned integers of their bits, other dtypes as they are.
        dtype: the name that safetensors gives to the dtype: `"F8_E4M3"`, `"BF16"`, `"F32"`, ...
        scale_inv: f32[1], or f32 `[rows / r, cols / c]`, rounded up, a scale for each block; None without scales.
        block: `(r, c)`, the rows and columns that share a scale, c = None for all columns; None for one scale, and
            without scales.
        input_scale_inv: f32[1], the fixed scale_inv of the layer's input; or None.
    """

    data: np.ndarray
    dtype: str
    scale_inv: np.ndarray | None = None
    block: tuple[int, int | None] | None = None
    input_scale_inv: np.ndarray | None = None

    def decode(self, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        """Return `data * scale_inv`; in float64 exactly, in float32 rounded once."""
        values = _values(self.data, self.dtype)
        if self.scale_inv is not None:
            scales = self.scale_inv.astype(np.float64)
            if self.block is not None:
                for axis, (size, step) in enumerate(zip(values.shape, self.block, strict=True)):
                    scales = scales.take(np.arange(size) // (step or max(size, 1)), axis)
            values = values.astype(np.float64) * scales
        return values.astype(dtype)


def read_safetensors(path: str | os.PathLike | Sequence[str | os.PathLike]) -> dict[str, StoredTensor]:
    """Read a safetensors file, or the files that a model is divided into; each FP8 weight gets its scales.

    The names, dtypes and shapes of scales in the file tell their block:

    | scales of `x.weight` | block |
    |---|---|
    | `x.weight_scale_inv`, float32 or E8M0 | `(128, 128)` |
    | `x.weight_scale`, E8M0, also as uint8 | `(1, 32)` |
    | `x.weight_scale`, a float, `[rows / 128, columns / 128]`, rounded up | `(128, 128)` |
    | `x.weight_scale`, a float, `[rows, 1]` | `(1, None)` |
    | `x.weight_scale_inv` or `x.weight_scale` with one element that fits none of these | None, one scale |
    | `x.input_scale` or `x.activation_scale`, with one element | `input_scale_inv`, the scale of the layer's input |

    Args:
        path: a file of `to_safetensors`, or of another writer of these layouts; or several files, in which a weight and
            its scales may be apart.

    Returns:
        The tensors by name; scales are in the tensor to which they belong, and have no entry of their own. `data` is
        mapped from the file, and read when it is used.

    Raises:
        ValueError: the file is not in the safetensors format (tensors overlap, gaps, names that are there twice), or is
            cut off; a dtype is unknown; scales fit none of the layouts above; or two files have a tensor of one name.
            The message has the tensor's name.

    References:
        The format: https://huggingface.co/docs/safetensors, "Format".
    """
    is_one = isinstance(path, (str, os.PathLike))
    tensors, where_of = {}, {}
    for file in (path,) if is_one else path:
        where = f"read_safetensors: {file}"
        for name, tensor in _tensors_of_file(where, file).items():
            if name in tensors:
                raise ValueError(f"{where}: {name}: expected one tensor of this name, got another in {where_of[name]}")
            tensors[name], where_of[name] = tensor, where
    scales = set()
    for name, tensor in list(tensors.items()):
        if tensor.dtype in ("F8_E4M3", "F8_E5M2"):
            tensors[name], names = _with_scales(f"{where_of[name]}: {name}", name, tensor, tensors)
            scales.update(names)
    return {name: tensor for name, tensor in tensors.items() if name not in scales}


def _tensors_of_file(where: str, path: str | os.PathLike) -> dict[str, StoredTensor]:
    """Return the tensors of one file, scales among them."""
    file = np.asarray(np.memmap(path, np.uint8, "r")) if os.path.getsize(path) else np.zeros(0, np.uint8)
    begin = 8 + int.from_bytes(file[:8].tobytes(), "little")
    if not 8 <= len(file) >= begin:
        raise ValueError(f"{where}: expected a header of {begin} bytes, got a file of {len(file)}")
    if begin > 8 + _MAX_HEADER:
        raise ValueError(f"{where}: expected a header of at most {_MAX_HEADER} bytes, got {begin - 8}")
    try:
        header = json.loads(file[8:begin].tobytes().decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a header in JSON; is it a safetensors file? {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{where}: expected a header with an entry for each tensor, got a {type(header).__name__}")
    header.pop("__metadata__", None)
    return _tensors(where, header, file[begin:])


def _without_duplicates(pairs: list[tuple]) -> dict:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return entries


def _tensors(where, header, data) -> dict[str, StoredTensor]:
    """Return the tensors of a header, which have to fill the data without gaps."""
    tensors, places, end = {}, {}, 0
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, after]} if all(
                type(number) is int and number >= 0 for number in (*shape, begin, after)
            ):
                tensors[name] = _tensor(f"{where}: {name}", data, dtype, tuple(shape), begin, after)
                places[name] = begin, after
            case _:
                raise ValueError(
                    f"{where}: {name}: expected a dtype, a shape and two data_offsets, of whole numbers, got {entry}"
                )
    for name, (begin, after) in sorted(places.items(), key=lambda item: item[1]):
        if begin != end:
            raise ValueError(f"{where}: {name}: expected tensors without gaps, from {end} on, got offset {begin}")
        end = after
    if end != len(data):
        raise ValueError(f"{where}: expected tensors that fill the file, got {len(data) - end} bytes after the last")
    return tensors


def _tensor(where, data, dtype, shape, begin, end) -> StoredTensor:
    if dtype not in _KEPT_AS:
        raise ValueError(f"{where}: expected a dtype of {sorted(_KEPT_AS)}, got {dtype}")
    kept = np.dtype(_KEPT_AS[dtype])
    size = math.prod(shape) * kept.itemsize
    if not begin <= end <= len(data) or end - begin != size:
        raise ValueError(
            f"{where}: expected {size} bytes for {dtype}{list(shape)}, got offsets {[begin, end]} of {len(data)}; "
            "the file is damaged or cut off"
        )
    try:
        if size == 0:
            np.empty(shape, np.float64)  # as `decode` makes it: numpy limits also the shapes of nothing
        return StoredTensor(data[begin:end].view(kept).reshape(shape), dtype)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: expected a shape that numpy has, got {list(shape)}: {error}") from error


def _with_scales(where, name, weight, tensors):
    """Return a weight with its scales, and the names that they have in the file."""
    prefix = name.removesuffix("weight")
    squares, tensorwise = f"{name}_scale_inv", f"{name}_scale"
    inputs = f"{prefix}input_scale", f"{prefix}activation_scale"
    names = [_only(where, tensors, pair) for pair in ((squares, tensorwise), inputs)]
    scale, fixed = map(tensors.get, names)
    scale_inv = block = input_scale_inv = None
    if fixed is not None:
        input_scale_inv = _scales(f"{where}: {names[1]}", fixed).reshape(-1)
        if input_scale_inv.shape != (1,):
            raise ValueError(f"{where}: expected one scale of the input, got {list(fixed.data.shape)} of {names[1]}")
    if scale is not None:
        scale_inv = _scales(f"{where}: {names[0]}", scale)
        if names[0] == squares:
            blocks = [(128, 128)]
        elif scale.dtype in _E8M0:
            blocks = [(1, 32)]
        else:
            blocks = [(128, 128), (1, None)] if scale.data.size > 1 else []
        shapes = [_count(block, weight.data.shape) for block in blocks if weight.data.ndim == 2]
        if scale_inv.shape in shapes:
            block = blocks[shapes.index(scale_inv.shape)]
        else:
            scale_inv = scale_inv.reshape(-1)
            if scale_inv.shape != (1,):
                needed = f"scales {' or '.join(map(str, shapes))}, or one," if shapes else "one scale"
                raise ValueError(
                    f"{where}: expected {needed} for codes {weight.data.shape}, got {scale.data.shape} of {names[0]}"
                )
    scaled = dataclasses.replace(weight, scale_inv=scale_inv, block=block, input_scale_inv=input_scale_inv)
    return scaled, filter(None, names)


def _count(block, shape) -> tuple[int, ...]:
    """Return the numbers of blocks along the rows and the columns of a matrix."""
    return tuple(-(-size // (step or max(size, 1))) for size, step in zip(shape, block, strict=True))


def _only(where, tensors, names) -> str | None:
    """Return which of two names is in the file; None where neither is."""
    present = [name for name in names if name in tensors]
    if len(present) > 1:
        raise ValueError(f"{where}: expected {names[0]} or {names[1]}, got both")
    return present[0] if present else None


def _scales(where, scale: StoredTensor) -> np.ndarray:
    """Return stored scales in float32, exactly."""
    if scale.dtype not in _OF_SCALES:
        raise ValueError(f"{where}: expected scales in {sorted(_OF_SCALES)}, got {scale.dtype}")
    return _values(scale.data, "F8_E8M0" if scale.dtype in _E8M0 else scale.dtype).astype(np.float32)


def _values(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return the exact values of stored numbers, in a dtype that numpy has."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E8M0":
        return np.where(data == 255, np.nan, np.ldexp(1.0, data.astype(np.int32) - 127))
    return _codes(*{"F8_E4M3": (4, 7), "F8_E5M2": (5, 15)}[dtype])[data] if dtype.startswith("F8") else data


def _codes(exponent_bits: int, bias: int) -> np.ndarray:
    """Return the values of the 256 codes of an FP8 format, f32.

    References:
        Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1.
    """
    codes, bits = np.arange(256), 7 - exponent_bits
    exponent, mantissa = (codes & 127) >> bits, codes & (2**bits - 1)
    values = np.where(exponent > 0, 2**bits + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - bias - bits)
    if exponent_bits == 5:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    else:
        values[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)
