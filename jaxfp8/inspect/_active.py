"""Find from lowered programs which implementation of every op and recipe this machine runs, and why."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import ops
from ..dot import dot_general
from ..numerics import E4M3, E5M2
from ..ops import _ffi, _support
from ..recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    init_state,
)

_N = 256  # a multiple of every block
_X = jax.ShapeDtypeStruct((_N, _N), jnp.bfloat16)
_KERNEL = jax.ShapeDtypeStruct((_N, _N), jnp.float32)
_CODES = jax.ShapeDtypeStruct((_N, _N), E4M3.dtype)
_ONE = jax.ShapeDtypeStruct((1,), jnp.float32)
_VECTOR = jax.ShapeDtypeStruct((_N,), jnp.float32)
_TILES = jax.ShapeDtypeStruct((_N, _N // 128), jnp.float32)
_SIZES = jax.ShapeDtypeStruct((2,), jnp.int32)
_TILE = (1, 128)

# A call of each op, and its arguments.
OPS: dict[str, tuple[Callable, tuple]] = {
    "amax": (ops.amax, (_X,)),
    "amax_to_scale": (lambda amax, s: ops.amax_to_scale(amax, s, fp8_max=E4M3.max), (_ONE, _ONE)),
    "delayed_scales": (lambda h, s: ops.delayed_scales((h,), (s,), fp8_max=(E5M2.max,)), (_VECTOR, _ONE)),
    "push_amaxes": (lambda h, amax: ops.push_amaxes((h,), (amax,)), (_VECTOR, _ONE)),
    "quantize": (lambda x, s: ops.quantize(x, s, E4M3.dtype), (_X, _ONE)),
    "quantize_transpose": (lambda x, s: ops.quantize_transpose(x, s, E4M3.dtype), (_X, _ONE)),
    "quantize_activation": (
        lambda x, s: ops.quantize_activation(x, s, E4M3.dtype, activation="gelu"),
        (_X, _ONE),
    ),
    "quantize_norm": (
        lambda x, g, s: ops.quantize_norm(x, g, None, s, E4M3.dtype, kind="rms", epsilon=1e-6),
        (_X, _VECTOR, _ONE),
    ),
    "quantize_blocks": (lambda x: ops.quantize_blocks(x, E4M3.dtype, block=_TILE), (_X,)),
    "quantize_blocks_transpose": (lambda x: ops.quantize_blocks_transpose(x, E4M3.dtype, block=_TILE), (_X,)),
    "dequantize": (lambda q, s: ops.dequantize(q, s, jnp.bfloat16), (_CODES, _ONE)),
    "scaled_matmul": (lambda q, s: ops.scaled_matmul(q, q, s, s), (_CODES, _ONE)),
    "block_scaled_matmul": (
        lambda q, s: ops.block_scaled_matmul(q, q, s, s, a_block=_TILE, b_block=_TILE),
        (_CODES, _TILES),
    ),
    "ragged_matmul": (
        lambda a, b, s, sizes: ops.ragged_matmul(a, b, s, s, sizes),
        (_CODES, jax.ShapeDtypeStruct((2, _N, _N), E4M3.dtype), _ONE, _SIZES),
    ),
}
RECIPES = (
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8RowwiseScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
)
_SHARED_CALL = {"quantize_blocks": "quantize_blocks_transpose"}


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
        state = jax.eval_shape(lambda recipe=recipe: init_state(recipe))
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
