"""gemms and assert_fp8: list the matrix products of a program, and say why a product
does not run in FP8.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .._jax import _warnings
from .._jax._table import table
from ..dot import _product
from ..nnx._inspect import function_of_arrays, traced
from ..numerics import FP8_DTYPES
from ..recipes import GEMMType, no_reduction
from ._programs import GEMM_OPS, Place, Target, equations
from ._rows import Rows

_PASSES = ("forward", "backward", *GEMMType)
_COLUMNS = ("layer", "pass", "product", "times", "line", "why")
_PLAIN = {
    "dot_general": "no product of jaxfp8: no recipe reaches it",
    "conv_general_dilated": "convolutions have no FP8 product",
    "ragged_dot_general": "not jaxfp8.ragged_dot: no recipe reaches it",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Gemms(Rows):
    """The matrix products of a program; `str` is a table of them.

    Attributes:
        rows: a dict for each different product: `layer` (the path of its module as in
            `jaxfp8.report`, or the scopes around it, and the equation of an einsum),
            `pass` (`"forward"` or `"backward"`), `gemm` (`"fprop"`, `"dgrad"` or
            `"wgrad"` of a product of jaxfp8, else None), `product` (dtypes and shapes),
            `times` (how often the program has it), `line` (its source line), `fp8`
            (whether it runs in FP8) and `why` (why it does not run in FP8, else None).
        platform: the platform that `fp8` and `why` are for.
    """

    platform: str

    def __repr__(self) -> str:
        shown = []
        for row in self.rows:
            row = row | {"why": row["why"] or "FP8"}
            if row["pass"] == "backward" and row["gemm"]:
                row["pass"] = row["gemm"]
            shown.append(row)
        return table(shown, _COLUMNS)


def gemms(
    fn: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any
) -> Gemms:
    """List the matrix products of `fn(*args, **kwargs)`, which is traced and neither
    compiled nor run.

        print(jaxfp8.inspect.gemms(train_step, state, batch))

    Products in loops, branches, rematerialized functions, `shard_map` and jitted calls
    are listed; a function that takes gradients lists the products of its backward too.
    A product in a loop is listed once.

    Args:
        fn: any function: a training step, a loss, a Linen model's `apply` (a model
            itself raises); or an NNX model.
        args, kwargs: the arguments of `fn`: arrays, `jax.ShapeDtypeStruct`, NNX modules
            and optimizers.
        platform: see `assert_fp8`.

    Returns:
        The `Gemms`, in the order of the program.

    Raises:
        ValueError: `platform` is unknown.
    """
    target = Target.parse(platform)
    program = traced(*function_of_arrays(fn, args, kwargs))
    # A Counter keeps the order in which rows first appear, which is that of the
    # program.
    counts = Counter()
    for eqn, place in equations(program):
        counts.update(_rows(eqn, place, target))
    rows = [dict(row, times=times) for row, times in counts.items()]
    return Gemms(rows, target.name)


def assert_fp8(
    fn: Callable[..., Any],
    *args: Any,
    platform: str | None = None,
    allow: str | Iterable[str] = (),
    **kwargs: Any,
) -> None:
    """Raise where a matrix product of `fn(*args, **kwargs)` would not run in FP8, with
    its layer, line and reason.

        jaxfp8.inspect.assert_fp8(
            train_step, state, batch, allow=("attention", "logits")
        )

    The function is traced, neither compiled nor run: forward, and backward where `fn`
    takes gradients. Every `lax.dot_general`, convolution and ragged product counts.

    Args:
        fn, args, kwargs: see `gemms`.
        platform: the platform to judge for. `"cuda"` is this machine's NVIDIA GPUs, or
            without any a GPU with all FP8 GEMMs; a compute capability such as `"sm_90"`
            is GPUs of that kind; `"cpu"`, `"tpu"` and `"rocm"` have no FP8 GEMM, so
            every product is reported. None is the backend of this process; on a CPU,
            where models are only developed, None is `"cuda"`.
        allow: regexes, or a string, which is one regex. A product is not reported where
            a regex is found (`re.search`) in its layer, with the equation of an einsum
            or without, or in its source line: `"attention"`, `"head$"`,
            `r"model\\.py:57"`. A pass alone, or before a colon, allows that pass:
            `"wgrad"`, `"wgrad:.*head"`. Passes are `forward` and `backward`, and
            `fprop`, `dgrad` and `wgrad` of products of jaxfp8.

    Raises:
        AssertionError: products would not run in FP8; the message has layer, pass,
            shapes, dtypes, source line and reason of each. Or `fn` has no matrix
            product at all.
        ValueError: `platform` is unknown.
    """
    products = gemms(fn, *args, platform=platform, **kwargs)
    name = getattr(fn, "__name__", type(fn).__name__)
    # A function without any product is hardly the function that the caller meant, so it
    # does not pass.
    if not products.rows:
        raise AssertionError(
            f"assert_fp8: {name} has no matrix product with these arguments"
        )
    missed = [row for row in products.rows if not row["fp8"]]
    idle = []
    for pattern in [allow] if isinstance(allow, str) else allow:
        missed = [row for row in missed if not _allows(pattern, row)]
        if not any(_allows(pattern, row) for row in products.rows):
            idle.append(repr(pattern))
    if idle:
        _warnings.warn(
            f"assert_fp8: allow: no product of {name} matches {', '.join(idle)}; is "
            "the path spelled as in jaxfp8.inspect.gemms?",
            UserWarning,
        )
    if missed:
        count, total = (
            sum(row["times"] for row in rows) for rows in (missed, products.rows)
        )
        raise AssertionError(
            f"assert_fp8: {count} of {total} matrix products of {name} would not run "
            f"in FP8 on {products.platform}:\n{Gemms(missed, products.platform)}"
        )


def _allows(pattern: str, row: dict) -> bool:
    """Tell whether a pattern of `allow` is for a product: a regex, or a pass, or a
    pass, a colon and a regex.
    """
    gemm, colon, rest = pattern.partition(":")
    if gemm in _PASSES:
        if gemm not in (row["pass"], row["gemm"]):
            return False
        pattern = rest
    module, _, equation = row["layer"].rpartition("/")
    names = [row["layer"], row["line"]]
    if "->" in equation:
        names.append(module)
    return any(re.search(pattern, name) for name in names)


def _rows(eqn, place: Place, target: Target) -> list[tuple]:
    """Return the products of one equation, each as items of a row."""
    name = eqn.primitive.name
    # A product that is not differentiated is one equation: look at the equations of its
    # forward.
    if name == "fp8_product":
        rows = []
        for inner, inside in equations(_forward(eqn)):
            inside = place._replace(gemm=inside.gemm, reason=inside.reason)
            rows += _rows(inner, inside, target)
        return rows
    if name in GEMM_OPS:
        why = target.why_not(eqn)
    elif name in _PLAIN:
        why = _why_plain(eqn, place, target)
    else:
        return []
    values = {
        "layer": _below_model(place.layer),
        "pass": "backward" if place.is_backward else "forward",
        "gemm": place.gemm,
        "product": " x ".join(_text(var.aval) for var in eqn.invars[:2]),
        "line": place.line,
        "fp8": why is None,
        "why": why,
    }
    return [tuple(values.items())]


def _below_model(scopes: str) -> str:
    """Return the path of a layer as rules and `report` have it: Linen's scopes begin
    with the class of the model.
    """
    root, _, path = scopes.partition("/")
    is_model = root.partition(".")[0] in _names_of_classes(nn.Module)
    return path if path and is_model else scopes


def _names_of_classes(base: type) -> set[str]:
    return {base.__name__}.union(*map(_names_of_classes, base.__subclasses__()))


def _why_plain(eqn, place, target) -> str | None:
    dtypes = [var.aval.dtype for var in eqn.invars[:2]]
    if eqn.primitive.name == "dot_general" and set(dtypes) <= set(FP8_DTYPES):
        return target.why_not(eqn)
    # A reason that jaxfp8 has left in a scope says more than the dtypes do.
    if place.reason:
        return place.reason
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return f"operands are {' and '.join(dict.fromkeys(map(str, dtypes)))}"
    return _PLAIN[eqn.primitive.name]


def _forward(eqn):
    """Trace the forward of a product that is not differentiated, whose primitive is
    still one equation.
    """
    product = dataclasses.replace(  # on one device
        eqn.params["product"], reduce=no_reduction, out_sharding=None
    )

    def run(operands):
        _product._primal(*operands, product=product, tree=eqn.params["tree"])

    avals = [var.aval for var in eqn.invars]
    return traced(run, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals])


def _text(aval) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
