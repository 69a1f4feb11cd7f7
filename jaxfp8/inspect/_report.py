"""report: which layer of a model runs which recipe, and why."""

import dataclasses
from typing import Any

from flax import linen as nn, nnx

from .._jax import _warnings
from .._jax._table import aligned, natural
from ..recipes import kind
from . import _linen_report as linen_report, _nnx_report as nnx_report
from ._report_rows import COLUMNS


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The layers of a model; `str` and `repr` are a table of them.

    Attributes:
        rows: a dict for each layer: `layer` (its path), `kind` (its class), `input` and `kernel` (their shapes, None
            where not known), `recipe` (a recipe, or None for high precision) and `why`. `why` begins with `rule`, `own`
            (the layer's code), `autocast`, `default`, `no rule`, or `skipped`: a rule asks for FP8 that is not there.
        unused: the rules that decide nothing, as text.
    """

    rows: list[dict[str, Any]]
    unused: list[str]

    def __repr__(self) -> str:
        rows = [row | {"recipe": row["recipe"] or "high precision"} for row in self.rows]
        lines = [COLUMNS] + [tuple(_text(row[column]) for column in COLUMNS) for row in rows]
        return "\n".join([aligned(lines), *(f"unused: {rule}" for rule in self.unused)])


def report(model: Any, *args: Any, variables: Any = None, strict: bool = False, **kwargs: Any) -> Report:
    """Return which layer of a model runs which recipe, and why; also for models without rules. It prints as a table.

        print(jaxfp8.report(jaxfp8.linen.quantize(model, rules), jnp.ones((1, 128), jnp.int32)))

    A Linen model knows its layers only when it runs: `init` is traced with the arguments, for shapes alone. Layers that
    these arguments do not reach are not there. An NNX model needs none. In an `autocast` region the report is of what
    would be traced there.

    Args:
        model: a Linen or NNX module.
        args, kwargs: of `model.init` after the keys, for a Linen model; arrays or `jax.ShapeDtypeStruct`.
        variables: of a Linen model: `model.apply(variables, ...)` is traced, and layers whose state these variables do
            not have say so.
        strict: whether a rule that decides nothing is an error; else it is a warning.

    Returns:
        The `Report`.

    Raises:
        TypeError: neither a Linen nor an NNX module; arguments for an NNX module.
        ValueError: with `strict`, a rule that decides nothing.
    """
    if not isinstance(model, (nn.Module, nnx.Module)):
        raise TypeError(f"report: model: expected a Linen or an NNX module, got {kind(model)}")
    rows_of = linen_report.rows if isinstance(model, nn.Module) else nnx_report.rows
    rows, unused = rows_of(model, variables, args, kwargs)
    result = Report(sorted(rows, key=lambda row: natural(row["layer"])), unused)
    if result.unused:
        message = f"report: rules that decide nothing: {'; '.join(result.unused)}; is the path spelled as in the table?"
        if strict:
            raise ValueError(f"{message}\n{result}")
        _warnings.warn(message, UserWarning)
    return result


def _text(value) -> str:
    """Return a cell of the table; for a recipe its name and the fields that differ from the defaults."""
    if value is None:
        return "-"
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        return f"{type(value).__name__}({', '.join(f'{f.name}={_option(getattr(value, f.name))}' for f in fields)})"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _option(value) -> str:
    return getattr(value, "__qualname__", None) or getattr(value, "name", None) or repr(value)
