"""Negative controls: the suite's own checks, run against a package that is wrong on
purpose.
"""


def attribute(owner, name, mutant):
    """`mutant(original)` in its place: `monkeypatch -> None`."""
    return lambda monkeypatch: monkeypatch.setattr(
        owner, name, mutant(getattr(owner, name))
    )
