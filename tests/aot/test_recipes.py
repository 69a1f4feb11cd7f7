"""Forward and backward of a Dense of 8192^3 on an H200, by recipe: the counts that are
committed. A floor for bytes outside of products: x and grad are read once, 128 MiB
each, the kernel's 256, and the codes of both layouts written, 64 MiB each: 896.

And layers on eight of them, and layers that multiply one x.
"""

from .results import test_the_counts_are_those_of_the_programs  # noqa: F401

GROUP = "recipes"


def test_a_rule_saves_launches_bytes_and_time(counts):
    """Layers that multiply one x, as one product."""
    apart, joined = (counts["projections"][name] for name in ("apart", "by rule"))
    for key in ("launches", "bytes", "temporary_bytes"):
        assert joined[key] < 0.96 * apart[key], key
    assert joined["timeline"]["ms"] < 0.96 * apart["timeline"]["ms"]
