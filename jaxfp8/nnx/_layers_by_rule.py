"""NNX modules of which a rule runs layers together: as one product, or as a GatedMLP.

Such a module becomes an instance of a subclass of its class: its `__call__` runs that
of the class with other functions in place of the layers.
"""

import functools

from flax import nnx

from ..dot import Parameters, layers_call
from ..recipes import QTensor, Rule, first_match, is_off, module_rule
from ._dot_general import Fp8DotGeneral, frozen_arrays, path_of, read_state
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
    """Give a module of a plain class the class with the rule."""
    set_class(module, _class_of(type(module), rule))
    return module


def set_class(module, cls) -> None:
    """Change the class of a module, which NNX would take for an attribute of it."""
    object.__setattr__(module, "__class__", cls)


@functools.cache
def _class_of(plain_class, rule: Rule) -> type[nnx.Module]:
    """Return the subclass of a class for a rule."""
    namespace = {
        "_fp8_rule": rule,
        "_fp8_class": plain_class,
        "__call__": _call,
        "__reduce_ex__": _reduce,
    }
    return subclass(plain_class, namespace)


def subclass(base: type[nnx.Module], namespace: dict) -> type[nnx.Module]:
    """Return a subclass of the class of a module, under the name of that class."""
    for name in ("__module__", "__qualname__", "__doc__"):
        namespace[name] = getattr(base, name)
    return type(base)(base.__name__, (base,), namespace)


def _parameters(layers: dict[str, nnx.Module]) -> dict[str, Parameters] | None:
    """Return what layers have; None where each layer runs its own product: in high
    precision, with codes of kernels, and where another product is in the place of ours.
    """
    if is_off():
        return None
    parameters = {}
    for name, layer in layers.items():
        if layer is None:
            parameters[name] = Parameters(None, None, None)
            continue
        product = getattr(layer, "dot_general", None)
        if type(product) is not Fp8DotGeneral or frozen_arrays(product) is not None:
            return None
        kernel = layer.kernel.get_value()
        if isinstance(kernel, QTensor):
            return None
        bias = None if layer.bias is None else layer.bias.get_value()
        state = read_state(product, product.recipe)
        parameters[name] = Parameters(kernel, bias, state)
    return parameters


def joined_classes(
    model: nnx.Module, rules: tuple[Rule, ...]
) -> list[tuple[nnx.Module, type[nnx.Module]]]:
    """List the modules in a model whose layers run together from now on, or no longer,
    each with its class.
    """
    changes = []
    for path, module in nnx.iter_modules(model):
        rule = module_rule(rules, path)
        is_joined = hasattr(module, "_fp8_rule")
        plain_class = module._fp8_class if is_joined else type(module)
        if rule is not None and any(name in vars(module) for name in rule.layers.names):
            changes.append((module, _class_of(plain_class, rule)))
        elif is_joined:
            names = [
                "/".join(map(str, (*path, n))) for n in module._fp8_rule.layers.names
            ]
            # a rule for one of the layers alone
            if first_match(rules, names) is not None:
                changes.append((module, plain_class))
    return changes
