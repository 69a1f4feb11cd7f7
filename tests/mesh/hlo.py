"""What a compiled program sends and multiplies, with the shapes of one device; the text
is read by `aot/hlo.py`.
"""

import dataclasses

from aot import count, hlo

# Options of `compile` for programs that are only read: the machine code is not
# optimized, the program is.
QUICKLY = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
            "collective-permute".
        results: `(dtype, shape)` of each, in HLO's names: ("u8", (4, 8)).
        reducer: "maximum", "add", ... of the kinds that reduce; else None.
    """

    kind: str
    results: tuple[hlo.Array, ...]
    reducer: str | None

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
            reducer = module.computations[applied].root.opcode if applied else None
            found.append(
                Collective(kind, count.results(computation, instruction), reducer)
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
