"""NNX modules of which a rule runs layers together: as one product, or as a GatedMLP.

Such a module is an instance of a subclass of its class, with the same attributes: its
`__call__` runs that of the class with other functions in place of the layers.
"""

import functools

from flax import nnx

from .._jax._trees import with_class
from ..dot import LayersCall, Parameters, _contexts
from ..recipes import NamedLayers, QTensor, Rule, is_off, module_rule
from ._dot_general import path_of
from ._layers import Linear


def _call(self, *args, **kwargs):
    """Call the module, with functions that run together in place of its layers."""
    named = self._fp8_layers
    layers = {name: getattr(self, name, None) for name in named.names}
    parameters = _parameters(layers, named)
    if parameters is None:
        return self._fp8_class.__call__(self, *args, **kwargs)

    def of_layer(name):
        return lambda *args, **kwargs: call(name, layers[name], args, kwargs)

    def run(module):
        """Call a copy of the module with functions in place of its layers; return the
        result and the copy.
        """
        copy = with_class(self._fp8_class, module)
        vars(copy).update({name: of_layer(name) for name in layers})
        return copy(*args, **kwargs), copy

    def forward():
        run(nnx.clone(self))

    path = path_of(self) or type(self).__name__
    kinds = nnx.Linear, nnx.LinearGeneral, Linear
    call = LayersCall(path, named, parameters, kinds, forward)
    y, module = run(self)
    vars(self).update(vars(module) | layers)  # what the module stored in itself
    return y


def _reduce(self, protocol):  # pickle and deepcopy
    return _together, (with_class(self._fp8_class, self), self._fp8_layers)


def _together(module, named: NamedLayers) -> nnx.Module:
    """Return a shallow copy of a module, of a class that runs its layers together."""
    plain_class = getattr(module, "_fp8_class", type(module))
    return with_class(_class_of(plain_class, named), module)


@functools.cache
def _class_of(plain_class, named: NamedLayers) -> type[nnx.Module]:
    return subclass(
        plain_class,
        _fp8_layers=named,
        _fp8_class=plain_class,
        __call__=_call,
        __reduce_ex__=_reduce,
    )


def subclass(base, **namespace):
    """Return a subclass of a module class that has its name and documentation, and
    these attributes.
    """
    for name in ("__module__", "__qualname__", "__doc__"):
        namespace[name] = getattr(base, name)
    return type(base)(base.__name__, (base,), namespace)


def _parameters(layers, named: NamedLayers) -> dict[str, Parameters] | None:
    """Return what layers have; None where each layer runs its own product: in high
    precision, with codes of kernels, and where another rule made the product.
    """
    if is_off() or _contexts.observed_by.value is not None:
        return None
    parameters = {}
    for name, layer in layers.items():
        if layer is None:
            continue
        product = getattr(layer, "dot_general", None)
        if getattr(product, "named_layers", None) != named:
            return None
        kernel = layer.kernel.get_value()
        if isinstance(kernel, QTensor) or product._frozen_arrays() is not None:
            return None
        bias = None if layer.bias is None else layer.bias.get_value()
        state = product._read_state(product.recipe)
        parameters[name] = Parameters(kernel, bias, state)
    return parameters


def module_changes(
    model: nnx.Module, rules: tuple[Rule, ...]
) -> list[tuple[nnx.Module, str, nnx.Module]]:
    """List `(holder, attribute, module)` of the modules in a model whose layers run
    together from now on.

    Raises:
        ValueError: a module is in no attribute of another module.
    """
    modules, changes = list(nnx.iter_modules(model)), []
    for path, module in modules:
        rule = module_rule(rules, path)
        if rule is None or vars(module).keys().isdisjoint(rule.layers.names):
            continue
        new, holders = _together(module, rule.layers), []
        for _, holder in modules:
            for name, value in vars(holder).items():
                if value is module:
                    holders.append((holder, name, new))
        if not holders:
            raise ValueError(
                f"nnx.quantize: rules: {'/'.join(map(str, path)) or 'model'}: expected "
                "a module in an attribute of another module of the model, or in an "
                f"nnx.List, got {type(module).__name__}; a rule with names of "
                "layers puts another module in its place"
            )
        changes += holders
    return changes
