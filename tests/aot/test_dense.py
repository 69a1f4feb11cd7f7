"""Forward and backward of single layers on an H200, beside bf16 and Flax's FP8: the
counts that are committed, which `benchmarks/compiled.md` explains.
"""

from .results import test_the_counts_are_those_of_the_programs  # noqa: F401

GROUP = "dense"
