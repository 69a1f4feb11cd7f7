"""A scan over eight gated MLPs on an H200, with and without remat: GEMMs, bytes, what
is held for the backward.
"""

from .results import test_the_counts_are_those_of_the_programs  # noqa: F401

GROUP = "layers"


def test_fp8_residuals_of_activations(counts):
    """0.40 of what bf16 keeps in memory is enough."""
    found = counts["scan"]["fused, FP8 kept"]
    exact = counts["scan"]["fused"]
    assert (
        found["temporary_bytes"]
        <= 0.40 * counts["scan"]["bf16"]["temporary_bytes"]
        < exact["temporary_bytes"]
    )
