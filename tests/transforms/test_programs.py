"""Random programs: state and gradients, step after step, as the simulation says."""

import pytest
from hypothesis import HealthCheck, given, settings

from transforms import interpret, programs as p

# Compilation is most of the time: few examples of each kind here, many in the slow test.
SETTINGS = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.parametrize("kind", p.KINDS)
def test_random_programs(kind):
    @settings(max_examples=2, **SETTINGS)
    @given(p.programs(kind))
    def run(program):
        interpret.check(program)

    run()


@settings(max_examples=2, **SETTINGS)
@given(p.programs(depth=2))
def test_random_programs_without_jit(program):
    interpret.check(program, jit=False, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", p.KINDS)
def test_many_random_programs(kind):
    @settings(max_examples=40, **SETTINGS)
    @given(p.programs(kind, depth=4))
    def run(program):
        interpret.check(program, jit=program.seed % 4 > 0)

    run()
