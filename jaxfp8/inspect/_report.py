"""report: list the layers of a model, with the recipe of each and the reason.

The layers of a Linen model are recorded while `init` or `apply` is traced for shapes;
those of an NNX model are read, and with arguments their calls are recorded too.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from .._jax import _warnings
from .._jax._table import natural, table
from .._jax._trees import split_arrays
from ..dot import _contexts
from ..linen._dot_general import DEFAULT_RECIPE, Fp8Module
from ..linen._quantize_by_rules import Decision, decision, is_layer
from ..linen._scopes import Region, regions
from ..nnx import _quantize_by_rules as nnx_rules
from ..nnx._dot_general import _Fp8Product
from ..nnx._freeze import FrozenKernel, recorded_calls
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    DelayedScaling,
    is_off,
    keeps_state,
    kind,
    resolve,
)
from ._rows import Rows

_COLUMNS = ("layer", "kind", "input", "kernel", "recipe", "why")
_NO_PRODUCT = {
    (nn.MultiHeadDotProductAttention, nnx.MultiHeadAttention): (
        "attention scores have no FP8 product; its query, key, value and out are layers"
    ),
    (
        nn.Conv,
        nn.ConvTranspose,
        nn.ConvLocal,
        nnx.Conv,
        nnx.ConvTranspose,
    ): "convolutions have no FP8 product",
    (nn.Embed, nnx.Embed): "an embedding is looked up, and attend has no FP8 product",
    nnx.LoRA: "its products are of arrays, and have no FP8 product",
    nnx.bridge.ToNNX: (
        "a Linen module; give it its rules with linen.quantize, before the bridge"
    ),
}

_OWN_ARRAYS = "rules do not reach products in its code; use Fp8Einsum there"


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Rows):
    """The layers of a model; `str` and `repr` are a table of them.

    Attributes:
        rows: a dict for each layer: `layer` (its path), `kind` (its class), `input` and
            `kernel` (their shapes, None where not known), `recipe` (a recipe, or None
            for high precision) and `why`. `why` begins with `rule`, `own` (the layer's
            code decides), `autocast`, `default`, `no rule`, or `skipped` (a rule asks
            for FP8, but the module has no FP8 product).
        unused: the rules that decide about no layer, as text.
    """

    unused: list[str]

    def __repr__(self) -> str:
        shown = []
        for row in self.rows:
            row = row | {"recipe": row["recipe"] or "high precision"}
            shown.append({column: _text(cell) for column, cell in row.items()})
        unused = (f"unused: {rule}" for rule in self.unused)
        return "\n".join([table(shown, _COLUMNS), *unused])


def report(
    model: Any, *args: Any, variables: Any = None, strict: bool = False, **kwargs: Any
) -> Report:
    """Return a table of a model's layers, with the recipe of each and the reason; the
    model may have rules or not.

        model = jaxfp8.linen.quantize(model, rules)
        print(jaxfp8.report(model, jnp.ones((1, 128), jnp.int32)))

    A Linen model has its layers only when it runs, so `init`, and `apply` after it, are
    traced with the arguments, for shapes alone; layers that the arguments do not reach
    are not in the report. An NNX model is read without arguments; with them it is
    traced as well, for the shapes of inputs. `why` says `not called` of a layer whose
    product the model passes by, such as `x @ self.qkv.kernel[...]`, in Linen where
    `init` alone calls the layer. Called in an `autocast` region, the report gives the
    recipes of that region.

    Args:
        model: a Linen or NNX module.
        args, kwargs: the arguments of `model.init` after the keys, with which
            `model.apply` runs too, or of an NNX model; arrays or
            `jax.ShapeDtypeStruct`.
        variables: the variables of a Linen model, or None. With variables
            `model.apply(variables, ...)` is traced, and `why` names layers whose state
            the variables lack.
        strict: whether a rule that decides about no layer is an error; else it is a
            warning.

    Returns:
        The `Report`.

    Raises:
        TypeError: `model` is neither a Linen nor an NNX module, or there are variables
            for an NNX module.
        ValueError: with `strict`, a rule decides about no layer.
    """
    if isinstance(model, nn.Module):
        rows = _linen_rows(model, variables, args, kwargs)
    elif isinstance(model, nnx.Module) and variables is None:
        rows = _nnx_rows(model, args, kwargs)
    else:
        raise TypeError(
            "report: model: expected a Linen module, or an NNX module and no "
            f"variables, got {kind(model)}"
        )
    paths = sorted(rows.by_path, key=natural)
    result = Report([rows.by_path[path] for path in paths], rows.unused())
    if result.unused:
        message = (
            f"report: rules that decide nothing: {'; '.join(result.unused)}; is the "
            "path spelled as in the table?"
        )
        if strict:
            raise ValueError(f"{message}\n{result}")
        _warnings.warn(message, UserWarning)
    return result


class _Rows:
    """The rows of a report by the paths of the layers, and the rules that decided about
    them.
    """

    def __init__(self):
        self.by_path = {}
        self.regions = {}
        self.used = set()

    def add(self, path: str, module, recipe, why: str, input=None, kernel=None) -> dict:
        """Add a row, and return it."""
        cells = path, type(module).__name__, input, kernel, recipe, why
        self.by_path[path] = row = dict(zip(_COLUMNS, cells, strict=True))
        return row

    def add_product(self, path, layer, named, default, decided, *shapes) -> dict:
        """Add a layer with an FP8 product that is traced here, and return its row.

        Args:
            path, layer: the layer.
            named: the recipe that the product names, which may be that of a rule; None
                where it names none.
            default: its recipe outside of `autocast` where it names none.
            decided: the rule that matches the layer, or None.
            shapes: see `add`.
        """
        rule = None if decided is None else self.use(decided)
        recipe = resolve(named, default)
        # `resolve` returns the default itself unless an `autocast` decides, so a marker
        # tells which it was.
        marker = DelayedScaling(amax_history_len=1)
        if is_off():
            recipe, why = None, "autocast is off"
        elif rule and named == decided.rule.layer_recipe:
            why = rule
        elif named is not None:
            why = "own recipe"
        else:
            why = "default" if resolve(None, marker) is marker else "autocast"
        return self.add(path, layer, recipe, why, *shapes)

    def add_other(self, path, module, decided, takes_rules, *shapes) -> None:
        """Add a module without an FP8 product: a layer that rules leave in high
        precision or that has another product, and any module where a rule matches it in
        vain, or where it multiplies arrays.
        """
        _, kernel = shapes
        rule = None if decided is None else decided.rule
        reason = _why_no_product(module)
        if takes_rules:
            why = _own_product(module) if rule is None else self.use(decided)
        elif rule is not None and (reason or kernel):
            why = self.use(decided)
            if rule.recipe is not None:
                why = f"skipped: {reason or _OWN_ARRAYS} ({why})"
        elif kernel and not reason:
            why = f"no rule; {_OWN_ARRAYS}"
        else:
            return
        self.add(path, module, None, why, *shapes)

    def use(self, decided: Decision) -> str:
        """Record that a rule decides about a layer, and return its text."""
        self.used.add((decided.region, decided.index))
        return _rule_text(decided.index, decided.rule)

    def unused(self) -> list[str]:
        texts = []
        for region in self.regions:
            for i, rule in enumerate(region.rules):
                if (region, i) not in self.used:
                    texts.append(_rule_text(i, rule))
        return texts


def _why_no_product(module) -> str | None:
    for classes, text in _NO_PRODUCT.items():
        if isinstance(module, classes):
            return text
    return None


def _linen_rows(model, variables, args, kwargs) -> _Rows:
    rows = _Recorder()
    called = set()
    key = jax.random.key(0)
    arrays, joined = split_arrays((variables, args, kwargs))

    def observe(product, *operands):
        called.update(map("/".join, (product.path, product.layer_path())))

    def run(arrays):
        variables, args, kwargs = joined(arrays)
        with nn.intercept_methods(rows.record):
            if variables is not None:
                model.apply(variables, *args, **kwargs)
                return
            variables = model.init(key, *args, **kwargs)
        # `init` may call layers that no step calls, for their parameters alone. A model
        # whose `apply` takes other arguments, as a decoder does after the first call,
        # does not tell which.
        called.clear()
        with contextlib.suppress(Exception):
            model.apply(variables, *args, rngs=key, mutable=True, **kwargs)
            for path, row in rows.by_path.items():
                if row["recipe"] is not None and path not in called:
                    row["why"] += "; not called"

    # The context is part of jit's cache key, so that blocks in nn.jit are traced anew
    # for each report: the methods of a cached block would not run. Layers that a rule
    # runs together run apart in it.
    with _contexts.observed_by(observe):
        jax.eval_shape(run, arrays)
    return rows


class _Recorder(_Rows):
    """Collects a row for each layer that a model's methods run."""

    def __init__(self):
        super().__init__()
        self.owners = {}

    def record(self, next_method, args, kwargs, context):
        """Run a method in Flax's place, and record the layer or product that it belongs
        to.
        """
        module = context.module
        self.regions |= dict.fromkeys(regions(module.scope))
        result = next_method(*args, **kwargs)
        shapes = [tuple(arg.shape) for arg in args if hasattr(arg, "shape")]
        if isinstance(module, Fp8Module):
            if context.method_name == "__call__":
                self._product(module, shapes[:2])
        elif context.method_name in ("__call__", "attend"):
            self._module(module, shapes)
        return result

    def _product(self, product, shapes) -> None:
        """Record an FP8 product in the name of the layer that holds it, unless the code
        gave the product a name.
        """
        owner = "/".join(product.path[:-1])
        path = product.layer_path()
        # A scan calls its body more than once, so a product may be recorded again.
        if self.owners.setdefault(owner, product.path) != product.path:
            path = product.path
        decided = decision(product)
        named = decided.rule.layer_recipe if decided else product.named_recipe()
        path = "/".join(path)
        row = self.add_product(path, product, named, DEFAULT_RECIPE, decided, *shapes)
        recipe = row["recipe"]
        has_state = OVERWRITE_WITH_GRADIENT in product.variables
        if recipe is not None and keeps_state(recipe) and not has_state:
            row["why"] += (
                "; the variables have no state of it: scales of the tensors at hand"
            )

    def _module(self, module, shapes) -> None:
        """Record any other module: a layer, or a module whose parameters have no FP8
        product.
        """
        path = "/".join(module.path)
        if path not in self.owners:
            kernel = _first_matrix(nn.meta.unbox(module.variables.get("params", {})))
            x = shapes[0] if shapes else None
            self.add_other(path, module, decision(module), is_layer(module), x, kernel)
        elif path in self.by_path:
            self.by_path[path]["kind"] = type(module).__name__


def _nnx_rows(model, args, kwargs) -> _Rows:
    region = Region(getattr(model, nnx_rules.RULES, ()), ())
    rows = _Rows()
    rows.regions[region] = None
    owners, calls = {}, {}
    if args or kwargs:
        calls, _ = recorded_calls(model, args, kwargs)
    layers = nnx_rules.layers(model)
    attributes = {id(layer): attribute for _, layer, attribute in layers}
    for path, module in nnx.iter_modules(model):
        is_layer = id(module) in attributes
        if isinstance(module, _Fp8Product) and not is_layer:
            continue  # a layer holds it
        name = "/".join(map(str, path))
        index = nnx_rules.decision(region.rules, path, module)
        decided = x = None
        if index is not None:
            decided = Decision(region.rules[index], index, region)
        product = nnx_rules.product(module)
        if name in calls:
            # the rows of all experts are recorded as a batch of each expert's
            batch_dims = int(attributes[id(module)] == "ragged_dot")
            x = calls[name].x_shape[batch_dims:]
        shapes = x, _first_matrix(vars(module), (nnx.Param, FrozenKernel))
        if product is None:
            if is_layer and decided is not None and decided.rule.recipe is not None:
                rows.use(decided)
                decided = None  # the code has overridden the rule
            rows.add_other(name, module, decided, is_layer, *shapes)
            continue
        named = product.recipe if product.names_recipe else None
        row = rows.add_product(name, module, named, product.recipe, decided, *shapes)
        owner = owners.setdefault(id(product), name)
        if owner != name:
            row["why"] += f"; shares the product and the state of {owner}"
        if (args or kwargs) and x is None:
            row["why"] += "; not called"
    return rows


def _rule_text(index: int, rule) -> str:
    """Return the name of a rule in a report: its index and its regex."""
    text = f"rule {index} {rule.path!r}"
    if rule.layers is not None:
        text += f" as {rule.layers.kind}"
    return text


def _own_product(layer) -> str:
    """Return why a layer that no rule decides about has no FP8 product: its code may
    name another product.
    """
    for name in ("dot_general_cls", "dot_general", "einsum_op", "ragged_dot"):
        product = getattr(layer, name, None)
        if product not in (None, jax.lax.dot_general, jnp.einsum):
            return f"own {getattr(product, '__name__', product)}"
    return "no rule"


def _first_matrix(params, kinds=object) -> tuple[int, ...] | None:
    """Return the shape of a module's kernel, or else of its first parameter with two or
    more dimensions, of these kinds; or None.
    """
    for name in ("kernel", *params):
        value = params.get(name)
        if isinstance(value, kinds) and len(getattr(value, "shape", ())) > 1:
            return tuple(value.shape)
    return None


def _text(value):
    """Return a cell of the table; for a recipe its name and the fields that differ from
    the defaults.
    """
    if dataclasses.is_dataclass(value):
        options = []
        for field in dataclasses.fields(value):
            option = getattr(value, field.name)
            if option != field.default:
                name = getattr(option, "name", repr(option))
                name = getattr(option, "__qualname__", name)
                options.append(f"{field.name}={name}")
        return f"{type(value).__name__}({', '.join(options)})"
    return "x".join(map(str, value)) if isinstance(value, tuple) else value
