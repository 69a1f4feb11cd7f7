"""What a compiled program sends and multiplies, with the shapes of one device; the text
is read by `aot/hlo.py`.
"""

import dataclasses
import math
import re

import numpy as np
from aot import count, hlo

# Options of `compile` for programs that are only read: the machine code is not
# optimized, the program is.
QUICKLY = {"xla_backend_optimization_level": 0}

_PART = r"'(\w+)'(?::\((\d+)\)(\d+))?"  # of a mesh axis


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
            "collective-permute".
        results: `(dtype, shape)` of each, in HLO's names: ("u8", (4, 8)).
        reducer: "maximum", "add", ... of the kinds that reduce; else None.
        groups: the devices that take part, a frozenset for each group; empty for
            collective-permute.
    """

    kind: str
    results: tuple[hlo.Array, ...]
    reducer: str | None
    groups: tuple

    @property
    def is_amax(self) -> bool:
        return self.kind == "all-reduce" and self.reducer == "maximum"

    @property
    def bytes(self) -> int:
        """Of all results, on one device."""
        return sum(array.bytes for array in self.results)

    def __str__(self) -> str:
        results = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.results)
        return f"{self.kind} {self.reducer or ''} ({results})"


def _instructions(text: str):
    """`(module, computation, instruction)` of each instruction."""
    module = hlo.parse(text)
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            yield module, computation, instruction


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program,
    `jax.jit(f).lower(...).compile().as_text()`.
    """
    found = []
    for module, computation, instruction in _instructions(text):
        kind = instruction.opcode.removesuffix("-start")
        applied = instruction.attribute("to_apply")
        if kind in count.COLLECTIVES:
            groups = () if kind == "collective-permute" else _groups(instruction.rest)
            reducer = module.computations[applied].root.opcode if applied else None
            found.append(
                Collective(
                    kind, count.results(computation, instruction), reducer, groups
                )
            )
    return found


def custom_calls(text: str, targets: str) -> list[tuple[hlo.Array, ...]]:
    """The operands of each custom call whose target begins with `targets`."""
    return [
        tuple(
            array
            for name in instruction.operands
            for array in computation.instructions[name].arrays
        )
        for _, computation, instruction in _instructions(text)
        if (instruction.attribute("custom_call_target") or "").startswith(targets)
    ]


def multiplications(text: str) -> int:
    """How many products of two numbers one device computes in matrix products."""
    total = 0
    for _, computation, instruction in _instructions(text):
        if instruction.opcode == "dot":
            (a,) = computation.instructions[instruction.operands[0]].arrays
            contracted = re.search(
                r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest
            )[1]
            total += instruction.arrays[0].elements * math.prod(
                a.shape[d] for d in hlo.sizes(contracted)
            )
    return total


def _groups(attributes) -> tuple:
    """The groups of devices, in any of the ways to write them:

    `{{0,1},{2,3}}`; `[2,4]<=[2,2,2]T(0,2,1)`: an iota, reshaped, transposed, in rows;
    `mesh['a'=2,'b'=4]` with `device_ids=([2,2,2]T(0,2,1))` or none, `{'b'}`: rows of
    that iota as a mesh, along some of its axes; or `{'b':(2)2}`, along a part of one,
    of size 2 after 2.
    """
    if written := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}", attributes):
        return tuple(
            frozenset(map(int, group.split(",")))
            for group in re.findall(r"\{([\d,]+)\}", written[1])
        )
    if iota := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        devices = _iota(iota[2], iota[3]).reshape(hlo.sizes(iota[1]))
    else:
        pattern = (
            r"replica_groups=mesh\[([^\]]*)\](?:, "
            r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
        )
        mesh = re.search(pattern, attributes)
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        # Each axis is three: before, of and after the part that is named; an axis that
        # is named whole has itself there.
        parts = {
            name: (int(before or 1), size)
            for name, before, size in re.findall(_PART, mesh[4])
        }
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
    devices = np.arange(math.prod(hlo.sizes(dims))).reshape(hlo.sizes(dims))
    return devices if order is None else devices.transpose(hlo.sizes(order))
