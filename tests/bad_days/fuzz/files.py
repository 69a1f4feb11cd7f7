"""Safetensors files that are damaged at random: what is read is right, or refused with the tensor's name.

The judge knows the format's description alone: JSON in UTF-8 without a name twice, tensors that fill the data.
"""

import collections
import json
import math
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np

from jaxfp8.convert import read_safetensors

WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}
WIDTHS |= {"F64": 8, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
SCALES = {"U8": "float8_e8m0fnu", "F8_E8M0": "float8_e8m0fnu", "BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ENDS = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
# What may stand anywhere in a header.
VALUES = (
    None, True, -1, 0, 1, 3, 128, 2**31, 2**63, 2**70, 1.5, 1e400, float("nan"), "", "F32", "{0}", "weight", [], [0, 0],
    [1], [0, 2**62], [1] * 70, {}, {"dtype": "U8"}, [[[]]],
)  # fmt: skip


def file_of(rng) -> tuple[dict, bytes]:
    """The header and the data of a good file, of some tensors."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for module in rng.permutation(["a.", "b.", "", "{x}."])[:2]:
        shape = tuple(rng.choice([0, 1, 2, 33, 130], rng.choice([0, 1, 2, 2, 2, 2, 2, 3])).tolist())
        squares, rows = tuple(-(-n // 128) for n in shape), (*shape[:-1], -(-shape[-1] // 32)) if shape else ()
        tensors = [("weight", rng.choice([*FP8, *FP8, "BF16"]), shape)]
        if rng.random() < 0.7:  # scales that fit, mostly
            end, dtype, grid = (
                ("weight_scale_inv", "F32", squares),
                ("weight_scale_inv", "F8_E8M0", squares),
                ("weight_scale", "U8", rows),
                ("weight_scale", "F32", (1,)),
                ("weight_scale", "BF16", ()),
                ("weight_scale", "F64", rows),
            )[rng.integers(6)]
            tensors.append((end, dtype, grid))
        tensors += [(end, "F32", (1,)) for end in ENDS if end != tensors[-1][0] and rng.random() < 0.1]
        for end, dtype, shape in tensors:
            size = math.prod(shape) * WIDTHS[dtype]
            entry = {"dtype": str(dtype), "shape": list(shape), "data_offsets": [len(data), len(data) + size]}
            header[module + end], data = entry, data + rng.integers(0, 120, size, np.uint8).tobytes()
    return header, data


def mutated(rng, header: dict, data: bytes) -> bytes:
    """The bytes of a file whose header was changed in one place, or two."""
    for _ in range(rng.choice([0, 0, 1, 2])):
        name = str(rng.choice(list(header)))
        entry = header[name]
        match rng.integers(9):
            case 0:
                header[name] = VALUES[rng.integers(len(VALUES))]
            case 1 if isinstance(entry, dict) and entry:
                entry[str(rng.choice(list(entry)))] = VALUES[rng.integers(len(VALUES))]
            case 2 if isinstance(entry, dict) and entry:
                entry.pop(str(rng.choice(list(entry))))
            case 3 | 4 if isinstance(entry, dict):
                numbers = entry.get(str(rng.choice(["shape", "data_offsets"])))
                if isinstance(numbers, list) and numbers:
                    at = rng.integers(len(numbers))
                    change = int(rng.choice([-1, 1, 4, 128, -(2**40), 2**62]))
                    numbers[at] = numbers[at] + change if isinstance(numbers[at], int) else VALUES[rng.integers(20)]
            case 5:
                header[str(rng.choice([*header, "weight_scale", "c.weight", "input_scale"]))] = entry
            case 6:
                data = data + b"\0" if rng.random() < 0.5 else data[:-1]
            case 7 if isinstance(entry, dict):
                entry["dtype"] = str(rng.choice(list(WIDTHS)))
            case 8:
                header.pop(name) if len(header) > 1 else None
    text = json.dumps(header).encode()
    size = len(text)
    match rng.integers(16):
        case 0:  # a name twice
            first = json.dumps(next(iter(header)))
            text = text[:-1] + b", " + first.encode() + b": {}}"
            size = len(text)
        case 1:
            raw = bytearray(text)
            raw[rng.integers(len(raw))] = rng.integers(256)
            text = bytes(raw)
        case 2:
            text = b"[" * int(rng.choice([5, 20000, 200000])) + text
            size = len(text)
        case 3:
            size = int(rng.choice([0, 1, len(text) - 1, len(text) + 1, 2**31, 2**62]))
        case 4:
            text = (b"null", b"3", b"[]", b"{}", b'"x"', b"", b"\xff\xfe{\x00}\x00")[rng.integers(7)]
            size = len(text)
    return size.to_bytes(8, "little") + text + data


def _pairs(pairs):
    assert max(collections.Counter(name for name, _ in pairs).values(), default=1) == 1
    return dict(pairs)


def judged(raw: bytes) -> dict | None:
    """`{name: (dtype, shape, bytes)}` of a file in the format; None of any other."""
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 + size or len(raw) < 8:
        return None
    try:
        header = json.loads(raw[8 : 8 + size].decode("utf-8"), object_pairs_hook=_pairs)
        header.pop("__metadata__", None)
        tensors, data, end = {}, raw[8 + size :], 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, after = entry["data_offsets"]
            shape, dtype = entry["shape"], entry["dtype"]
            assert isinstance(shape, list) and {type(n) for n in (*shape, begin, after)} == {int}
            assert begin == end and min(shape, default=0) >= 0 and math.prod(shape) * WIDTHS[dtype] == after - begin
            np.empty(shape if 0 in shape else [1] * len(shape))  # numpy has such a shape
            tensors[name], end = (dtype, tuple(shape), data[begin:after]), after
        return tensors if end == len(data) else None
    except (AssertionError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def expected(tensors: dict) -> dict | None:
    """`{name: decoded float64 or bytes}` as the layouts of scales have it; None where scales fit no layout."""
    values, used = {}, set()
    for name, (dtype, shape, raw) in tensors.items():
        if dtype not in FP8:
            values[name] = raw
            continue
        value = np.frombuffer(raw, jnp.dtype(FP8[dtype])).reshape(shape).astype(np.float64)
        names = [name + "_scale_inv", name + "_scale"], [name.removesuffix("weight") + end for end in ENDS[2:]]
        both = [[n for n in pair if n in tensors] for pair in names]
        if any(len(pair) > 1 for pair in both) or any(tensors[n][0] not in SCALES for pair in both for n in pair):
            return None
        used.update(*both)
        if both[1] and math.prod(tensors[both[1][0]][1]) != 1:
            return None
        if both[0]:
            of_scale, grid, raw_scale = tensors[both[0][0]]
            scale = np.frombuffer(raw_scale, jnp.dtype(SCALES[of_scale])).reshape(grid).astype(np.float64)
            block = (128, 128) if both[0][0].endswith("_inv") else (1, 32) if of_scale in ("U8", "F8_E8M0") else None
            if (
                block
                and len(shape) == 2 == len(grid)
                and grid == tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
            ):
                for axis in (0, 1):
                    scale = np.repeat(scale, block[axis], axis)[(slice(None),) * axis + (slice(shape[axis]),)]
            elif scale.size == 1:
                scale = scale.reshape(())
            else:
                return None
            value = value * scale
        values[name] = value
    return {name: value for name, value in values.items() if name not in used}


def check(seed: int) -> str:
    """ "right" or "refused"; raises an AssertionError with what is wrong."""
    rng = np.random.default_rng(seed)
    raw = mutated(rng, *file_of(rng))
    tensors = judged(raw)
    wanted = None if tensors is None else expected(tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "file")
        path.write_bytes(raw)
        try:
            read = read_safetensors(path)
        except ValueError as error:
            assert str(error).startswith(f"read_safetensors: {path}: "), f"an error without a name: {error}"
            assert wanted is None, f"refused what is good: {error}"
            names = [name for name in tensors or () if f"{path}: {name}: " in str(error)]
            assert tensors is None or names, f"an error without the tensor's name: {error}"
            return "refused"
        assert wanted is not None, "a bad file is accepted"
        assert set(read) == set(wanted), f"other tensors: {sorted(read)}"
        for name, tensor in read.items():
            assert (tensor.dtype, tensor.data.shape) == tensors[name][:2], name
            if isinstance(wanted[name], bytes):
                assert tensor.data.tobytes() == wanted[name], name
            else:
                with np.errstate(all="ignore"):
                    np.testing.assert_array_equal(tensor.decode(np.float64), wanted[name], name)
    return "right"
