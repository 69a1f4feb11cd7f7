"""The text of a compiled program as data: computations, their instructions, shapes and
bytes.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

# Bits of an element where the name does not say them.
_BITS = {"pred": 8, "token": 0, "opaque": 0}


class Array(NamedTuple):
    """The type of one array: `dtype` in HLO's names ("f8e4m3fn"), and its sizes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype)
        return (
            self.elements
            * (int(re.match(r"[a-z]+(\d+)", self.dtype)[1]) if bits is None else bits)
            // 8
        )


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name, opcode: as written; `opcode` keeps a "-start" or "-done".
        type: the text of its type.
        operands: the names of its operands.
        rest: what is written after the operands: attributes.
        text: inside of the operands' parentheses, for parameters and constants.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    rest: str
    text: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its type, those of nested tuples in order."""
        return arrays(self.type)

    def attribute(self, name: str) -> str | None:
        """The value of `name=value` or of `"name":"value"`, without a leading % or
        quotes.
        """
        found = re.search(rf'(?:\b{name}=|"{name}":)%?"?([\w.\-$]+)', self.rest)
        return found[1] if found else None

    def called(self, *names: str) -> list[str]:
        """The computations that the attributes `names` name."""
        return [value for value in map(self.attribute, names) if value]

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1].replace("\\'", "'") if found else ""


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """In the order of their numbers."""
        return sorted(
            (i for i in self.instructions.values() if i.opcode == "parameter"),
            key=lambda i: int(i.text),
        )

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found[operand].append(instruction)
        return found


@dataclasses.dataclass
class Module:
    """A program; `taken` says which branch of each conditional runs, that of True or of
    False, where that is known.
    """

    computations: dict[str, Computation]
    entry: Computation
    taken: bool | None = None


def parse(text: str) -> Module:
    """The module that `jax.jit(f).lower(...).compile().as_text()` prints.

    Raises:
        ValueError: there is no entry computation, or a line is not understood.
    """
    computations = {}
    entry = None
    current = None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line)
        if header and " = " not in line.split("(")[0]:
            current = computations[header[2]] = Computation(header[2], {})
            entry = current if header[1] else entry
        elif current is not None and line.startswith("}"):
            current = None
        elif current is not None and line.strip():
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("no ENTRY computation: is this the text of a compiled module?")
    return Module(computations, entry)


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays in the text of a type: `(f32[2,3]{1,0}, s32[])` has two."""
    return tuple(
        Array(dtype, sizes(of))
        for dtype, of in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text)
    )


def sizes(text: str) -> tuple[int, ...]:
    """The numbers of a list like `2,3`."""
    return tuple(int(n) for n in text.split(",") if n)


def _instruction(line: str) -> Instruction:
    match = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if not match:
        raise ValueError(f"not an instruction: {line!r}")
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_ = rest[:end]
    rest = rest[end:].lstrip()
    opened = rest.index("(")
    closed = _closing(rest, opened)
    text = rest[opened + 1 : closed]
    return Instruction(
        name=match[2],
        opcode=rest[:opened],
        type=type_,
        operands=tuple(re.findall(r"%([\w.\-]+)", text)),
        rest=rest[closed + 1 :],
        text=text,
        is_root=bool(match[1]),
    )


def _closing(text: str, opened: int) -> int:
    """Where the parenthesis at `opened` is closed."""
    depth = 0
    for i in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"a parenthesis is not closed: {text!r}")
