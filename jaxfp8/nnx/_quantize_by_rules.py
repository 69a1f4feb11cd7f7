"""quantize: an NNX model whose layers take their recipes from rules, changed in
place.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from .._jax import _warnings
from .._jax._trees import Tree
from ..recipes import (
    FP8StateWarning,
    Rule,
    Rules,
    checked_rules,
    first_match,
    is_foreign,
    kind,
    layer_names,
    some,
    warn_of_idle_rules,
    warn_of_own_arrays,
)
from ._dot_general import (
    PRODUCTS,
    Fp8Einsum,
    OverwriteWithGradient,
    _Fp8Product,
    frozen_arrays,
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
    model_layers, changes = layers(model), []
    for path, layer, attribute in model_layers:
        index = decision(rules, path, layer)
        if index is not None:
            _refuse_frozen(path, layer)
            stacked = _stacked("nnx.quantize", path, layer)
            changes.append(
                (
                    layer,
                    attribute,
                    rules[index],
                    _new_product(layer, attribute, rules[index], stacked),
                )
            )
    modules = module_changes(model, rules)
    # All products exist before the first layer changes: an error above leaves the model
    # as it was.
    for layer, attribute, _, new_product in changes:
        _change(layer, attribute, new_product)
    for holder, name, module in modules:
        setattr(holder, name, module)
    fp8_paths = [rule.path for rule in rules if rule.recipe is not None]
    if fp8_paths and all(rule.recipe is None for _, _, rule, _ in changes):
        _warn_of_rules(model, fp8_paths, model_layers)
    else:
        _check_rules(model, rules, model_layers)
    _forget_unused(model)
    setattr(model, RULES, (*rules, *getattr(model, RULES, ())))
    return model


def _check_rules(model, rules, model_layers) -> None:
    """Warn of rules that match no layer, and of modules that multiply arrays of their
    own.
    """
    names = {
        "/".join(map(str, path)): layer_names(path, name is None)
        for path, _, name in model_layers
    }
    # An embedding or a norm is in high precision, as a rule may say; a block of
    # layers alone is not.
    own_arrays = dict(_own_arrays(model))
    around = {path[:i] for path, *_ in model_layers for i in range(len(path))}
    around -= {path[:-1] for path in own_arrays}
    modules = [
        path
        for path, module in nnx.iter_modules(model)
        if not isinstance(module, _Fp8Product)
    ]
    rest = ["/".join(map(str, path)) for path in modules if path not in around]
    to_layers = [
        rule
        for rule in rules
        if rule.recipe is not None or not rule.matches(rest, "dot_general")
    ]
    warn_of_idle_rules("nnx.quantize", type(model).__name__, to_layers, names)
    warn_of_own_arrays("nnx.quantize", rules, own_arrays)


def layers(model):
    """List `(path, layer, attribute)` of all layers; `attribute` is None where the
    layer itself is the product.
    """
    modules = [(path, module) for path, module in nnx.iter_modules(model)]
    held, model_layers = set(), []
    for path, module in modules:
        attribute = attribute_of(module)
        if attribute is not None:
            model_layers.append((path, module, attribute))
            held.add(id(getattr(module, attribute)))
        # attention keeps the products that it gave to its layers
        elif isinstance(module, nnx.MultiHeadAttention):
            held |= {id(module.qkv_dot_general), id(module.out_dot_general)}
    products = [
        (path, module) for path, module in modules if isinstance(module, _Fp8Product)
    ]
    return model_layers + [
        (path, product, None) for path, product in products if id(product) not in held
    ]


def attribute_of(module) -> str | None:
    """Return the attribute in which a module holds its product; None for a module
    without one.
    """
    return next((name for name in PRODUCTS if name in vars(module)), None)


def _own_arrays(model):
    """Yield the path and the shape of each parameter of a module that is none of Flax's
    and holds no product.
    """
    for path, module in nnx.iter_modules(model):
        values = vars(module).values()
        is_layer = any(isinstance(value, _Fp8Product) for value in values)
        if _operation(module) is None and is_foreign(module) and not is_layer:
            for name, value in vars(module).items():
                if isinstance(value, nnx.Param):
                    yield (*path, name), getattr(value.get_value(), "shape", ())


def decision(rules: tuple[Rule, ...], path: tuple, module) -> int | None:
    """Find the index of the first rule that matches the module at `path`."""
    return first_match(
        rules, layer_names(path, isinstance(module, _Fp8Product)), _operation(module)
    )


def _operation(module) -> str | None:
    """Return the `op_names` word for a layer, `"einsum"` or `"dot_general"`; None for a
    module without a product.
    """
    if isinstance(module, Fp8Einsum) or "einsum_op" in vars(module):
        return "einsum"
    is_product = isinstance(module, _Fp8Product)
    return "dot_general" if is_product or attribute_of(module) else None


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
    if isinstance(layer, (nnx.Linear, Linear)):
        out = (
            layer.out_features
            if isinstance(layer.out_features, tuple)
            else (layer.out_features,)
        )
        expected = (layer.in_features, *out)
    elif isinstance(layer, nnx.LinearGeneral):
        expected = (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
    elif isinstance(layer, (nnx.Einsum, RaggedLinear)):
        expected = tuple(layer.kernel_shape)
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


def _new_product(layer, attribute, rule: Rule, stacked):
    """Make the product that a rule gives a layer; a function for high precision."""
    if attribute is None:
        new_product = type(layer)(rule.layer_recipe)
    elif rule.recipe is None and attribute == "einsum_op":
        return jnp.einsum
    elif (
        rule.recipe is None
        and attribute == "dot_general"
        and not isinstance(layer, Linear)
    ):
        return jax.lax.dot_general
    else:
        new_product = PRODUCTS[attribute](rule.layer_recipe)
    _stack(new_product, stacked)
    return new_product


def _change(layer, attribute, new_product) -> None:
    # the product changes in place, because a list or several modules may hold it
    if attribute is None:
        layer.become(new_product)
        return
    # NNX has the attribute as static where it held a function.
    is_fp8 = isinstance(new_product, _Fp8Product)
    setattr(
        layer, attribute, nnx.data(new_product) if is_fp8 else nnx.static(new_product)
    )
    if getattr(layer, "dot_general_cls", None) is not None:
        layer.dot_general_cls = None


def _warn_of_rules(model, paths, model_layers) -> None:
    names = some(["/".join(map(str, path)) for path, *_ in model_layers]) or "none"
    _warnings.warn(
        f"nnx.quantize: rules: none of {paths} gives a layer of "
        f"{type(model).__name__} FP8: a regex has to match the whole path of a layer, "
        f"as '.*linear' does. The layers are {names}; see jaxfp8.report(model)",
        FP8StateWarning,
    )


def _name(path) -> str:
    """Return the name of a layer for an error; `model` where the layer is the model."""
    return "/".join(map(str, path)) or "model"


def _refuse_frozen(path, layer) -> None:
    fp8_product = product(layer)
    if fp8_product is not None and frozen_arrays(fp8_product) is not None:
        raise ValueError(
            f"nnx.quantize: {_name(path)}: jaxfp8.freeze left codes of its kernel "
            "alone; give a model its rules before it is frozen"
        )


def _stack(product, shape) -> None:
    state = nnx.state(product, OverwriteWithGradient)

    def stacked(leaf):
        return jnp.broadcast_to(leaf, (*shape, *leaf.shape))

    nnx.update(product, jax.tree.map(stacked, state))


def _forget_unused(model) -> None:
    """Remove from attention the products that none of its layers runs any more, whose
    state it would keep.
    """
    for attention in [
        module
        for _, module in nnx.iter_modules(model)
        if isinstance(module, nnx.MultiHeadAttention)
    ]:
        for attribute, users in (
            ("qkv_dot_general", ("query", "key", "value")),
            ("out_dot_general", ("out",)),
        ):
            shared, holders = (
                getattr(attention, attribute),
                [getattr(attention, name) for name in users],
            )
            if isinstance(shared, _Fp8Product) and all(
                layer.dot_general is not shared for layer in holders
            ):
                setattr(attention, attribute, nnx.static(None))
