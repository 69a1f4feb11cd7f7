"""JAXFP8_DISABLE: custom calls that a user has switched off, so that one bad kernel does not end a run."""

import os

from . import _ffi, _support

VARIABLE = "JAXFP8_DISABLE"


def parsed(value: str) -> frozenset[str]:
    """Return the ops that a value of JAXFP8_DISABLE names, separated by commas.

    Raises:
        ValueError: a name is not that of an op: with a typo the bad kernel would stay on.
    """
    names = frozenset(name.strip() for name in value.split(",")) - {""}
    if unknown := ", ".join(sorted(names - set(_ffi.OPS))):
        ops = ", ".join(_ffi.OPS)
        raise ValueError(f"{VARIABLE}: expected names of ops, separated by commas, got {unknown}; the ops are {ops}")
    return names


# The environment is read once: programs that jit has cached would not follow a later change.
_disabled = parsed(os.environ.get(VARIABLE, ""))


def reason(op: str) -> str | None:
    """Return the reason if the user has switched off the custom call of `op`, a clause; else None."""
    return f"{VARIABLE} names {op}" if op in _disabled else None


def missing(op: str) -> _support.Missing | None:
    """Return `reason` as a `Missing`, for lowering rules."""
    clause = reason(op)
    return clause and _support.Missing(clause, True, "the jnp reference runs: same results within their bounds, slower")
