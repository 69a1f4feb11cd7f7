"""The report of an NNX model, whose layers are read from the model without a call."""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..nnx._dot_general import _Fp8Product
from ..nnx._freeze import FrozenKernel
from ..nnx._quantize import RULES, layers, names, operation, product
from ..recipes import HighPrecision, first_match
from ._report_rows import first_matrix, recipe_and_reason, row, rule_text, skipped, why_no_product

NO_PRODUCT = {
    nnx.MultiHeadAttention: "attention scores have no FP8 product; its query, key, value and out are layers",
    (nnx.Conv, nnx.ConvTranspose): "convolutions have no FP8 product",
    nnx.LoRA: "its products are of arrays, and have no FP8 product",
    nnx.Embed: "an embedding is looked up, and attend has no FP8 product",
    nnx.bridge.ToNNX: "a Linen module; give it its rules with linen.quantize, before the bridge",
}


def rows(model, variables, args, kwargs):
    """Return `(rows, unused rules)` of an NNX model."""
    if args or kwargs or variables is not None:
        raise TypeError("report: args, variables: expected none for an NNX model, which holds its layers and state")
    rules, used, table = getattr(model, RULES, ()), set(), []

    def rule_of(paths, op):
        index = first_match(rules, paths, op)
        used.add(index)
        return index

    # 1. Report the layers that take rules.
    model_layers, owners = layers(model), {}
    for path, layer, _ in model_layers:
        index = rule_of(names(path, layer), operation(layer))
        path = "/".join(map(str, path))
        table.append(_row(path, layer, None if index is None else (index, rules[index])))
        if (fp8 := product(layer)) is not None and (owner := owners.setdefault(id(fp8), path)) != path:
            table[-1]["why"] += f"; shares the product and the state of {owner}"
    # 2. Report modules without a product where a rule matches the module in vain.
    known = {id(layer) for _, layer, _ in model_layers}
    for path, module in nnx.iter_modules(model):
        reason = why_no_product(NO_PRODUCT, module)
        kernel = _kernel(module)
        if id(module) in known or isinstance(module, _Fp8Product) or (reason is None and kernel is None):
            continue
        path = "/".join(map(str, path))
        index = rule_of([path], None)
        if index is not None:
            why = skipped(rule_text(index, rules[index]), rules[index], reason or "has no attribute dot_general")
            table.append(row(path, type(module).__name__, None, why, None, kernel))
    return table, [rule_text(i, rule) for i, rule in enumerate(rules) if i not in used]


def _row(path: str, layer, decided):
    """Return the row of a layer; `decided` is the rule that matches the layer, which code may have overridden since."""
    fp8, kind, kernel = product(layer), type(layer).__name__, _kernel(layer)
    rule = None if decided is None else rule_text(*decided)
    if fp8 is None:
        return row(path, kind, None, rule if rule and decided[1].recipe is None else _without(layer), None, kernel)
    named = fp8.recipe if fp8.names_recipe else None
    is_rule = rule is not None and named == decided[1].layer_recipe
    made_for = None if isinstance(fp8.recipe, HighPrecision) else fp8.recipe
    recipe, why = recipe_and_reason(named, lambda: made_for, rule if is_rule else None)
    return row(path, kind, recipe, why, None, kernel)


def _without(layer) -> str:
    replaced = (getattr(layer, name, None) for name in ("dot_general_cls", "dot_general", "einsum_op"))
    runs = next((value for value in replaced if value is not None), lax.dot_general)
    return "no rule" if runs in (lax.dot_general, jnp.einsum) else f"own {getattr(runs, '__name__', runs)}"


def _kernel(module):
    """Return the shape of the module's kernel, or else of its first parameter with two or more dimensions."""
    frozen = getattr(module, "kernel", None)
    if isinstance(frozen, FrozenKernel):
        return frozen.shape
    params = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return first_matrix({name: param.get_value() for name, param in params.items()})
