"""The rows of a report: the layers of a Linen or NNX model, the recipe of each and the reason.

The layers of a Linen model are recorded while `init` or `apply` is traced for shapes; those of an NNX model are read
without a call.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from .._jax._arrays import split_arrays
from ..linen._dot_general import Fp8Module
from ..linen._quantize import decision, is_layer
from ..linen._scopes import regions
from ..nnx import _quantize as of_nnx
from ..nnx._dot_general import _Fp8Product
from ..nnx._freeze import FrozenKernel
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    DelayedScaling,
    HighPrecision,
    QTensor,
    init_state,
    resolve,
)

COLUMNS = ("layer", "kind", "input", "kernel", "recipe", "why")
_NO_PRODUCT = {
    (nn.MultiHeadDotProductAttention, nnx.MultiHeadAttention): (
        "attention scores have no FP8 product; its query, key, value and out are layers"
    ),
    (nn.Conv, nn.ConvTranspose, nn.ConvLocal, nnx.Conv, nnx.ConvTranspose): "convolutions have no FP8 product",
    (nn.Embed, nnx.Embed): "an embedding is looked up, and attend has no FP8 product",
    nnx.LoRA: "its products are of arrays, and have no FP8 product",
    nnx.bridge.ToNNX: "a Linen module; give it its rules with linen.quantize, before the bridge",
}

# This context is part of jit's cache key, so that blocks in nn.jit are traced anew for each report; the methods of a
# cached block would not run.
_report = jax.make_user_context(None)


def linen_rows(model, variables, args, kwargs):
    """Return `(rows, unused rules)` of a Linen model."""
    recorder = _Recorder()
    arrays, joined = split_arrays((variables, args, kwargs))

    def run(arrays):
        variables, args, kwargs = joined(arrays)
        if variables is None:
            return model.init(jax.random.key(0), *args, **kwargs)
        return model.apply(variables, *args, **kwargs)

    with _report(object()), nn.intercept_methods(recorder.record):
        jax.eval_shape(run, arrays)
    rules = [(region, i, rule) for region in recorder.regions for i, rule in enumerate(region.rules)]
    unused = [_rule_text(i, rule) for region, i, rule in rules if (region, i) not in recorder.used]
    return list(recorder.rows.values()), unused


class _Recorder:
    """Collects a row for each layer that a model's methods run, and the rules that decided."""

    def __init__(self):
        self.rows, self.owners, self.regions, self.used = {}, {}, [], set()

    def record(self, next_method, args, kwargs, context):
        """Run a method in Flax's place, and record the layer or product that it belongs to."""
        module = context.module
        self.regions += [region for region in regions(module.scope) if region not in self.regions]
        result = next_method(*args, **kwargs)
        if isinstance(module, Fp8Module):
            if context.method_name == "__call__":
                self._product(module, args)
        elif context.method_name in ("__call__", "attend"):
            self._module(module, args)
        return result

    def _product(self, product, args) -> None:
        """Record an FP8 product in the name of the layer that holds it, unless the code gave the product a name."""
        kind, owner = type(product).__name__, "/".join(product.path[:-1])
        # 1. Find the path to report. A scan calls its body more than once, so a product may be recorded again.
        first = self.owners.setdefault(owner, product.path)
        is_named = not product.path or product.path[-1] != f"{kind}_0"
        path = "/".join(product.path) if is_named or first != product.path else owner
        arrays = [arg.data if isinstance(arg, QTensor) else arg for arg in args if hasattr(arg, "shape")]
        # 2. Find the recipe, and the rule or the code that names it.
        decided = decision(product)
        if decided is None:
            named, why = product.named_recipe(), None
        else:
            named, why = decided.rule.layer_recipe, self._use(decided)
        recipe, why = _recipe_and_reason(named, product._recipe_of_fields, why)
        keeps_state = recipe is not None and jax.tree.leaves(jax.eval_shape(lambda: init_state(recipe)))
        if keeps_state and OVERWRITE_WITH_GRADIENT not in product.variables:
            why += "; the variables have no state of it: scales of the tensors at hand"
        self.rows[path] = _row(path, kind, recipe, why, *(tuple(array.shape) for array in arrays[:2]))

    def _module(self, module, args) -> None:
        """Record any other module: a layer, or a module whose parameters have no FP8 product."""
        path, kind = "/".join(module.path), type(module).__name__
        if path in self.owners:
            if path in self.rows:
                self.rows[path]["kind"] = kind
            return
        kernel, reason = _first_matrix(nn.meta.unbox(module.variables.get("params", {}))), _why_no_product(module)
        decided, why = decision(module), None
        # A module without a product is reported only where a rule matches the module in vain.
        if is_layer(module):
            why = _own_product(module) if decided is None else self._use(decided)
        elif decided is not None and (reason or kernel):
            why = _skipped(self._use(decided), decided.rule, reason or "takes no dot_general_cls")
        if why is not None:
            x = tuple(args[0].shape) if args and hasattr(args[0], "shape") else None
            self.rows[path] = _row(path, kind, None, why, x, kernel)

    def _use(self, decided) -> str:
        self.used.add((decided.region, decided.index))
        return _rule_text(decided.index, decided.rule)


def nnx_rows(model, variables, args, kwargs):
    """Return `(rows, unused rules)` of an NNX model."""
    if args or kwargs or variables is not None:
        raise TypeError("report: args, variables: expected none for an NNX model, which holds its layers and state")
    rules, used, rows, owners = getattr(model, of_nnx.RULES, ()), set(), [], {}
    # 1. Report the layers that take rules.
    layers = of_nnx.layers(model)
    for path, layer, _ in layers:
        index = of_nnx.decision(rules, path, layer)
        used.add(index)
        path, product = "/".join(map(str, path)), of_nnx.product(layer)
        recipe, why = _of_layer(layer, product, None if index is None else (index, rules[index]))
        if product is not None and (owner := owners.setdefault(id(product), path)) != path:
            why += f"; shares the product and the state of {owner}"
        rows.append(_row(path, type(layer).__name__, recipe, why, None, _kernel(layer)))
    # 2. Report modules without a product where a rule matches the module in vain.
    known = {id(layer) for _, layer, _ in layers}
    for path, module in nnx.iter_modules(model):
        reason, kernel = _why_no_product(module), _kernel(module)
        if id(module) in known or isinstance(module, _Fp8Product) or not (reason or kernel):
            continue
        index = of_nnx.decision(rules, path, module)
        used.add(index)
        if index is not None:
            why = _skipped(_rule_text(index, rules[index]), rules[index], reason or "has no attribute dot_general")
            rows.append(_row("/".join(map(str, path)), type(module).__name__, None, why, None, kernel))
    return rows, [_rule_text(i, rule) for i, rule in enumerate(rules) if i not in used]


def _of_layer(layer, product, decided):
    """Return `(recipe, why)` of a layer; `decided` is the rule that matches it; code may have overridden the rule."""
    rule = None if decided is None else _rule_text(*decided)
    if product is None:
        return None, rule if rule and decided[1].recipe is None else _own_product(layer)
    named = product.recipe if product.names_recipe else None
    is_rule = rule is not None and named == decided[1].layer_recipe
    made_for = None if isinstance(product.recipe, HighPrecision) else product.recipe
    return _recipe_and_reason(named, lambda: made_for, rule if is_rule else None)


def _kernel(module):
    """Return the shape of an NNX module's kernel, or else of its first parameter with two or more dimensions."""
    frozen = getattr(module, "kernel", None)
    if isinstance(frozen, FrozenKernel):
        return frozen.shape
    params = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return _first_matrix({name: param.get_value() for name, param in params.items()})


def _rule_text(index: int, rule) -> str:
    """Return the name of a rule in a report: its index, its regex and its operations."""
    ops = f" {'/'.join(rule.op_names)}" if rule.op_names else ""
    return f"rule {index} {rule.path!r}{ops}"


def _row(layer: str, kind: str, recipe, why: str, input=None, kernel=None) -> dict[str, Any]:
    """Return a row as a dict, in the order of `COLUMNS`."""
    recipe = None if isinstance(recipe, HighPrecision) else recipe
    return dict(zip(COLUMNS, (layer, kind, input, kernel, recipe, why), strict=True))


def _why_no_product(module) -> str | None:
    return next((reason for classes, reason in _NO_PRODUCT.items() if isinstance(module, classes)), None)


def _own_product(layer) -> str:
    """Return why a layer that no rule decides about has no FP8 product: its code may name another product."""
    named = (getattr(layer, name, None) for name in ("dot_general_cls", "dot_general", "einsum_op"))
    product = next((value for value in named if value is not None), None)
    is_plain = product in (None, jax.lax.dot_general, jnp.einsum)
    return "no rule" if is_plain else f"own {getattr(product, '__name__', product)}"


def _first_matrix(params) -> tuple[int, ...] | None:
    """Return the shape of a module's kernel, or else of its first parameter with two or more dimensions; or None."""
    shapes = {name: tuple(value.shape) for name, value in params.items() if len(getattr(value, "shape", ())) > 1}
    return shapes.get("kernel", next(iter(shapes.values()), None))


def _skipped(rule: str, matched, reason: str) -> str:
    """Return why a module that a rule matches runs in high precision: by the rule, or because it has no FP8 product."""
    return rule if matched.recipe is None else f"skipped: {reason} ({rule})"


def _recipe_and_reason(named, default, rule: str | None):
    """Return `(recipe, why)` of an FP8 product that is traced here.

    Args:
        named: the recipe from a rule, or from the code; or None.
        default: a function without arguments; it returns the recipe of a product that names none, outside of
            `autocast`.
        rule: the text of the rule, where a rule decides; else None.
    """
    # With a recipe given, only `autocast(enabled=False)` makes `resolve` return None.
    if resolve(DelayedScaling(), DelayedScaling) is None:
        return None, "autocast is off"
    recipe = resolve(named, default)
    if rule is not None:
        return recipe, rule
    if named is not None:
        return recipe, "own recipe"
    # `resolve` returns the default itself unless an `autocast` decides, so a marker tells which it was.
    marker = DelayedScaling(amax_history_len=1)
    return recipe, "default" if resolve(None, lambda: marker) is marker else "autocast"
