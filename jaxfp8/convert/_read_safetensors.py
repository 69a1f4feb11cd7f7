"""Read FP8 weights and their scales from safetensors files; the names that the
parameters of a model have there.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ..ops import _blocks
from ._tree import Path, at

# The dtypes of arrays by the names that safetensors gives to them.
_DTYPES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}
DTYPES = {name: jnp.dtype(dtype) for name, dtype in _DTYPES.items()}
# Some writers have no E8M0, and store its codes as uint8.
_E8M0 = ("F8_E8M0", "U8")
_OF_SCALES = (*_E8M0, "BF16", "F16", "F32")
# The names of Flax for parameters that PyTorch calls "weight".
_WEIGHTS = ("kernel", "embedding", "scale")
# The place of an index in a name whose groups are expanded.
_PLACE = "\0"
Name = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, in the file's dtype, with the scales that belong
    to the tensor.

    Attributes:
        data: the tensor, mapped from the file.
        dtype: the name that safetensors gives to the dtype: `"F8_E4M3"`, `"BF16"`,
            `"F32"`, ...
        scale_inv: f32[1], or f32 `[rows / r, cols / c]`, rounded up, a scale for each
            block; None without scales.
        block: `(r, c)`, the rows and columns that share a scale, c = None for all
            columns; None for one scale, and without scales.
        input_scale_inv: f32[1], the fixed scale_inv of the layer's input; or None.
    """

    data: np.ndarray
    dtype: str
    scale_inv: np.ndarray | None = None
    block: tuple[int, int | None] | None = None
    input_scale_inv: np.ndarray | None = None

    def decode(self, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        """Return `data * scale_inv`; in float64 exactly, in float32 rounded once."""
        values = self.data
        if self.scale_inv is not None:
            scales = self.scale_inv.astype(np.float64)
            if self.block is not None:
                m, n = values.shape
                rows, cols = _blocks.shape(self.block, m, n)
                scales = scales.repeat(rows, 0).repeat(cols, 1)[:m, :n]
            values = values.astype(np.float64) * scales
        return values.astype(dtype)


def read_safetensors(
    path: str | os.PathLike | Sequence[str | os.PathLike],
) -> dict[str, StoredTensor]:
    """Read a safetensors file, or the files that a model is divided into; each FP8
    weight gets its scales.

    The names, dtypes and shapes of scales in the file tell their block. For `x.weight`:

    - `x.weight_scale_inv`, float32 or E8M0: `(128, 128)`
    - `x.weight_scale`, E8M0, also as uint8: `(1, 32)`
    - `x.weight_scale`, a float, `[rows / 128, columns / 128]`, rounded up: `(128, 128)`
    - `x.weight_scale`, a float, `[rows, 1]`: `(1, None)`
    - `x.weight_scale_inv` or `x.weight_scale` with one element that fits none of these:
      None, one scale
    - `x.input_scale` or `x.activation_scale`, with one element: `input_scale_inv`, the
      scale of the layer's input

    Args:
        path: a file of `to_safetensors`, or of another writer of these layouts; or
            several files, in which a weight and its scales may be apart.

    Returns:
        The tensors by name; scales are in the tensor to which they belong, and have no
        entry of their own. `data` is mapped from the file, and read when it is used.

    Raises:
        ValueError: the file is not in the safetensors format (tensors overlap, gaps),
            or is cut off; a dtype is unknown; scales fit none of the layouts above; or
            two files have a tensor of one name. The message has the file's name, and
            the tensor's where it is about one.

    References:
        The format: https://huggingface.co/docs/safetensors, "Format".
    """
    if isinstance(path, (str, os.PathLike)):
        path = (path,)
    tensors = {}
    where_of = {}
    for file in path:
        where = f"read_safetensors: {file}"
        try:
            # safetensors makes no numpy arrays of FP8 dtypes
            of_file = _tensors_of(np.asarray(np.memmap(file, np.uint8, "r")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{where}: expected a safetensors file that is whole; {error}"
            ) from error
        for name, tensor in of_file.items():
            if name in tensors:
                raise ValueError(
                    f"{where}: {name}: expected one tensor of this name, got another "
                    f"in {where_of[name]}"
                )
            tensors[name] = tensor
            where_of[name] = where
    for name, tensor in list(tensors.items()):
        if tensor.dtype in ("F8_E4M3", "F8_E5M2"):
            where = f"{where_of[name]}: {name}"
            tensors[name] = _with_scales(where, name, tensor, tensors)
    return tensors


def _tensors_of(data: np.ndarray) -> dict[str, StoredTensor]:
    """Return the tensors in the bytes of a file, scales among them, which they fill
    without gaps.
    """
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header, data = json.loads(data[8:start].tobytes()), data[start:]
    header.pop("__metadata__", None)
    tensors = {}
    begin = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = entry["dtype"], entry["shape"]
        if dtype not in DTYPES:
            raise ValueError(
                f"{name}: expected a dtype of {sorted(DTYPES)}, got {dtype}"
            )
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(
                f"{name}: expected its data at {[begin, end]}, got "
                f"{entry['data_offsets']}"
            )
        values = data[begin:end].view(DTYPES[dtype]).reshape(shape)
        tensors[name] = StoredTensor(values, dtype)
        begin = end
    if begin != len(data):
        raise ValueError(f"expected {begin} bytes, got {len(data)}")
    return tensors


def _with_scales(where, name, weight, tensors):
    """Return a weight with its scales, which are taken out of the tensors."""
    prefix = name.removesuffix("weight")
    squares = f"{name}_scale_inv"
    name_of_scale = _only(where, tensors, squares, f"{name}_scale")
    name_of_input = _only(
        where, tensors, f"{prefix}input_scale", f"{prefix}activation_scale"
    )
    scale_inv = block = input_scale_inv = None
    if name_of_input:
        fixed = tensors.pop(name_of_input)
        input_scale_inv = _scales(f"{where}: {name_of_input}", fixed).reshape(-1)
        if input_scale_inv.shape != (1,):
            raise ValueError(
                f"{where}: expected one scale of the input, got "
                f"{list(fixed.data.shape)} of {name_of_input}"
            )
    if name_of_scale:
        scale = tensors.pop(name_of_scale)
        scale_inv = _scales(f"{where}: {name_of_scale}", scale)
        blocks = []
        if name_of_scale == squares:
            blocks = [(128, 128)]
        elif scale.dtype in _E8M0:
            blocks = [(1, 32)]
        elif scale.data.size > 1:
            blocks = [(128, 128), (1, None)]
        shapes = {}
        if weight.data.ndim == 2:
            shapes = {_blocks.count(each, *weight.data.shape): each for each in blocks}
        block = shapes.get(scale_inv.shape)
        if block is None:
            scale_inv = scale_inv.reshape(-1)
            if scale_inv.shape != (1,):
                raise ValueError(
                    f"{where}: expected scales of a shape in {[*shapes, (1,)]} for "
                    f"codes {weight.data.shape}, got {scale.data.shape} of "
                    f"{name_of_scale}"
                )
    return dataclasses.replace(
        weight, scale_inv=scale_inv, block=block, input_scale_inv=input_scale_inv
    )


def _only(where, tensors, *names) -> str | None:
    """Return which of two names is in the file; None where neither is."""
    present = [name for name in names if name in tensors]
    if len(present) > 1:
        raise ValueError(f"{where}: expected {names[0]} or {names[1]}, got both")
    return present[0] if present else None


def _scales(where, scale: StoredTensor) -> np.ndarray:
    """Return stored scales in float32, exactly."""
    if scale.dtype not in _OF_SCALES:
        raise ValueError(
            f"{where}: expected scales in {sorted(_OF_SCALES)}, got {scale.dtype}"
        )
    data = scale.data
    if scale.dtype == "U8":
        data = data.view(DTYPES["F8_E8M0"])
    return data.astype(np.float32)


class Names:
    """Find the names of a parameter in the file.

    Attributes:
        where: the function, for messages.
        names: its argument `names`: a dict of expressions, or None; see
            `to_safetensors`.
        unused: the expressions that have decided about no parameter so far.
    """

    def __init__(self, where: str, names: Mapping[str, Name] | None):
        self.where, self.names = where, names
        self.unused = dict(names or {})

    def __call__(
        self, path: Path, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], list[str]]]:
        """Yield the index of each stacked parameter in one of this shape, and the names
        of the parts of its rows; nothing where `names` leaves it out.
        """
        templates = self._templates(path)
        counts = {template.count(_PLACE) for template in templates}
        if len(counts) > 1 or max(counts, default=0) > len(shape):
            raise ValueError(
                f"{self.where}: names: {at(path)}: expected as many {{}} in each of "
                f"its names, at most one for each dimension of {list(shape)}"
            )
        for stacked in counts:
            for index in np.ndindex(shape[:stacked]):
                yield index, [_filled(template, index) for template in templates]

    def _templates(self, path) -> list[str]:
        """Return the names of the parts of a parameter, with places of indices."""
        if self.names is None:
            last = "weight" if path[-1] in _WEIGHTS else path[-1]
            return [".".join((*path[:-1], last))]
        for pattern, name in self.names.items():
            if match := re.fullmatch(pattern, at(path)):
                self.unused.pop(pattern, None)
                parts = (name,) if isinstance(name, str) else name or ()
                # Groups are names of the model: braces in them are no places of an
                # index.
                return [match.expand(part.replace("{}", _PLACE)) for part in parts]
        raise ValueError(
            f"{self.where}: names: {at(path)} matches no expression; map it to None "
            "to leave it out"
        )

    def check_used(self) -> None:
        """Raise a ValueError for an expression that decided about no parameter."""
        if self.unused:
            raise ValueError(
                f"{self.where}: names: {list(self.unused)} match no parameter, or "
                "none that is left by those before"
            )


def _filled(template: str, index: tuple[int, ...]) -> str:
    """Return the name of one of stacked parameters."""
    for i in index:
        template = template.replace(_PLACE, str(i), 1)
    return template
