"""Contexts of products that are traced: the layer, the product of the three, the reason
of high precision.
"""

import contextlib
import contextvars

import jax

_layer = contextvars.ContextVar("layer", default=None)


@contextlib.contextmanager
def layer(name: str):
    """Name the layer of the products that are traced inside."""
    token = _layer.set(name)
    try:
        yield
    finally:
        _layer.reset(token)


def current_layer() -> str | None:
    """Return the name of the innermost layer, "" for a model that is one layer; None
    outside of any layer.
    """
    return _layer.get()


# A function of `(product, x, kernel, dimension_numbers)` that is called by the products
# of Linen and NNX with their operands, or None. Part of jit's cache key.
observed_by = jax.make_user_context(None)

# The kinds of scopes, which are called `kind: text`.
HIGH_PRECISION = "high precision"
GEMM = "gemm"


def high_precision(reason: str):
    """Return a context for products that are in high precision for this reason, a
    clause without a slash.
    """
    return jax.named_scope(f"{HIGH_PRECISION}: {reason}")


def gemm(name: str):
    """Return a context for one of the three products of a layer: `"fprop"`, `"dgrad"`
    or `"wgrad"`.
    """
    return jax.named_scope(f"{GEMM}: {name}")
