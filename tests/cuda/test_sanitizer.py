"""What compute-sanitizer is to look at: every custom call, in programs that run."""

import another_process
import pytest
from lowering import cuda_text

from jaxfp8 import ops
from jaxfp8.ops import _ffi

from . import sanitize, sanitizer_cases


def test_every_custom_call(cuda_custom_calls):
    text = ""
    for function, *arguments in (
        sanitizer_cases.OWN | sanitizer_cases.PRODUCT_CASES
    ).values():
        text += cuda_text(function, *arguments)
    missing = [name for name in ops.custom_call_targets() if name not in text]
    assert missing == [_ffi.target_name(op) for op in _ffi._CPU_ONLY]


@pytest.mark.slow
def test_cases_run():
    """On a CPU here; in a process of its own, as on a GPU."""
    done = another_process.python(sanitize.CASES, "--own")
    assert done.stdout.splitlines() == list(sanitizer_cases.OWN)
