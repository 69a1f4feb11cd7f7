"""Counts the instructions of the built CUDA kernels:
`python tools/sass.py LIBRARY [PATTERN] [ARCHITECTURE]`.

A kernel that streams memory is limited by bandwidth only while it issues few
instructions an element, and that can be read without a GPU. The disassembler comes with
the extra `toolkit`. For each kernel whose demangled name matches PATTERN the program
prints its loops: the instructions that a thread executes in one pass of the loop's fast
path, and the bytes that it moves. tests/cuda/test_sass.py asserts the figures of the
kernels that matter.

The fast path of a loop is the path from its head back to its head that moves the most
bytes by unconditional loads, then the most bytes, both by wide accesses, and of those
paths the one with the fewest instructions: whole tiles, no special cases. An inner loop
counts once in the loop around it; `trips` says how often it really runs.
"""

import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One SASS instruction.

    Attributes:
        address: its offset in the kernel, in bytes.
        guard: its predicate without the `@`; empty where it always executes.
        opcode: with its modifiers, such as "LDG.E.128.CONSTANT".
        operands: the rest of the line.
    """

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that a branch names."""
        match = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(match[1], 16) if match else None

    @property
    def bytes(self) -> int:
        """How many bytes an access to memory moves."""
        return next(
            (_WIDTHS[part] for part in self.opcode.split(".") if part in _WIDTHS), 4
        )


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one pass over a path costs a thread.

    Attributes:
        loaded: bytes of global memory by wide loads that always execute. Wide are loads
            of 16 bytes and stores of at least 8: less is a parameter, or a special
            case.
        moved: bytes of global memory by all wide loads and stores.
        instructions: of the path.
    """

    loaded: int = 0
    moved: int = 0
    instructions: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.loaded + other.loaded,
            self.moved + other.moved,
            self.instructions + other.instructions,
        )

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.loaded, self.moved, -self.instructions


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel: the addresses of its head and of its last branch, its depth
    from 1, its fast path's cost.
    """

    head: int
    end: int
    depth: int
    cost: Cost


def find_tool(name: str) -> str | None:
    """Returns the path of a program of the CUDA toolkit: of the wheels beside this
    Python, else of the machine.
    """
    wheel = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", name)
    return str(wheel) if wheel.exists() else shutil.which(name)


def disassemble(
    library: str, names: list[str] | None = None, architecture: str = "sm_90a"
) -> dict[str, list]:
    """Returns the instructions of kernels by mangled name; of all kernels of the
    library without `names`.
    """
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    if not (cuobjdump and nvdisasm):
        raise FileNotFoundError(
            "cuobjdump and nvdisasm are needed: pip install 'jaxfp8[toolkit]'"
        )
    command = [
        cuobjdump,
        "-sass",
        "-arch",
        architecture,
        *(["-fun", ",".join(names)] if names else []),
        library,
    ]
    # cuobjdump looks for nvdisasm on the path. It warns about each object that lacks
    # one of the names.
    environment = {"PATH": str(pathlib.Path(nvdisasm).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump failed: {done.stderr[-2000:]}")
    kernels, instructions = {}, []
    for line in done.stdout.splitlines():
        if "Function : " in line:
            instructions = kernels[line.split("Function : ")[1].strip()] = []
        elif match := _INSTRUCTION.match(line):
            guard, operands = match["guard"] or "", match["operands"].strip()
            instructions.append(
                Instruction(int(match["address"], 16), guard, match["opcode"], operands)
            )
    return kernels


def _blocks(
    instructions: list[Instruction],
) -> tuple[dict[int, list], dict[int, list[int]]]:
    """Returns the basic blocks by their first address, and the first addresses of the
    blocks that follow each.
    """
    # barrier register -> where threads that wait on it go on
    joins: dict[str, set[int]] = {}
    for instruction in instructions:
        if instruction.base == "BSSY":
            joins.setdefault(instruction.operands.split(",")[0], set()).add(
                instruction.target
            )

    def jumps(instruction, following):
        if instruction.base in ("BRA", "JMP"):
            always = (
                not instruction.guard and "P" not in instruction.operands.split("0x")[0]
            )
            return [instruction.target] + ([] if always else [following])
        if instruction.base in ("EXIT", "RET"):
            return [following] if instruction.guard else []
        if instruction.base == "BSYNC":
            targets = joins.get(instruction.operands.strip(), set())
            return (
                [following]
                if following in targets or instruction.guard
                else sorted(targets)
            )
        return None

    leaders = {instructions[0].address}
    successors = {}
    for this, following in zip(instructions, [*instructions[1:], None], strict=True):
        after = following.address if following else None
        successors[this.address] = jumps(this, after)
        if successors[this.address] is not None:
            leaders |= {a for a in [*successors[this.address], after] if a is not None}
    blocks, head = {}, None
    for instruction in instructions:
        if instruction.address in leaders:
            head = instruction.address
            blocks[head] = []
        blocks[head].append(instruction)
    order = sorted(blocks)
    edges = {}
    for head, following in zip(order, [*order[1:], None], strict=True):
        ends = successors[blocks[head][-1].address]
        edges[head] = [
            a for a in ([following] if ends is None else ends) if a in blocks
        ]
    return blocks, edges


def _cost(block: list[Instruction]) -> Cost:
    loads = [i for i in block if i.base == "LDG" and i.bytes == 16]
    loaded = sum(i.bytes for i in loads if not i.guard)
    moved = sum(i.bytes for i in loads) + sum(
        i.bytes for i in block if i.base == "STG" and i.bytes >= 8
    )
    return Cost(loaded, moved, sum(i.base != "NOP" for i in block))


def loops(instructions: list[Instruction], trips: int = 1) -> list[Loop]:
    """Returns the loops of a kernel, outer ones first.

    Args:
        instructions: of the kernel, from `disassemble`.
        trips: how often a loop that holds no other runs in one pass of the loop around
            it.
    """
    blocks, edges = _blocks(instructions)
    costs = {head: _cost(block) for head, block in blocks.items()}
    # The compiler lays loops out in order: an edge that goes back, or stays, closes a
    # loop. What jumps back from behind the code without reaching itself again, an
    # out-of-line piece that returns, is no loop.
    ends: dict[int, int] = {}
    for head, following in edges.items():
        for target in following:
            if target <= head and head in _reachable(edges, target, head):
                ends[target] = max(ends.get(target, 0), head)
    bodies = {
        head: {
            b
            for b in _reachable(edges, head, end)
            if end in _reachable(edges, b, end, avoid=head)
        }
        | {head}
        for head, end in ends.items()
    }
    result = []
    for head, end in ends.items():
        inner = [
            h
            for h in bodies
            if h != head and h in bodies[head] and bodies[h] < bodies[head]
        ]

        @functools.cache
        def best(block, head=head, end=end, inner=tuple(inner)):
            """The cost of the fast path from a block to the end of the loop; None where
            no path leads there.
            """
            repeats = trips if any(block in bodies[h] for h in inner) else 1
            own = costs[block]
            own = Cost(*(repeats * value for value in dataclasses.astuple(own)))
            if block == end:
                return own
            rest = [best(b) for b in edges[block] if b > block and b in bodies[head]]
            rest = [cost for cost in rest if cost is not None]
            return own + max(rest, key=lambda cost: cost.rank) if rest else None

        depth = sum(head in body for body in bodies.values())
        cost = best(head)
        # behind every kernel stands a branch to itself
        if cost is not None and cost.instructions > 1:
            result.append(Loop(head, end, depth, cost))
    return sorted(result, key=lambda loop: (loop.depth, loop.head))


def _reachable(edges, start, end, avoid=None) -> set[int]:
    """Returns the blocks from `start` to `end`, in the order of the code, that `start`
    reaches.
    """
    seen, stack = set(), [start]
    while stack:
        block = stack.pop()
        if block in seen:
            continue
        seen.add(block)
        stack += (
            [b for b in edges[block] if start <= b <= end and b != avoid]
            if block != end
            else []
        )
    return seen


def main_loop(instructions: list[Instruction], trips: int = 1) -> Loop | None:
    """Returns the innermost loop that moves nearly all of the bytes that any loop moves
    in a pass.
    """
    every = loops(instructions, trips)
    most = max((loop.cost.moved for loop in every), default=0)
    return max(
        (loop for loop in every if loop.cost.moved >= 0.75 * most),
        key=lambda loop: loop.depth,
        default=None,
    )


def demangled(names: list[str]) -> list[str]:
    """Returns names as they stand in the source, where a demangler is at hand."""
    if not (tool := shutil.which("c++filt")):
        return names
    lines = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True
    ).stdout.splitlines()
    plain = (
        re.sub(r"jaxfp8::(cuda::)?|\(anonymous namespace\)::|^void ", "", line)
        for line in lines
    )
    return [
        line.split(">(")[0] + ">" if ">(" in line else line.split("(")[0]
        for line in plain
    ]


def main(library: str, pattern: str = "", architecture: str = "sm_90a") -> None:
    """Prints the loops of every kernel whose name matches a regular expression."""
    kernels = disassemble(library, None, architecture)
    for name, instructions in zip(
        demangled(list(kernels)), kernels.values(), strict=True
    ):
        if not re.search(pattern, name):
            continue
        print(f"{name}: {sum(i.base != 'NOP' for i in instructions)} instructions")
        for loop in loops(instructions):
            cost = loop.cost
            print(
                f"  {'  ' * loop.depth}loop {loop.head:#06x}-{loop.end:#06x}: "
                f"{cost.instructions} instructions, {cost.moved} bytes"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
