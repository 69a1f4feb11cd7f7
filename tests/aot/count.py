"""Counts what a compiled H200 program does: launches, bytes, GEMMs, copies, reads,
collectives. Nothing runs.

Rules:

- **A launch** is whatever becomes a kernel, memcpy, memset or library call: a fusion, a
  custom call, a copy, a collective, any operation by itself. Parameters, constants,
  tuples, bitcasts and what else only names memory is none. A pair `x-start`, `x-done`
  is one. What a `while` does counts as often as its trip count says (XLA then evaluates
  no condition), what a `call` does, once.
- A custom call is one launch, although its handler may start several kernels or a
  memset: the program does not say.
- **A GEMM** is a cuBLAS(Lt) call, a `jaxfp8_scaled_matmul` or a fusion with a `dot`. It
  is **FP8** if both factors are.
- **Bytes** of a launch: those of its operands and results. A fusion that slices an
  operand reads the slice, one that updates an operand in place writes the update. GEMMs
  have none here, and collectives their own count.
- **A copy** is a launch that only moves a tensor of at least `TENSOR` elements: copy,
  transpose, slice, update, ...
- **A read** of an argument is a launch, no GEMM, that takes all of it, in whatever
  dtype and layout it then is: the argument, or what a launch made of it with as many
  elements and of nothing else that large.
"""

import dataclasses
import math
import re
from collections import Counter

import jax

from . import hlo

TENSOR = 2**16  # elements; amax histories, scales and biases are smaller

_NO_LAUNCH = {
    "add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element",
    "opt-barrier", "parameter", "tuple",
}  # fmt: skip
_NO_LAUNCH_TARGETS = {"AllocateBuffer", "PinToDevice", "Sharding"}
COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast",
    "collective-permute", "ragged-all-to-all", "reduce-scatter",
}  # fmt: skip
_MOVES = {
    "concatenate",
    "copy",
    "dynamic-slice",
    "dynamic-update-slice",
    "pad",
    "reverse",
    "slice",
    "transpose",
}
_FREE_OF_MEMORY = {
    "bitcast",
    "constant",
    "get-tuple-element",
    "parameter",
    "reshape",
    "tuple",
}
_GEMM_TARGETS = re.compile(r"__cublas\$|jaxfp8_\w*matmul_")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launched instruction.

    Attributes:
        instruction, computation: what and where.
        kind: its opcode, without "-start".
        times: how often it runs in a step.
        in_loop: whether it is in the body of a loop.
        is_gemm, is_fp8: see the rules above.
        is_copy: only moves a tensor.
        bytes: of operands and results, once; workspaces of GEMMs not.
    """

    instruction: hlo.Instruction
    computation: hlo.Computation
    kind: str
    times: int
    in_loop: bool
    is_gemm: bool
    is_fp8: bool
    is_copy: bool
    bytes: int

    @property
    def is_collective(self) -> bool:
        return self.kind in COLLECTIVES


def launches(module: hlo.Module) -> list[Launch]:
    """Of the whole program.

    Raises:
        ValueError: a loop has no known trip count, or there is a conditional and the
            module does not say which branch is taken: what runs is not known.
    """
    found = []

    def visit(computation, times, in_loop=False):
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                (body,) = instruction.called("body")
                trips = trip_count(instruction)
                visit(module.computations[body], times * trips, True)
            elif opcode == "conditional":
                if module.taken is None:
                    raise ValueError(
                        f"{instruction.name}: which branch runs is not known"
                    )
                (branch,) = instruction.called(
                    "true_computation" if module.taken else "false_computation"
                )
                visit(module.computations[branch], times, in_loop)
            elif opcode in ("call", "async-start"):
                (called,) = instruction.called("to_apply", "calls")
                visit(module.computations[called], times, in_loop)
            elif not (
                opcode in _NO_LAUNCH
                or opcode.endswith(("-done", "-update"))
                or instruction.attribute("custom_call_target") in _NO_LAUNCH_TARGETS
            ):
                found.append(_launch(module, computation, instruction, times, in_loop))

    visit(module.entry, 1)
    return found


def trip_count(loop: hlo.Instruction) -> int:
    """How often a `while` runs its body."""
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if not trips:
        raise ValueError(
            f"{loop.name}: a loop whose trip count the program does not say"
        )
    return int(trips[1])


def is_product(instruction: hlo.Instruction) -> bool:
    """Whether an instruction is a matrix product: a `dot`, or the call of a library."""
    target = instruction.attribute("custom_call_target") or ""
    return instruction.opcode == "dot" or bool(_GEMM_TARGETS.match(target))


def _launch(module, computation, instruction, times, in_loop) -> Launch:
    kind = instruction.opcode.removesuffix("-start")
    body = (
        module.computations[instruction.attribute("calls")]
        if kind == "fusion"
        else None
    )
    is_gemm, is_fp8 = _gemm(computation, instruction, body)
    return Launch(
        instruction=instruction,
        computation=computation,
        kind=kind,
        times=times,
        in_loop=in_loop,
        is_gemm=is_gemm,
        is_fp8=is_fp8,
        is_copy=not is_gemm and _only_moves(computation, instruction, kind, body),
        bytes=_bytes(computation, instruction, kind, body),
    )


def _gemm(computation, instruction, body) -> tuple[bool, bool]:
    """Whether it is one, and in FP8."""
    for inside in body.instructions.values() if body else [instruction]:
        around = body or computation
        if is_product(inside):
            factors = [
                around.instructions[name].arrays[0].dtype
                for name in inside.operands[:2]
            ]
            return True, all(dtype.startswith("f8") for dtype in factors)
    return False, False


def _only_moves(computation, instruction, kind, body) -> bool:
    if max((a.elements for a in results(computation, instruction)), default=0) < TENSOR:
        return False
    if body is None:
        return kind in _MOVES
    # Arithmetic on indices is on scalars.
    tensors = [i for i in body.instructions.values() if any(a.shape for a in i.arrays)]
    opcodes = {i.opcode for i in tensors}
    return bool(opcodes & _MOVES) and opcodes <= _MOVES | _FREE_OF_MEMORY


def results(computation, instruction) -> tuple[hlo.Array, ...]:
    """The arrays that a launch writes; the type of `x-start` has operands as well, that
    of its `x-done` has not.
    """
    while not instruction.opcode.endswith("-done") and instruction.opcode.endswith(
        ("-start", "-update")
    ):
        instruction = next(
            i
            for i in computation.users[instruction.name]
            if i.opcode.endswith(("-done", "-update"))
        )
    return instruction.arrays


def _bytes(computation, instruction, kind, body) -> int:
    if body is None:
        operands = [
            computation.instructions[name]
            for name in dict.fromkeys(instruction.operands)
        ]
        if kind in ("slice", "dynamic-slice"):
            return 2 * instruction.arrays[0].bytes
        if kind == "dynamic-update-slice":
            return 2 * operands[1].arrays[0].bytes
        read = sum(a.bytes for operand in operands for a in operand.arrays)
        return read + sum(a.bytes for a in results(computation, instruction))
    read = {}
    for name, parameter in zip(instruction.operands, body.parameters, strict=True):
        read[name] = max(read.get(name, 0), _read(body, parameter))
    root = body.root
    written = (
        [body.instructions[name] for name in root.operands]
        if root.opcode == "tuple"
        else [root]
    )
    return sum(read.values()) + sum(_written(body, result) for result in written)


def _read(body, parameter) -> int:
    """How much of a parameter a fusion reads."""
    total = 0
    names = [parameter.name]
    while names:
        name = names.pop()
        for user in body.users[name]:
            if user.opcode == "bitcast":
                names.append(user.name)
            elif user.opcode in ("slice", "dynamic-slice") and user.operands[0] == name:
                total += user.arrays[0].bytes
            elif user.opcode != "dynamic-update-slice" or name in user.operands[1:]:
                return sum(a.bytes for a in parameter.arrays)
    return min(total, sum(a.bytes for a in parameter.arrays))


def _written(body, result) -> int:
    while result.opcode == "bitcast":
        result = body.instructions[result.operands[0]]
    if result.opcode == "dynamic-update-slice" and _is_parameter(
        body, result.operands[0]
    ):
        result = body.instructions[result.operands[1]]
    return sum(a.bytes for a in result.arrays)


def _is_parameter(body, name) -> bool:
    while body.instructions[name].opcode == "bitcast":
        name = body.instructions[name].operands[0]
    return body.instructions[name].opcode == "parameter"


def reads(module: hlo.Module, argument: str) -> int:
    """How often the step reads all of one argument outside of GEMMs, in the entry
    computation.

    Args:
        module: the program.
        argument: how the argument's name in the program ends: "x", "['kernel']".

    Raises:
        ValueError: no argument, or several, are called so.
    """
    entry = module.entry
    found = [p for p in entry.parameters if p.op_name.endswith(argument)]
    if len(found) != 1:
        raise ValueError(
            f"{argument}: expected one argument, found "
            f"{[p.op_name for p in entry.parameters]}"
        )
    (parameter,) = found
    size = parameter.arrays[0].elements
    launched = {
        launch.instruction.name: launch
        for launch in launches(module)
        if launch.computation is entry
    }
    versions = {parameter.name}
    count = 0
    for instruction in entry.instructions.values():
        if not versions & set(instruction.operands):
            continue
        launch = launched.get(instruction.name)
        if launch is None:
            if (
                instruction.opcode == "get-tuple-element"
                and instruction.arrays[0].elements != size
            ):
                continue
            versions.add(instruction.name)
        elif not launch.is_gemm:
            count += 1
            others = (
                entry.instructions[n] for n in instruction.operands if n not in versions
            )
            alone = all(a.elements < size for other in others for a in other.arrays)
            if alone and any(a.elements == size for a in results(entry, instruction)):
                versions.add(instruction.name)
    return count


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a step: `bytes` of its results on one device (of its operands,
    for a reduce-scatter).
    """

    kind: str
    dtypes: tuple[str, ...]
    reducer: str | None
    times: int
    bytes: int
    in_loop: bool


def collectives(module: hlo.Module) -> list[Collective]:
    found = []
    for launch in launches(module):
        if not launch.is_collective:
            continue
        instruction = launch.instruction
        arrays = results(launch.computation, launch.instruction)
        if launch.kind == "reduce-scatter":
            arrays = [
                a
                for name in instruction.operands
                for a in launch.computation.instructions[name].arrays
            ]
        reducer = instruction.attribute("to_apply")
        found.append(
            Collective(
                launch.kind,
                tuple(sorted({a.dtype for a in arrays})),
                module.computations[reducer].root.opcode if reducer else None,
                launch.times,
                sum(a.bytes for a in arrays),
                launch.in_loop,
            )
        )
    return found


def summary(text: str, tensors=(), taken: bool | None = None) -> dict:
    """The counts of a program as JSON holds them.

    `tensors` are the arguments whose reads count, `taken` is that of the module.
    """
    module = dataclasses.replace(hlo.parse(text), taken=taken)
    launched = launches(module)
    gemms = [launch for launch in launched if launch.is_gemm]

    def total(what, of=launched):
        return sum(launch.times * what(launch) for launch in of)

    return {
        "launches": total(lambda launch: 1),
        "kinds": dict(
            sum(
                (Counter({launch.kind: launch.times}) for launch in launched), Counter()
            )
        ),
        "gemms": total(lambda launch: 1, gemms),
        "fp8_gemms": total(lambda launch: launch.is_fp8, gemms),
        "bytes": total(
            lambda launch: (
                launch.bytes * (not launch.is_gemm and not launch.is_collective)
            )
        ),
        "copies": total(lambda launch: launch.is_copy),
        "reads": [reads(module, name) for name in tensors],
        "collectives": [dataclasses.asdict(c) for c in collectives(module)],
    }


def stablehlo_operations(text: str) -> int:
    """The operations of a lowered program, constants included."""
    return len(re.findall(r"^\s+%\S+ = ", text, re.MULTILINE))


def residual_bytes(function, *arguments) -> int:
    """What `jax.vjp` of a function holds until the backward, at JAX level: nothing
    runs.
    """
    _, vjp = jax.eval_shape(lambda *a: jax.vjp(function, *a), *arguments)
    return total_bytes(vjp)


def total_bytes(tree) -> int:
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
