"""NNX modules of which a rule runs layers together: as one product, or as a GatedMLP.

Such a module is an instance of a subclass of its class, with the same attributes: its
`__call__` runs that of the class with other functions in place of the layers.
"""

import functools

from flax import nnx

from ..dot import Parameters, _contexts, layers_call
from ..recipes import QTensor, Rule, first_match, is_off, module_rule
from ._dot_general import Fp8DotGeneral, path_of
from ._layers import Linear


def _call(self, *args, **kwargs):
    """Call the module, with functions that run together in place of its layers."""
    named = self._fp8_rule.layers
    layers = {name: getattr(self, name, None) for name in named.names}
    parameters = _parameters(layers)
    if parameters is None:
        return self._fp8_class.__call__(self, *args, **kwargs)

    def run(module, function):
        """Call a copy of the module with `function(name)` in place of each layer;
        return the result and the copy.
        """
        module = _with_layers(module, {name: function(name) for name in layers})
        return module(*args, **kwargs), module

    def forward(stand_in):
        run(nnx.clone(self), lambda name: lambda x: stand_in(name, x))

    def of_layer(name):
        return lambda *args, **kwargs: call(name, layers[name], args, kwargs)

    first = getattr(layers[named.names[0]], "dot_general", None)
    path = path_of(first) or type(self).__name__
    path = path.rpartition("/")[0] or path
    kinds = nnx.Linear, nnx.LinearGeneral, Linear
    call = layers_call(named)(path, named, parameters, kinds, forward)
    y, module = run(self, of_layer)
    vars(self).update(vars(module) | layers)  # what the module stored in itself
    return y


def _reduce(self, protocol):  # pickle and deepcopy
    return _with_rule, (_with_layers(self, {}), self._fp8_rule)


def _with_layers(module, layers: dict) -> nnx.Module:
    """Return a shallow copy of a module, of its class without the rule."""
    copy = object.__new__(module._fp8_class)
    vars(copy).update(vars(module) | layers)
    return copy


def _with_rule(module, rule: Rule) -> nnx.Module:
    """Return a shallow copy of a module of a plain class, of a class with the rule."""
    copy = object.__new__(_class_of(type(module), rule))
    vars(copy).update(vars(module))
    return copy


@functools.cache
def _class_of(plain_class, rule: Rule) -> type[nnx.Module]:
    class WithRule(plain_class):
        _fp8_rule, _fp8_class = rule, plain_class
        __call__, __reduce_ex__ = _call, _reduce

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(WithRule, name, getattr(plain_class, name))
    return WithRule


def _parameters(layers: dict[str, nnx.Module]) -> dict[str, Parameters] | None:
    """Return what layers have; None where each layer runs its own product: in high
    precision, with codes of kernels, and where another product is in the place of ours.
    """
    if is_off() or _contexts.observed_by.value is not None:
        return None
    parameters = {}
    for name, layer in layers.items():
        if layer is None:
            parameters[name] = Parameters(None, None, None)
            continue
        product = getattr(layer, "dot_general", None)
        if type(product) is not Fp8DotGeneral or product._frozen_arrays() is not None:
            return None
        kernel = layer.kernel.get_value()
        if isinstance(kernel, QTensor):
            return None
        bias = None if layer.bias is None else layer.bias.get_value()
        state = product._read_state(product.recipe)
        parameters[name] = Parameters(kernel, bias, state)
    return parameters


def module_changes(
    model: nnx.Module, rules: tuple[Rule, ...]
) -> list[tuple[nnx.Module, str, nnx.Module]]:
    """List `(holder, attribute, module)` of the modules in a model whose layers run
    together from now on, or no longer.

    Raises:
        ValueError: a module is in no attribute of another module.
    """
    modules, changes = list(nnx.iter_modules(model)), []
    for path, module in modules:
        new = _changed(module, path, rules)
        holders = []
        for _, holder in modules:
            for name, value in vars(holder).items():
                if value is module:
                    holders.append((holder, name, new))
        if new is not None and not holders:
            raise ValueError(
                f"nnx.quantize: rules: {'/'.join(map(str, path)) or 'model'}: expected "
                "a module in an attribute of another module of the model, or in an "
                f"nnx.List, got {type(module).__name__}; a rule with names of "
                "layers puts another module in its place"
            )
        if new is not None:
            changes += holders
    return changes


def _changed(module, path, rules) -> nnx.Module | None:
    """Return what takes the place of the module at `path`; None where it stays."""
    is_joined = hasattr(module, "_fp8_rule")
    plain = _with_layers(module, {}) if is_joined else module
    rule = module_rule(rules, path)
    if rule is not None and any(name in vars(module) for name in rule.layers.names):
        return _with_rule(plain, rule)
    if is_joined:
        names = ["/".join(map(str, (*path, n))) for n in module._fp8_rule.layers.names]
        # a rule for one of the layers alone
        if first_match(rules, names) is not None:
            return plain
    return None
