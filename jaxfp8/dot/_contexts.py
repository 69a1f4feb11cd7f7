"""Contexts of products that are traced: the layer, a wrapper around the product, the
reason of high precision.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any

import jax

# A context that is part of jit's cache key, so that a wrapped product is traced anew.
_wrapper = jax.make_user_context(None)
_layer = contextvars.ContextVar("layer", default=None)


def wrapping(wrapper: Callable | None):
    """Return a context in which a wrapper stands for each product; None leaves products
    alone.

    Args:
        wrapper: a hashable function, called as `wrapper(product, fp8, f32, *operands)`.
            `product` is the static part, which has the quantizers. `fp8` and `f32` are
            functions of `*operands`: the FP8 product, and the float32 product of the
            values that the operands stand for.
    """
    return _wrapper(wrapper)


def is_wrapping() -> bool:
    """Tell whether products are wrapped."""
    return _wrapper.value is not None


def wrapped(product: Any, fp8: Callable, f32: Callable) -> Callable:
    """Return `fp8`, or inside `wrapping` the wrapper of both functions."""
    return (
        fp8
        if _wrapper.value is None
        else functools.partial(_wrapper.value, product, fp8, f32)
    )


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


_HIGH_PRECISION = "high precision: "
_GEMM = "gemm: "


def high_precision(reason: str):
    """Return a context for products that are in high precision for this reason, a
    clause without a slash.
    """
    return jax.named_scope(_HIGH_PRECISION + reason)


def gemm(name: str):
    """Return a context for one of the three products of a layer: `"fprop"`, `"dgrad"`
    or `"wgrad"`.
    """
    return jax.named_scope(_GEMM + name)


def gemm_of(scope: str) -> str | None:
    """Return the product in the name of a scope; None for other scopes."""
    return scope.removeprefix(_GEMM) if scope.startswith(_GEMM) else None


def reason(scope: str) -> str | None:
    """Return the reason in the name of a scope; None for other scopes."""
    return (
        scope.removeprefix(_HIGH_PRECISION)
        if scope.startswith(_HIGH_PRECISION)
        else None
    )
