"""Counts what is in a program that XLA compiled for a TPU. Nothing runs.

- **Cycles** are XLA's own estimates, one for each fusion and copy, times the trips of
  the loops around. They are no time: only ratios of programs that one compiler compiled
  mean something. An operation without an estimate has 2^63 - 1 or no number; it counts
  as 0, and `without_estimate` counts such operations: those with 2^63 - 1, fusions, and
  reshapes of data, which move it.
- **A product** is a convolution or a dot, which TPU programs have in fusions. It is
  named by the dtypes of its factors, in alphabetical order, such as "f8e4m3fn x
  f8e5m2".
- **A collective** has the bytes of its results on one device, those of its operands for
  a reduce-scatter.
"""

import collections
import re

from aot import hlo
from aot.count import COLLECTIVES

_NO_ESTIMATE = 2**63 - 1
_SCALARS = 1024  # elements at most of amaxes and other scalars, which are no data


def count(text: str) -> dict:
    """What is in a compiled program, from its text: cycles, products, collectives."""
    module = hlo.parse(text)
    products = collections.Counter()
    collective = collections.defaultdict(lambda: [0, 0])
    cycles, without = 0, 0
    for computation, instruction, times in _run(module):
        kind = instruction.opcode.removesuffix("-start")
        for factors in _products(module, computation, instruction):
            products[factors] += times
        if kind in COLLECTIVES:
            arrays = instruction.arrays
            if kind == "reduce-scatter" or instruction.opcode.endswith("-start"):
                arrays = [
                    a
                    for name in instruction.operands
                    for a in computation.instructions[name].arrays
                ]
                if kind == "all-gather":
                    arrays = instruction.arrays[len(arrays) :]
            for array in arrays:
                if array.elements > _SCALARS:
                    found = collective[f"{kind} {array.dtype}"]
                    found[0] += times
                    found[1] += times * array.bytes
        estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
        if estimate and int(estimate[1]) != _NO_ESTIMATE:
            cycles += times * int(estimate[1])
        elif (
            estimate
            or kind == "fusion"
            or (kind == "reshape" and instruction.arrays[0].elements > _SCALARS)
        ):
            without += times
    return {
        "cycles": cycles,
        "without_estimate": without,
        "products": dict(sorted(products.items())),
        "collectives": {
            name: {"times": n, "bytes": size}
            for name, (n, size) in sorted(collective.items())
        },
    }


def _run(module):
    """Every instruction outside of fusions, with its computation and how often it
    runs.
    """

    def visit(computation, times):
        for instruction in computation.instructions.values():
            yield computation, instruction, times
            if instruction.opcode == "while":
                condition, body = (
                    module.computations[instruction.attribute(name)]
                    for name in ("condition", "body")
                )
                yield from visit(body, times * _trips(condition))
            elif (
                instruction.opcode != "fusion" and instruction.opcode not in COLLECTIVES
            ):
                # A call, or a collective that runs beside other work: its opcode is in
                # the computation that is named.
                for name in re.findall(
                    r"(?:calls=|to_apply=|called_computations=\{)%([\w.\-]+)",
                    instruction.rest,
                ):
                    yield from visit(module.computations[name], times)

    return visit(module.entry, 1)


def _trips(condition) -> int:
    """How often a loop runs: it counts from 0 to a constant of its condition; 1 where
    only the device knows.
    """
    bounds = [condition.instructions[name] for name in condition.root.operands]
    bounds = [int(bound.text) for bound in bounds if bound.opcode == "constant"]
    return bounds[0] if condition.root.opcode == "compare" and len(bounds) == 1 else 1


def _products(module, computation, instruction):
    """The dtypes of the factors of each product in an instruction, fusions included."""
    if instruction.opcode in ("convolution", "dot"):
        dtypes = [
            computation.instructions[name].arrays[0].dtype
            for name in instruction.operands[:2]
        ]
        yield " x ".join(sorted(dtypes))
    elif instruction.opcode == "fusion":
        body = module.computations[instruction.attribute("calls")]
        for inside in body.instructions.values():
            yield from _products(module, body, inside)
