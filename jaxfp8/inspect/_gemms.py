"""gemms and assert_fp8: which matrix products of a program run in FP8, and why others do not."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import _compat
from .._jax._table import aligned
from ..dot import _gemms
from ..nnx._inspect import of_arrays
from ..ops._implementation import using
from ..recipes import no_reduction
from ._programs import Place, equations, traced
from ._target import GEMM_OPS, Target, are_fp8

_COLUMNS = ("layer", "pass", "product", "times", "line", "why")
_PLAIN = {
    "dot_general": "no product of jaxfp8: no recipe reaches it",
    "conv_general_dilated": "convolutions have no FP8 product",
    "ragged_dot_general": "not jaxfp8.ragged_dot: no recipe reaches it",
    "ragged_dot": "not jaxfp8.ragged_dot: no recipe reaches it",
}
_FLOATS = tuple(map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))


@dataclasses.dataclass(frozen=True)
class Gemms:
    """The matrix products of a program; `str` is a table of them.

    Attributes:
        rows: a dict for each, equal ones counted: `layer` (the path of its module, or the scopes around it), `pass`
            (`"forward"` or `"backward"`), `product` (dtypes and shapes), `times`, `line` (of the source), `fp8`
            (whether it runs in FP8) and `why` (not; None where it does).
        platform: what it was judged for.
    """

    rows: list[dict[str, Any]]
    platform: str

    def __str__(self) -> str:
        lines = [_COLUMNS] + [
            tuple(str(row[column] or ("FP8" if column == "why" else "-")) for column in _COLUMNS) for row in self.rows
        ]
        return aligned(lines)


def gemms(fn: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Gemms:
    """List the matrix products of `fn(*args, **kwargs)`, which is traced and neither compiled nor run.

        print(jaxfp8.inspect.gemms(train_step, state, batch))

    Products in loops, branches, rematerialized functions, `shard_map` and jitted calls count; of a function that takes
    gradients those of its backward. A product in a loop is one row.

    Args:
        fn: any function; a training step, a loss, a model's `apply`.
        args, kwargs: its arguments; `jax.ShapeDtypeStruct` will do. NNX modules and optimizers too.
        platform: as of `assert_fp8`.

    Returns:
        The `Gemms`, in the order of the program.

    Raises:
        TypeError: `fn` is no function.
        ValueError: unknown platform.
    """
    target = Target.parse(platform)
    if not callable(fn):
        got = type(fn).__name__
        raise TypeError(f"gemms: fn: expected a function, as in gemms(step, state, batch), got a {got}")
    program = traced(*of_arrays(fn, args, kwargs))
    # A Counter keeps the order in which rows first come, which is that of the program.
    counts = Counter(row for eqn, place in equations(program) for row in _rows(eqn, place, target))
    return Gemms([{**dict(row), "times": times} for row, times in counts.items()], target.name)


def assert_fp8(
    fn: Callable[..., Any], *args: Any, platform: str | None = None, allow: str | Iterable[str] = (), **kwargs: Any
) -> None:
    """Raise where a matrix product of `fn(*args, **kwargs)` would not run in FP8; say which, where and why.

        jaxfp8.inspect.assert_fp8(train_step, state, batch, allow=("attention", "logits"))

    The function is traced, neither compiled nor run: forward, and backward where `fn` takes gradients. Every
    `lax.dot_general`, convolution and ragged product counts.

    Args:
        fn, args, kwargs: as of `gemms`.
        platform: where it would run. `"cuda"`: this machine's NVIDIA GPUs, or ones that have everything if there are
            none; a compute capability such as `"sm_90"`: such GPUs; `"cpu"`, `"tpu"`, `"rocm"`: no FP8 GEMM there,
            so every product is named. Without one the backend of this process; on a CPU, where models are only
            developed, `"cuda"`.
        allow: regexes; a product is passed over where one of them is found (`re.search`) in its layer or in its source
            line: `"attention"`, `"head$"`, `r"model\\.py:57"`. A string is one regex.

    Raises:
        AssertionError: products that would not run in FP8: layer, pass, shapes, dtypes, source line and reason of each.
            A function that has no product at all.
        TypeError: `fn` is no function.
        ValueError: unknown platform.
    """
    products = gemms(fn, *args, platform=platform, **kwargs)
    allowed = [re.compile(pattern) for pattern in ([allow] if isinstance(allow, str) else allow)]
    plain, keys = [row for row in products.rows if not row["fp8"]], ("layer", "line")
    missed = [row for row in plain if not any(regex.search(row[key]) for regex in allowed for key in keys)]
    name = getattr(fn, "__name__", repr(fn))
    # A function without any product would pass, whatever it is: this is hardly the function that was meant.
    if not products.rows:
        raise AssertionError(f"assert_fp8: {name} has no matrix product with these arguments")
    if missed:
        total, count = (sum(row["times"] for row in rows) for rows in (products.rows, missed))
        table = Gemms(missed, products.platform)
        head = f"assert_fp8: {count} of {total} matrix products of {name} would not run in FP8 on {table.platform}"
        raise AssertionError(f"{head}:\n{table}")


def _rows(eqn, place: Place, target: Target) -> list[tuple]:
    """Return the products of one equation, each as items of a row."""
    name = eqn.primitive.name
    # A product that nobody differentiates is one equation: look at the equations of its forward.
    if name == "fp8_product":
        inner = [(inner_eqn, place._replace(reason=inside.reason)) for inner_eqn, inside in equations(_forward(eqn))]
        return [row for inner_eqn, inner_place in inner for row in _rows(inner_eqn, inner_place, target)]
    if name in GEMM_OPS:
        why = target.why_not(eqn)
    elif name in _PLAIN:
        why = _why_plain(eqn, place, target)
    else:
        return []
    product = " x ".join(_text(var.aval) for var in eqn.invars[:2])
    direction = "backward" if place.is_backward else "forward"
    values = {"layer": place.layer, "pass": direction, "product": product, "line": place.line}
    return [tuple((values | {"fp8": why is None, "why": why}).items())]


def _why_plain(eqn, place, target) -> str | None:
    dtypes = [var.aval.dtype for var in eqn.invars[:2]]
    if eqn.primitive.name == "dot_general" and are_fp8(*dtypes):
        return target.why_not_xla(*dtypes)
    # A reason that jaxfp8 has left in a scope says more than the dtypes do.
    if place.reason:
        return place.reason
    if any(dtype not in _FLOATS for dtype in dtypes) and not any(map(are_fp8, dtypes)):
        return f"operands are {' and '.join(dict.fromkeys(map(str, dtypes)))}"
    return _PLAIN[eqn.primitive.name]


def _forward(eqn):
    """Trace the program of a product that nobody differentiates: a primitive that is still whole."""
    params = eqn.params
    product = dataclasses.replace(params["product"], reduce=no_reduction, out_sharding=None)  # on one device

    def run(x, kernel, *leaves):
        with using(params["implementation"]):
            return _gemms.forward(product, x, kernel, *jax.tree.unflatten(params["tree"], leaves), None)[0]

    # State in the dtype that autodiff adds by max is float32 to the forward.
    types = ((v.aval.shape, jnp.float32 if _compat.is_max(v.aval) else v.aval.dtype) for v in eqn.invars)
    return traced(lambda operands: run(*operands), [jax.ShapeDtypeStruct(*shaped) for shaped in types])


def _text(aval) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
