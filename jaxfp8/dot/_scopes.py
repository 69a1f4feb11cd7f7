"""Name scopes that say why a product is in high precision. `inspect.assert_fp8` reads them, profiles show them."""

import jax

_HIGH_PRECISION = "high precision: "


def high_precision(reason: str):
    """Return a context for products that are in high precision for this reason, a clause without a slash."""
    return jax.named_scope(_HIGH_PRECISION + reason)


def reason(scope: str) -> str | None:
    """Return the reason in the name of a scope; None for other scopes."""
    return scope.removeprefix(_HIGH_PRECISION) if scope.startswith(_HIGH_PRECISION) else None
