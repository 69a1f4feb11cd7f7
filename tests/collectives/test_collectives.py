"""all_to_all, all_gather and ppermute: values, gradients and next states are numpy's, to the bit."""

import pytest

from collectives import cases


@pytest.mark.varied
@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("recipe", ["delayed", *(name for name in cases.RECIPES if name != "delayed")])
@pytest.mark.parametrize("program", cases.PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("check_vma", [True, False])
def test_numpy(case, recipe, program, check_vma):
    cases.compare(case, recipe, program, check_vma)
