"""quantize: an NNX model whose layers take their recipes from rules, changed in
place.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from .._jax._trees import Tree
from ..dot import _contexts
from ..recipes import (
    Rule,
    Rules,
    checked_rules,
    first_match,
    is_foreign,
    kind,
    layer_names,
    warn_of_rules,
)
from ._dot_general import (
    PRODUCTS,
    OverwriteWithGradient,
    _Fp8Product,
)
from ._layers import Linear, RaggedLinear
from ._layers_by_rule import module_changes

# The attribute of a model that keeps its rules, for `jaxfp8.report`.
RULES = "fp8_rules"


def quantize(model: Tree, rules: Rules) -> Tree:
    """Put the layers of a model in FP8 as the rules say: `rules` are pairs
    `(path_regex, recipe or None)`.

        jaxfp8.nnx.quantize(
            model, [("head", None), (r"blocks/\\d+/mlp/.*", jaxfp8.DelayedScaling())]
        )

    The first rule whose regex matches the whole path of a layer decides
    (`re.fullmatch`; the path is the attributes that lead to the layer from this model
    on, joined by `/`). The recipe None is high precision; a layer that runs FP8 then
    loses its state. A layer that no rule matches stays as it is. A layer that is shared
    has only the first path that `nnx.iter_modules` gives.

    Layers are the modules with an attribute `dot_general` (`nnx.Linear`,
    `nnx.LinearGeneral`, the layers inside attention, `jaxfp8.nnx.Linear`) or
    `einsum_op` (`nnx.Einsum`) or `ragged_dot` (in `jaxfp8.nnx.Experts`): each gets an
    `Fp8DotGeneral`, `Fp8Einsum` or `Fp8RaggedDot` of its own, with new state. A rule
    may name a product of these classes that another module holds by its own path or by
    that of the module. Layers that `nnx.vmap` has stacked along the first axis get
    stacked state. Convolutions, attention scores, LoRA and `nnx.Embed.attend` have no
    FP8 product; `jaxfp8.report` names those of them that a rule matches. No rule
    reaches a call of `jax.lax.ragged_dot`.

    In place of a recipe `Linear.of("query", "key", "value")` makes layers of a module
    that the regex matches one product, and `GatedMLP.of(gate=, up=, down=)` makes three
    layers a GatedMLP.

    Args:
        model: an NNX module, changed in place. If the model has rules already,
            `jaxfp8.report` reads the new rules first; only the new rules change layers.
        rules: the list of pairs.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not an NNX module, or `rules` are not pairs of a string
            and a recipe.
        ValueError: a regex does not compile, or a layer is stacked along another axis
            than the first, or is frozen. The model is not changed then, nor where a
            recipe raises. When called: a module does not compute what `Linear.of`
            or `GatedMLP.of` says.
        FP8StateWarning: rules ask for FP8, and none gives it to a layer; a rule matches
            no layer; or a module that a rule matches multiplies its parameters itself.
    """
    rules = checked_rules("nnx.quantize", rules)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"nnx.quantize: model: expected an NNX module, got {kind(model)}; or use "
            "jaxfp8.linen.quantize"
        )
    model_layers = layers(model)
    changes = []
    for path, layer, attribute in model_layers:
        index = decision(rules, path, layer)
        if index is not None:
            old = product(layer)
            if old is not None and old._frozen_arrays() is not None:
                raise ValueError(
                    f"nnx.quantize: {_name(path)}: jaxfp8.freeze left codes of its "
                    "kernel alone; give a model its rules before it is frozen"
                )
            stacked = _stacked("nnx.quantize", path, layer)
            new_product = _new_product(layer, attribute, rules, index, stacked)
            changes.append((layer, attribute, new_product))
    modules = module_changes(model, rules)
    # All products exist before the first layer changes: an error above leaves the model
    # as it was.
    for change in changes:
        _change(*change)
    for holder, name, module in modules:
        setattr(holder, name, module)
    _warn_of_rules(model, rules, model_layers)
    _forget_unused(model)
    setattr(model, RULES, (*rules, *getattr(model, RULES, ())))
    return model


def _warn_of_rules(model, rules, model_layers) -> None:
    """Warn of rules that give no FP8, or match no layer, and of modules that multiply
    arrays of their own.
    """
    names, known = {}, set()
    for path, _, attribute in model_layers:
        layer = layer_names(path, attribute is None)
        names[layer[0]] = layer
        known.update(layer)
    params = {}
    for path, module in nnx.iter_modules(model):
        if "/".join(map(str, path)) in known:
            continue
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param):
                shape = getattr(value.get_value(), "shape", ())
                params[(*path, name)] = shape if is_foreign(module) else None
    warn_of_rules("nnx.quantize", type(model).__name__, rules, names, params)


def layers(model):
    """List `(path, layer, attribute)` of all layers; `attribute` is None where the
    layer itself is the product.
    """
    modules = list(nnx.iter_modules(model))
    held, model_layers = set(), []
    for path, module in modules:
        attribute = attribute_of(module)
        if attribute is not None:
            model_layers.append((path, module, attribute))
            held.add(id(getattr(module, attribute)))
    for path, module in modules:
        if isinstance(module, _Fp8Product) and id(module) not in held:
            model_layers.append((path, module, None))
    return model_layers


def attribute_of(module) -> str | None:
    """Return the attribute in which a module holds its product; None for a module
    without one.
    """
    return next((name for name in PRODUCTS if name in vars(module)), None)


def decision(rules: tuple[Rule, ...], path: tuple, module) -> int | None:
    """Find the index of the first rule that matches the module at `path`."""
    return first_match(rules, layer_names(path, isinstance(module, _Fp8Product)))


def product(layer):
    """Get the FP8 product of a layer; None where the layer runs another product."""
    if isinstance(layer, _Fp8Product):
        return layer
    value = vars(layer).get(attribute_of(layer))
    # the layer then ignores its dot_general
    has_class = getattr(layer, "dot_general_cls", None) is not None
    return value if isinstance(value, _Fp8Product) and not has_class else None


def _stacked(where, path, layer) -> tuple[int, ...]:
    """Get the leading dimensions that `nnx.vmap` gave a layer's kernel.

    Raises:
        ValueError: the kernel has other additional dimensions than leading ones.
    """
    if isinstance(layer, _Fp8Product):
        state = jax.tree.leaves(nnx.state(layer, OverwriteWithGradient))
        return state[0].shape[:-1] if state else ()
    if isinstance(layer, (nnx.Einsum, RaggedLinear)):
        expected = tuple(layer.kernel_shape)
    elif isinstance(layer, (nnx.Linear, nnx.LinearGeneral)):
        batch = getattr(layer, "batch_axis", {}).values()
        features = layer.in_features, layer.out_features
        expected = (*batch, *jax.tree.leaves(features))
    else:
        return ()
    shape = layer.kernel.get_value().shape
    lead = shape[: len(shape) - len(expected)]
    if lead + expected != shape:
        raise ValueError(
            f"{where}: {_name(path)}: expected a kernel {list(expected)}, or a stack "
            f"of them along the first axis, got {list(shape)}"
        )
    return lead


@dataclasses.dataclass(frozen=True)
class _InHighPrecision:
    """The function of a layer that a rule keeps in high precision.

    Attributes:
        function: `jax.lax.dot_general` or `jnp.einsum`.
        reason: names the rule, for `jaxfp8.inspect`.
    """

    function: Callable[..., jax.Array]
    reason: str

    def __call__(self, *operands, **options):
        with _contexts.high_precision(self.reason):
            return self.function(*operands, **options)


def _new_product(layer, attribute, rules: tuple[Rule, ...], index: int, stacked):
    """Make the product that a rule gives a layer."""
    rule = rules[index]
    # Our own layer passes a bias, which these functions do not take.
    plain = {"dot_general": jax.lax.dot_general, "einsum_op": jnp.einsum}.get(attribute)
    if plain is not None and rule.recipe is None and not isinstance(layer, Linear):
        return _InHighPrecision(plain, f"rule {index} says None")
    cls = type(layer) if attribute is None else PRODUCTS[attribute]
    new_product = cls(rule.layer_recipe)
    new_product.named_layers = rule.layers
    state = nnx.state(new_product, OverwriteWithGradient)

    def stack(leaf):
        return jnp.broadcast_to(leaf, (*stacked, *leaf.shape))

    nnx.update(new_product, jax.tree.map(stack, state))
    return new_product


def _change(layer, attribute, new_product) -> None:
    # the product changes in place, because a list or several modules may hold it
    if attribute is None:
        vars(layer).clear()
        vars(layer).update(vars(new_product))
        return
    # NNX has the attribute as static where it held a function.
    mark = nnx.data if isinstance(new_product, _Fp8Product) else nnx.static
    setattr(layer, attribute, mark(new_product))
    if getattr(layer, "dot_general_cls", None) is not None:
        layer.dot_general_cls = None


def _name(path) -> str:
    """Return the name of a layer for an error; `model` where the layer is the model."""
    return "/".join(map(str, path)) or "model"


def _forget_unused(model) -> None:
    """Remove from attention the products that none of its layers runs any more, whose
    state it would keep.
    """
    for _, attention in list(nnx.iter_modules(model)):
        if isinstance(attention, nnx.MultiHeadAttention):
            layers = attention.query, attention.key, attention.value, attention.out
            held = [layer.dot_general for layer in layers]
            for attribute in ("qkv_dot_general", "out_dot_general"):
                shared = getattr(attention, attribute)
                if isinstance(shared, _Fp8Product) and shared not in held:
                    setattr(attention, attribute, nnx.static(None))
