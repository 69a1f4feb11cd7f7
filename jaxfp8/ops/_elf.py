"""The check of compiled modules: a file must be as long as its own ELF headers say.

The system's loader maps a file into memory without a look at its length. Where the file is shorter than its headers
say, the first access behind its end kills the process by SIGBUS, which Python cannot catch.
"""

import struct

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")


def fault(path: str) -> str:
    """Return why the loader must not see the file, a clause; an empty string where the loader may see it.

    The loader itself refuses a file that is not a 64-bit little-endian ELF file.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        header = file.read(_HEADER.size)
        if not header.startswith(_MAGIC):
            return "" if header else "the file is empty"
        if len(header) < _HEADER.size:
            return _truncated(size, _HEADER.size)
        _, _, machine, _, _, segments, sections, _, _, segment_size, count, section_size, section_count, _ = (
            _HEADER.unpack(header)
        )
        if (expected := _machine()) not in (machine, 0):
            return f"the file is for another processor: its ELF machine is {machine}, that of this process {expected}"
        if segment_size != _SEGMENT.size:
            return f"the program headers have {segment_size} bytes each, expected {_SEGMENT.size}"
        # 1. Check that the tables of segments and sections fit. The linker puts the table of sections last.
        end = max(segments + segment_size * count, sections + section_size * section_count)
        if end > size:
            return _truncated(size, end)
        # 2. Check that the segments fit, which the loader maps.
        file.seek(segments)
        for _, _, offset, _, _, length, _, _ in _SEGMENT.iter_unpack(file.read(segment_size * count)):
            end = max(end, offset + length)
        return _truncated(size, end) if end > size else ""


def _truncated(size: int, end: int) -> str:
    return f"the file is truncated: it has {size} bytes, its headers say {end}"


def _machine() -> int:
    """Return the ELF machine of this process; 0 where the system does not show it."""
    try:
        with open("/proc/self/exe", "rb") as file:
            header = file.read(_HEADER.size)
    except OSError:
        return 0
    return _HEADER.unpack(header)[2] if header.startswith(_MAGIC) and len(header) == _HEADER.size else 0
