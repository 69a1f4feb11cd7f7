"""Marks in a program: why a product is in high precision. `inspect.assert_fp8` reads them, profiles show them."""

import jax

_HIGH_PRECISION = "high precision: "


def high_precision(reason: str):
    """A context: what is traced inside is in high precision for this reason, a clause without a slash."""
    return jax.named_scope(_HIGH_PRECISION + reason)


def reason(scope: str) -> str | None:
    """The reason that the name of a scope gives; None: it is another scope."""
    return scope.removeprefix(_HIGH_PRECISION) if scope.startswith(_HIGH_PRECISION) else None
