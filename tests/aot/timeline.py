"""A time line of a program compiled for H200s: the order in which XLA scheduled it,
replayed with assumed rates. Nothing runs.

One stream computes, one has the collectives, one the asynchronous copies. A launch
starts when its stream is free, and `x-done` waits for its `x-start`. Assumptions:

- A product takes its FLOPs at the sustained rate of its kind, any other launch its
  bytes at the rate of the memory; each launch `launch` seconds more.
- A collective of D devices takes `collective` seconds and the time of its bytes times
  (D - 1)/D on the wire, an all-reduce twice that. It slows down no kernel.

So times are good for comparing programs. `benchmarks/timeline.py` has them beside an
H200's record.
"""

import dataclasses
import math
import re
from typing import NamedTuple

from . import count, hlo


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one H200 does in a second, as `benchmarks/results/h200_gpu.json` has it; and
    seconds of a launch and of starting a collective.

    Attributes:
        fp8, bf16, blocks: FLOPs of products: of one scale a tensor, in bfloat16, and
            of block scales.
        memory, wire: bytes of the memory, and of NVLink 4.
    """

    fp8: float = 1257e12
    bf16: float = 688e12
    blocks: float = 1115e12
    memory: float = 3.4e12
    wire: float = 370e9
    launch: float = 1.5e-6
    collective: float = 15e-6

    def scaled(self, **factors: float) -> "Rates":
        """These rates, those that are named times a factor."""
        changed = {name: getattr(self, name) * by for name, by in factors.items()}
        return dataclasses.replace(self, **changed)


RATES = Rates()
# Collectives that take no time: what a program would take if all were hidden.
HIDDEN = dataclasses.replace(RATES, wire=math.inf, collective=0.0)
PERTURBED = {
    "wire -30 %": RATES.scaled(wire=0.7),
    "wire +30 %": RATES.scaled(wire=1.3),
    "memory -20 %": RATES.scaled(memory=0.8),
    "memory +20 %": RATES.scaled(memory=1.2),
}


class Times(NamedTuple):
    """Seconds of a step: in all, of products, of other launches, of collectives; and
    what the compute stream waits for collectives in one pass of each loop, or in a
    program without loops.
    """

    total: float = 0.0
    products: float = 0.0
    other: float = 0.0
    collectives: float = 0.0
    waits: float = 0.0


def replay(module: hlo.Module, rates: Rates = RATES) -> Times:
    """The time line of a program.

    Raises:
        ValueError: a loop has no known trip count, or there is a computation that the
            time line does not know: a branch, or an asynchronous one.
    """
    launches = {
        (launch.computation.name, launch.instruction.name): launch
        for launch in count.launches(module)
    }
    return _replay(module, module.entry, launches, rates)


def _replay(module, computation, launches, rates) -> Times:
    now = on_wire = on_copies = products = other = collectives = 0.0
    waits = 0.0
    waits_of_loops = 0.0
    ends = {}
    for name, instruction in computation.instructions.items():
        inner, trips = _called(module, instruction)
        launch = launches.get((computation.name, name))
        if inner is not None:
            times = _replay(module, inner, launches, rates)
            now = max(now, on_wire if instruction.opcode == "while" else 0.0)
            now += trips * times.total
            products += trips * times.products
            other += trips * times.other
            collectives += trips * times.collectives
            waits_of_loops += times.waits
        elif instruction.opcode.endswith("-done"):
            end, is_collective = ends.get(instruction.operands[0], (0.0, False))
            wait = max(0.0, end - now)
            now += wait
            waits += wait * is_collective
        elif launch is not None and launch.is_collective:
            seconds = _seconds_of_collective(launch, rates)
            collectives += seconds
            on_wire = max(now, on_wire) + seconds
            if instruction.opcode.endswith("-start"):
                ends[name] = on_wire, True
            else:
                waits += on_wire - now
                now = on_wire
        elif launch is not None:
            seconds = rates.launch + _seconds_of_launch(module, launch, rates)
            products += seconds * launch.is_gemm
            other += seconds * (not launch.is_gemm)
            if instruction.opcode.endswith("-start"):
                on_copies = max(now, on_copies) + seconds
                ends[name] = on_copies, False
            else:
                now += seconds
    total = max(now, on_wire)
    return Times(total, products, other, collectives, waits + waits_of_loops)


def _called(module, instruction):
    """The computation that an instruction runs in its place, and how often."""
    if instruction.opcode == "while":
        body = module.computations[instruction.called("body")[0]]
        return body, count.trip_count(instruction)
    if instruction.opcode == "call":
        return module.computations[instruction.called("to_apply", "calls")[0]], 1
    if instruction.opcode in ("conditional", "async-start"):
        raise ValueError(f"{instruction.name}: the time line knows no such computation")
    return None, 0


def _seconds_of_collective(launch, rates) -> float:
    instruction, computation = launch.instruction, launch.computation
    arrays = count.results(computation, instruction)
    if launch.kind == "reduce-scatter":
        operands = map(computation.instructions.get, instruction.operands)
        arrays = [array for operand in operands for array in operand.arrays]
    devices = _devices(instruction)
    size = sum(array.bytes for array in arrays) * (devices - 1) / devices
    return rates.collective + size * (1 + (launch.kind == "all-reduce")) / rates.wire


def _devices(instruction) -> int:
    """How many devices one group of a collective has.

    XLA writes groups in three ways: `[1,8]<=[8]`, `{{0,1},{2,3}}`, and by axes,
    `mesh['axis_0'=4,'axis_1'=2] {'axis_0'}`, where the order of devices may stand
    before the axes.
    """
    groups = instruction.rest.partition("replica_groups=")[2]
    if groups.startswith("mesh["):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", groups.partition("]")[0]))
        named = re.search(r"\]\S* ?\S* \{([^}]*)\}", groups)[1]
        return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", named))
    if groups.startswith("["):
        return int(re.match(r"\[\d+,(\d+)\]", groups)[1])
    return len(re.match(r"\{\{([\d,]+)\}", groups)[1].split(","))


def _seconds_of_launch(module, launch, rates) -> float:
    if not launch.is_gemm:
        return launch.bytes / rates.memory
    computation, instruction = launch.computation, launch.instruction
    if launch.kind == "fusion":
        computation = module.computations[instruction.attribute("calls")]
        instruction = next(
            i for i in computation.instructions.values() if count.is_product(i)
        )
    target = instruction.attribute("custom_call_target") or ""
    rate = rates.fp8 if launch.is_fp8 else rates.bf16
    if "block_scaled" in target:
        rate = rates.blocks
    a, b = (
        computation.instructions[name].arrays[0] for name in instruction.operands[:2]
    )
    out = instruction.arrays[0]
    # Each of m, n and k is in two of the three arrays, each batch in all.
    batch = math.prod(out.shape[:-2])
    return 2 * math.sqrt(a.elements * b.elements * out.elements / batch) / rate


def profile(module: hlo.Module) -> str:
    """What each launch of a program takes, in the form of a profile that XLA's
    scheduler reads: a `ProfiledInstructionsProto` as text.
    """
    lines = []
    for launch in count.launches(module):
        if launch.is_collective:
            seconds = _seconds_of_collective(launch, RATES)
        else:
            seconds = RATES.launch + _seconds_of_launch(module, launch, RATES)
        name = launch.instruction.name
        lines.append(f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n')
    return "".join(lines)


def summary(text: str) -> dict:
    """The time line of a compiled program as JSON holds it: milliseconds, and
    microseconds of waits.
    """
    module = hlo.parse(text)
    times = replay(module)
    hidden = replay(module, HIDDEN)
    return {
        "ms": 1e3 * times.total,
        "hidden_ms": 1e3 * hidden.total,
        "products_ms": 1e3 * times.products,
        "other_ms": 1e3 * times.other,
        "collectives_ms": 1e3 * times.collectives,
        "wait_us": 1e6 * times.waits,
        "perturbed_ms": {
            name: 1e3 * replay(module, rates).total for name, rates in PERTURBED.items()
        },
    }
