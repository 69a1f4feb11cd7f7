"""What a compiled program says it does: its collectives and custom calls, with the shapes of one device."""

import dataclasses
import math
import re

import numpy as np

# Options of `compile` for programs that are only read: the machine code is not optimized, the program is.
QUICKLY = {"xla_backend_optimization_level": 0}

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_BITS = {"pred": 8, "bf16": 16}
_PART = r"'(\w+)'(?::\((\d+)\)(\d+))?"  # of a mesh axis


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        results: `(dtype, shape)` of each, in HLO's names: ("u8", (4, 8)).
        reducer: "maximum", "add", ... of the kinds that reduce; else None.
        groups: the devices that take part, a frozenset for each group; empty for collective-permute.
        computation: the name of the computation it is in.
    """

    kind: str
    results: tuple
    reducer: str | None
    groups: tuple
    computation: str

    @property
    def is_amax(self) -> bool:
        return self.kind == "all-reduce" and self.reducer == "maximum"

    @property
    def bytes(self) -> int:
        """Of all results, on one device."""
        return sum(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in self.results)

    def __str__(self) -> str:
        results = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.results)
        return f"{self.kind} {self.reducer or ''} ({results})"


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, `jax.jit(f).lower(...).compile().as_text()`."""
    found, roots, computation = [], {}, ""
    for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = header[1]
        if root := re.match(r"\s+ROOT %?\S+ = \S+ ([\w\-]+)\(", line):
            roots[computation] = root[1]
        if match := re.match(rf"\s+(?:ROOT )?%?\S+ = (.*?) ({_KINDS})(?:-start)?\(", line):
            found.append((match[2], match[1], line, computation))
    result = []
    for kind, types, line, computation in found:
        applied = re.search(r"to_apply=%?([\w.\-]+)", line)
        reducer = roots[applied[1]] if applied else None
        results = _types(types)
        if types.startswith("(("):  # asynchronous: the operands and the results
            results = results[len(results) // 2 :]
        result.append(Collective(kind, results, reducer, _groups(line), computation))
    return result


def custom_calls(text: str, targets: str) -> list[tuple]:
    """The operands of each custom call whose target begins with `targets`: tuples of `(dtype, shape)`."""
    found = re.findall(rf'custom_call_target="{targets}[^"]*", operand_layout_constraints=\{{(.*?)\}}, \w+=', text)
    return [_types(operands) for operands in found]


def multiplications(text: str) -> int:
    """How many products of two numbers one device computes in matrix products."""
    shapes = {name: sizes for name, sizes in re.findall(r"%?([\w.\-]+) = [a-z]+\d*\w*\[([\d,]*)\]", text)}
    total = 0
    for result, a, contracting in re.findall(
        r"= \w+\[([\d,]*)\]\S* dot\(%?([\w.\-]+),.*?lhs_contracting_dims=\{([\d,]*)\}", text
    ):
        sizes = _sizes(shapes[a])
        total += math.prod(_sizes(result)) * math.prod(sizes[d] for d in _sizes(contracting))
    return total


def loop_bodies(text: str) -> set[str]:
    """The computations that run inside of while loops: their bodies and all that these call."""
    calls, computation = {}, ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = header[1]
        names = re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)", line)
        names += [
            n.strip(" %") for group in re.findall(r"branch_computations=\{(.*?)\}", line) for n in group.split(",")
        ]
        calls.setdefault(computation, set()).update(names)
    found = set(re.findall(r"body=%?([\w.\-]+)", text))
    while more := set().union(*(calls.get(name, ()) for name in found)) - found:
        found |= more
    return found


def _types(text) -> tuple:
    return tuple((dtype, _sizes(sizes)) for dtype, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", text))


def _sizes(text) -> tuple:
    return tuple(int(n) for n in text.split(",") if n)


def _bits(dtype) -> int:
    return _BITS.get(dtype) or int(re.match(r"[a-z]+(\d+)", dtype)[1])


def _groups(line) -> tuple:
    """The groups of devices, in any of the ways to write them:

    `{{0,1},{2,3}}`; `[2,4]<=[2,2,2]T(0,2,1)`: an iota, reshaped, transposed, in rows; `mesh['a'=2,'b'=4]` with
    `device_ids=([2,2,2]T(0,2,1))` or none, `{'b'}`: rows of that iota as a mesh, along some of its axes; or
    `{'b':(2)2}`, along a part of one, of size 2 after 2.
    """
    if " collective-permute(" in line:
        return ()
    if written := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", line):
        return tuple(frozenset(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", written[1]))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        devices = _iota(iota[2], iota[3]).reshape(_sizes(iota[1]))
    else:
        pattern = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
        mesh = re.search(pattern, line)
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        # Each axis is three: before, of and after the part that is named; an axis that is named whole has itself there.
        parts = {name: (int(before or 1), size) for name, before, size in re.findall(_PART, mesh[4])}
        sizes = []
        for name, whole in axes.items():
            before, size = parts.get(name, (1, 1))
            sizes += [before, int(size or whole), whole // before // int(size or whole)]
        along = [3 * list(axes).index(name) + 1 for name in parts]
        devices = _iota(mesh[2] or str(math.prod(sizes)), mesh[3]).reshape(sizes)
        devices = np.moveaxis(devices, along, range(-len(along), 0))
        devices = devices.reshape(-1, math.prod(sizes[axis] for axis in along))
    return tuple(map(frozenset, devices.tolist()))


def _iota(dims, order):
    devices = np.arange(math.prod(_sizes(dims))).reshape(_sizes(dims))
    return devices if order is None else devices.transpose(_sizes(order))
