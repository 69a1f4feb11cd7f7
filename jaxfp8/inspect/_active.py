"""Find from lowered programs which implementation of every op and recipe this machine runs, and why."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import recipes
from ..dot import dot_general
from ..numerics import E4M3
from ..ops import _ffi, _support
from . import _op_cases as _cases

_N = 256  # a multiple of every block
_X = jax.ShapeDtypeStruct((_N, _N), jnp.bfloat16)
_KERNEL = jax.ShapeDtypeStruct((_N, _N), jnp.float32)
RECIPES = (
    recipes.DelayedScaling(),
    recipes.Float8CurrentScaling(),
    recipes.Float8RowwiseScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
)
_SHARED_CALL = {"quantize_blocks": "quantize_blocks_transpose"}


def _example(op: str, index: int = 0) -> tuple[Callable, tuple]:
    """Return a call of an op, and its arguments."""
    shape = (_N,) * (3 if op in _cases.PRODUCTS else 2)
    return _cases.call(op, _cases.Kind(shape, jnp.dtype(jnp.bfloat16), E4M3, index))[:2]


# The cases of the op `quantize_blocks` take turns with those of the op whose custom call it runs as.
OPS = {op: _example(op) for op in _cases.OPS} | {"quantize_blocks": _example("quantize_blocks_transpose", 1)}


def active_ops(platform: str) -> list[dict[str, Any]]:
    """Return a row for each op on a platform: `name`, `custom_call` (whether it runs as its own), `calls` and `why`.

    `calls` are the custom calls in its program, `why` a clause where it does not run as its own.
    """
    rows = []
    for name, (function, arguments) in OPS.items():
        calls, reasons = _lowered(platform, function, arguments)
        # `quantize_blocks` is half of what another op's custom call gives, and runs as that.
        target = _SHARED_CALL.get(name, name)
        why = "" if target in calls else "; ".join(reasons) or _why_not(platform, target)
        rows.append({"name": name, "custom_call": target in calls, "calls": calls, "why": why})
    return rows


def active_recipes(platform: str) -> list[dict[str, Any]]:
    """Return a row for each recipe, from a Dense step: `name`, `fp8_products` of 3, `calls` by name, and `why`."""
    rows = []
    for recipe in RECIPES:

        def loss(x, kernel, state, recipe=recipe):
            return dot_general(x, kernel, (((1,), (0,)), ((), ())), recipe=recipe, state=state).sum()

        # Types are enough: programs are lowered and never run, also for platforms that are not here.
        state = jax.eval_shape(lambda recipe=recipe: recipes.init_state(recipe))
        calls, reasons = _lowered(platform, jax.value_and_grad(loss, argnums=(0, 1, 2)), (_X, _KERNEL, state))
        products = sum(calls.get(name, 0) for name in ("scaled_matmul", "block_scaled_matmul"))
        why = "" if products == 3 else "; ".join(reasons) or _why_not(platform, "scaled_matmul")
        rows.append({"name": type(recipe).__name__, "fp8_products": products, "calls": calls, "why": why})
    return rows


def _lowered(platform, function, arguments) -> tuple[dict[str, int], list[str]]:
    """Return the custom calls of a program, and the warnings that it would give."""
    with _support.listening() as reasons:
        # A new function for each call: JAX does not lower a function again that it has lowered before.
        text = jax.jit(lambda *args: function(*args)).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    return dict(sorted(Counter(re.findall(r"custom_call @jaxfp8_(\w+?)_v\d+\b", text)).items())), reasons


def _why_not(platform: str, target: str) -> str:
    """Return why the custom call is not in a program that gives no warning."""
    library = next((row for row in _ffi.libraries() if row.platform == platform), None)
    if library is None:
        return f"no native library serves {platform}"
    if library.error:
        return f"the native library: {library.error}"
    return "" if target in library.ops else f"no kernel for {platform}"
