"""A reader of safetensors files in numpy and ml_dtypes alone, written from the
format's description; it shares no code with ours.
"""

import json
import struct

import ml_dtypes
import numpy as np

WIDTH = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I32": np.int32}


E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def read(path) -> dict[str, np.ndarray]:
    """The tensors of a file: codes of e4m3 as uint8, bfloat16 as float32, others as
    they are.
    """
    raw = open(path, "rb").read()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    data = raw[8 + size :]
    end = 0
    tensors = {}
    assert size % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, after = entry["data_offsets"]
        assert begin == end, "holes are not allowed"
        end = after
        part = data[begin:after]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(
                np.float32
            )
        else:
            array = np.frombuffer(
                part, np.uint8 if entry["dtype"] == "F8_E4M3" else WIDTH[entry["dtype"]]
            )
        tensors[name] = array.reshape(entry["shape"])
    assert end == len(data)
    return tensors
