"""Read FP8 weights and their scales from a safetensors file; this file needs numpy only, so it works on its own."""

import dataclasses
import json
import os

import numpy as np

# Codes and bfloat16 are kept as unsigned integers: numpy has no such floats.
_KEPT_AS = {"F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
_KEPT_AS |= {"BOOL": "?", "U8": "u1", "I8": "i1"} | {f"{k}{8 * n}": f"<{k.lower()}{n}" for k in "UI" for n in (2, 4, 8)}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, in the file's dtype, with the scales that belong to the tensor.

    Attributes:
        data: codes and bfloat16 numbers as unsigned integers of their bits, other dtypes as they are.
        dtype: the name that safetensors gives to the dtype: `"F8_E4M3"`, `"BF16"`, `"F32"`, ...
        scale_inv: f32[1], or f32 `[rows / r, cols / c]`, rounded up, a scale for each block; None without scales.
        block: `(r, c)`, the rows and columns that share a scale; None for one scale, and without scales.
        input_scale_inv: f32[1], the fixed scale_inv of the layer's input; or None.
    """

    data: np.ndarray
    dtype: str
    scale_inv: np.ndarray | None = None
    block: tuple[int, int] | None = None
    input_scale_inv: np.ndarray | None = None

    def decode(self, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        """Return `data * scale_inv`; in float64 exactly, in float32 rounded once."""
        values = _values(self.data, self.dtype)
        if self.scale_inv is not None:
            scales = self.scale_inv.astype(np.float64)
            if self.block is not None:
                for axis, (size, step) in enumerate(zip(values.shape, self.block, strict=True)):
                    scales = scales.take(np.arange(size) // step, axis)
            values = values.astype(np.float64) * scales
        return values.astype(dtype)


def read_safetensors(path: str | os.PathLike) -> dict[str, StoredTensor]:
    """Read a safetensors file; each FP8 weight gets its scales.

    The names and dtypes of scales in the file tell their block:

    | scales of `x.weight` | block |
    |---|---|
    | `x.weight_scale_inv`, float32 or E8M0 | `(128, 128)` |
    | `x.weight_scale`, E8M0, also as uint8 | `(1, 32)` |
    | `x.weight_scale_inv` or `x.weight_scale` with one element; `x.weight_scale` in other dtypes | None, one scale |
    | `x.input_scale` or `x.activation_scale` | `input_scale_inv`, the scale of the layer's input |

    Args:
        path: a file of `to_safetensors`, or of another writer of these layouts.

    Returns:
        The tensors by name; scales are in the tensor to which they belong, and have no entry of their own. `data` is
        mapped from the file, and read when it is used.

    Raises:
        ValueError: the file is not in the safetensors format, or is cut off; a dtype is unknown; or the shape of scales
            fits none of the layouts above.

    References:
        The format: https://huggingface.co/docs/safetensors, "Format".
    """
    file = np.asarray(np.memmap(path, np.uint8, "r")) if os.path.getsize(path) else np.zeros(0, np.uint8)
    begin = 8 + int.from_bytes(file[:8].tobytes(), "little")
    if len(file) < 8 or len(file) < begin:
        raise ValueError(f"read_safetensors: {path}: expected a header of {begin} bytes, got a file of {len(file)}")
    try:
        header = json.loads(file[8:begin].tobytes())
    except ValueError as error:
        raise ValueError(f"read_safetensors: {path}: expected a header in JSON; is it a safetensors file?") from error
    header.pop("__metadata__", None)
    tensors = {name: _tensor(f"read_safetensors: {name}", file[begin:], **entry) for name, entry in header.items()}
    scales = set()
    for name, tensor in list(tensors.items()):
        if tensor.dtype in ("F8_E4M3", "F8_E5M2"):
            tensors[name], names = _with_scales(name, tensor, tensors)
            scales.update(names)
    return {name: tensor for name, tensor in tensors.items() if name not in scales}


def _tensor(where, data, dtype, shape, data_offsets) -> StoredTensor:
    if dtype not in _KEPT_AS:
        raise ValueError(f"{where}: expected a dtype of {sorted(_KEPT_AS)}, got {dtype}")
    begin, end = data_offsets
    kept, size = np.dtype(_KEPT_AS[dtype]), int(np.prod(shape, dtype=np.int64))
    if not 0 <= begin <= end <= len(data) or end - begin != size * kept.itemsize:
        raise ValueError(
            f"{where}: expected {size * kept.itemsize} bytes for {dtype}{shape}, got {data_offsets} of {len(data)}; "
            "the file is damaged or cut off"
        )
    return StoredTensor(data[begin:end].view(kept).reshape(shape), dtype)


def _with_scales(name, weight, tensors):
    """Return a weight with its scales, and the names that scales of the weight have in a file."""
    prefix = name.removesuffix("weight")
    names = (f"{name}_scale_inv", f"{name}_scale", f"{prefix}input_scale", f"{prefix}activation_scale")
    squares, scale, *inputs = map(tensors.get, names)
    scale, fixed = squares or scale, inputs[0] or inputs[1]
    if scale is None:
        return weight, names
    e8m0 = scale.dtype in ("U8", "F8_E8M0")
    scale_inv = _values(scale.data, "F8_E8M0" if e8m0 else scale.dtype).astype(np.float32)
    block = (128, 128) if squares else (1, 32) if e8m0 else None
    if block is None or scale_inv.ndim < 2:
        block, scale_inv, needed = None, scale_inv.reshape(-1), (1,)
    else:
        needed = tuple(-(-size // step) for size, step in zip(weight.data.shape, block, strict=True))
    if scale_inv.shape != needed:
        raise ValueError(
            f"read_safetensors: {name}: expected scales {needed} for codes {weight.data.shape}, got {scale_inv.shape}"
        )
    input_scale_inv = None if fixed is None else _values(fixed.data, fixed.dtype).astype(np.float32).reshape(-1)
    return dataclasses.replace(weight, scale_inv=scale_inv, block=block, input_scale_inv=input_scale_inv), names


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
