"""report: list the layers of a model, with the recipe of each and the reason."""

import dataclasses
from typing import Any

from flax import linen as nn, nnx

from .._jax import _warnings
from .._jax._table import aligned, natural
from ..recipes import kind
from ._report_rows import COLUMNS, linen_rows, nnx_rows


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The layers of a model; `str` and `repr` are a table of them.

    Attributes:
        rows: a dict for each layer: `layer` (its path), `kind` (its class), `input` and `kernel` (their shapes, None
            where not known), `recipe` (a recipe, or None for high precision) and `why`. `why` begins with `rule`, `own`
            (the layer's code decides), `autocast`, `default`, `no rule`, or `skipped` (a rule asks for FP8, but the
            module has no FP8 product).
        unused: the rules that decide about no layer, as text.
    """

    rows: list[dict[str, Any]]
    unused: list[str]

    def __repr__(self) -> str:
        rows = [row | {"recipe": row["recipe"] or "high precision"} for row in self.rows]
        lines = [COLUMNS] + [tuple(_text(row[column]) for column in COLUMNS) for row in rows]
        return "\n".join([aligned(lines), *(f"unused: {rule}" for rule in self.unused)])


def report(model: Any, *args: Any, variables: Any = None, strict: bool = False, **kwargs: Any) -> Report:
    """Return a table of a model's layers, with the recipe of each and the reason; the model may have rules or not.

        print(jaxfp8.report(jaxfp8.linen.quantize(model, rules), jnp.ones((1, 128), jnp.int32)))

    A Linen model has its layers only when it runs, so `init` is traced with the arguments, for shapes alone; layers
    that the arguments do not reach are not in the report. An NNX model is read without arguments. Called in an
    `autocast` region, the report gives the recipes of that region.

    Args:
        model: a Linen or NNX module.
        args, kwargs: for a Linen model the arguments of `model.init` after the keys; arrays or `jax.ShapeDtypeStruct`.
        variables: the variables of a Linen model, or None. With variables `model.apply(variables, ...)` is traced, and
            `why` names layers whose state the variables lack.
        strict: whether a rule that decides about no layer is an error; else it is a warning.

    Returns:
        The `Report`.

    Raises:
        TypeError: `model` is neither a Linen nor an NNX module, or there are arguments for an NNX module.
        ValueError: with `strict`, a rule decides about no layer.
    """
    if not isinstance(model, (nn.Module, nnx.Module)):
        raise TypeError(f"report: model: expected a Linen or an NNX module, got {kind(model)}")
    rows_of = linen_rows if isinstance(model, nn.Module) else nnx_rows
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
