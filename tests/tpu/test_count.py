"""Operations that XLA gives no estimate are counted."""

import pytest

from . import count

PROGRAM = """
ENTRY %main (x: f32[8,1024]) -> {type} {{
  %x = f32[8,1024]{{1,0}} parameter(0)
  ROOT %result = {type} {operation}(%x), backend_config={{{estimate}}}
}}
"""
NO_NUMBER = f'"estimated_cycles":"{2**63 - 1}"'


@pytest.mark.parametrize(
    ("type", "operation", "estimate", "cycles", "without_estimate"),
    [
        ("f32[1024,8]{1,0}", "reshape", "", 0, 1),
        ("f32[1024,8]{1,0}", "reshape", '"estimated_cycles":"12"', 12, 0),
        ("f32[1024]{0}", "reshape", "", 0, 0),  # no data
        ("f32[1024,8]{1,0}", "bitcast", "", 0, 0),  # moves nothing
        ("f32[8,1024]{0,1}", "copy", NO_NUMBER, 0, 1),
    ],
)
def test_operations_without_an_estimate(
    type, operation, estimate, cycles, without_estimate
):
    found = count.count(
        PROGRAM.format(type=type, operation=operation, estimate=estimate)
    )
    assert (found["cycles"], found["without_estimate"]) == (cycles, without_estimate)
