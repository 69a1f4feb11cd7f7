"""NNX modules of which a rule runs layers together: as one product, or as a GatedMLP.

Such a module is an instance of a subclass of its class, with the same attributes: its
`__call__` runs that of the class with other functions in place of the layers.
"""

import functools

from flax import nnx

from .._jax._trees import split_arrays
from ..dot import Parameters, layers_call
from ..recipes import QTensor, Rule, first_match, is_off, layer_names, module_rule
from ._dot_general import Fp8DotGeneral, frozen_arrays, path_of, read_state
from ._layers import Linear


class JoinedModule:
    """Mixin for the class of a module whose layers a rule names.

    Attributes:
        _fp8_rule: the rule.
        _fp8_class: the class of the module without the rule.
    """

    _fp8_rule: Rule
    _fp8_class: type[nnx.Module]

    def __call__(self, *args, **kwargs):
        """Call the module, with functions that run together in place of its layers."""
        named = self._fp8_rule.layers
        layers = {name: getattr(self, name, None) for name in named.names}

        def run(module, call, args, kwargs):
            functions = {} if call is None else {n: call(n) for n in named.names}
            module = _with_layers(module, functions)
            return module(*args, **kwargs), module

        def forward(stand_in):
            graph, state = nnx.split(self)
            arrays, joined = split_arrays((state, args, kwargs))

            def run_copy(arrays):
                state, args, kwargs = joined(arrays)
                run(nnx.merge(graph, state), of_layer, args, kwargs)

            def of_layer(name):
                return lambda x: stand_in(name, x)

            return arrays, run_copy

        call = None
        if not _runs_apart(layers.values()):
            path = path_of(layers[named.names[0]].dot_general) or type(self).__name__
            joined = layers_call(
                path.rpartition("/")[0] or path,
                named,
                lambda name: _parameters(layers[name]),
                (nnx.Linear, nnx.LinearGeneral, Linear),
                forward,
            )

            def call(name):
                return lambda *args, **kwargs: joined(name, layers[name], args, kwargs)

        y, module = run(self, call, args, kwargs)
        if call is not None:
            joined.finish()
        vars(self).update(vars(module) | layers)  # what the module stored in itself
        return y

    def __reduce_ex__(self, protocol):  # pickle and deepcopy
        return _with_rule, (_with_layers(self, {}), self._fp8_rule)


def _with_layers(module, layers: dict) -> nnx.Module:
    """Return a shallow copy of a module, of its class without the rule."""
    copy = object.__new__(module._fp8_class)
    vars(copy).update(vars(module) | layers)
    return copy


def _with_rule(module, rule: Rule) -> nnx.Module:
    """Return a shallow copy of a module, of a class with the rule."""
    copy = object.__new__(_class_of(type(module), rule))
    vars(copy).update(vars(module))
    return copy


@functools.cache
def _class_of(plain_class, rule: Rule) -> type[nnx.Module]:
    class WithRule(JoinedModule, plain_class):
        _fp8_rule = rule
        _fp8_class = plain_class

    WithRule.__name__, WithRule.__qualname__ = (
        plain_class.__name__,
        plain_class.__qualname__,
    )
    WithRule.__module__, WithRule.__doc__ = (
        plain_class.__module__,
        plain_class.__doc__,
    )
    return WithRule


def _runs_apart(layers) -> bool:
    """Tell whether each layer runs its own product: in high precision, with codes of
    kernels, and where another product is in the place of one of ours.
    """
    products = [getattr(layer, "dot_general", None) for layer in layers]
    return is_off() or any(
        type(product) is not Fp8DotGeneral
        or frozen_arrays(product) is not None
        or isinstance(layer.kernel.get_value(), QTensor)
        for product, layer in zip(products, layers, strict=True)
    )


def _parameters(layer) -> Parameters:
    product = layer.dot_general
    return Parameters(
        layer.kernel.get_value(),
        None if layer.bias is None else layer.bias.get_value(),
        read_state(product, product.recipe),
    )


def module_changes(
    model: nnx.Module, rules: tuple[Rule, ...]
) -> list[tuple[nnx.Module, str, nnx.Module]]:
    """List `(holder, attribute, module)` of the modules in a model whose layers run
    together from now on, or no longer.

    Raises:
        ValueError: a module lacks a layer, or is in no attribute of another module.
    """
    modules, changes = list(nnx.iter_modules(model)), []
    for path, module in modules:
        new = _changed(module, path, rules)
        if new is None:
            continue
        holders = [
            (holder, name, new)
            for _, holder in modules
            for name, value in vars(holder).items()
            if value is module
        ]
        if not holders:
            raise ValueError(
                f"nnx.quantize: rules: {'/'.join(map(str, path)) or 'model'}: expected "
                "a module in an attribute of another module of the model, or in an "
                f"nnx.List, got {type(module).__name__}; a rule with names of "
                "layers puts another module in its place"
            )
        changes += holders
    return changes


def _changed(module, path, rules) -> nnx.Module | None:
    """Return what takes the place of the module at `path`; None where it stays."""
    is_joined = isinstance(module, JoinedModule)
    plain = _with_layers(module, {}) if is_joined else module
    rule = module_rule(rules, path)
    if rule is not None and any(name in vars(module) for name in rule.layers.names):
        missing = [name for name in rule.layers.names if name not in vars(module)]
        if missing:
            raise ValueError(
                f"nnx.quantize: rules: {'/'.join(map(str, path))}: expected layers "
                f"{', '.join(rule.layers.names)}, got no {', '.join(missing)}; correct "
                "the names in the rule"
            )
        return _with_rule(plain, rule)
    if is_joined and any(
        first_match(rules, layer_names((*path, name), False), "dot_general") is not None
        for name in module._fp8_rule.layers.names
    ):
        return plain
    return None
