"""Linen modules whose gate, up and down layers a rule names, run as a GatedMLP."""

import contextvars
from typing import Any

import jax
from flax import linen as nn

from .._jax._trees import split_arrays
from ..dot import GatedCall, Parameters, _frozen
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    DotGeneralState,
    QTensor,
    Rule,
    is_off,
    keeps_state,
    map_variables,
)
from ._layers import Dense

_PRODUCT = "Fp8DotGeneral_0"

# Whether a module runs to be compared with its rule alone, for interceptors.
is_compared = contextvars.ContextVar("is_compared", default=False)


def call_gated(next_method, args, kwargs, context, plain: nn.Module, rule: Rule):
    """Call a module whose layers the rule names.

    Args:
        next_method, args, kwargs, context: those of an interceptor.
        plain: the module without variables and rules.
        rule: the rule.
    """
    layers = _Layers(args, kwargs, context, plain, rule)
    with nn.intercept_methods(layers.intercept):
        y = next_method(*args, **kwargs)
    # The parameters exist now.
    if layers.x_shape is not None:
        layers.call.check(layers.x_shape)
    return y


class _Layers:
    """The interceptor of the layers, for one call of their module.

    Attributes:
        x_shape: the shape of x where `init` calls each layer apart; else None.
    """

    def __init__(self, args, kwargs, context, plain, rule):
        self.module, self.plain, self.rule = context.module, plain, rule
        self.args, self.kwargs = args, kwargs
        # without the transforms of its decorators
        self.function = context.orig_method.func
        self.x_shape = None
        forward, kinds = self._forward, (nn.Dense, Dense)
        path = "/".join(self.module.path)
        self.call = GatedCall(path, rule.gated, self._parameters, forward, kinds)

    def intercept(self, next_method, args, kwargs, context):
        """Run a method; a layer in its own way, or as a part of the GatedMLP."""
        layer = context.module
        # In a lifted transform the parent of the layers is a copy of the module, with
        # an interceptor of its own.
        is_named = layer.parent is self.module and layer.name in self.rule.gated.names
        if not is_named or context.method_name != "__call__" or is_compared.get():
            return next_method(*args, **kwargs)
        (x,) = args
        if self.module.is_initializing():
            self.x_shape = x.shape
            return next_method(x)
        return next_method(x) if self._runs_apart() else self.call(layer.name, x)

    def _runs_apart(self) -> bool:
        """Tell whether each layer runs a product of its own: in high precision, with
        codes of kernels, and where state is made.
        """
        params = self._variables("params")
        state = self._variables(OVERWRITE_WITH_GRADIENT)
        kernels = [params.get(name, {}).get("kernel") for name in self.rule.gated.names]
        is_missing = keeps_state(self.rule.recipe) and _PRODUCT not in state.get(
            self.rule.gated.gate, {}
        )
        return (
            is_off()
            or _frozen.is_freezing()
            or any(isinstance(kernel, QTensor) for kernel in kernels)
            or any(_PRODUCT in params.get(name, {}) for name in self.rule.gated.names)
            or (
                is_missing
                and self.module.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
            )
        )

    def _variables(self, collection: str) -> Any:
        return self.module.variables.get(collection, {})

    def _parameters(self, name: str) -> Parameters:
        params = nn.meta.unbox(self._variables("params").get(name, {}))
        state = self._variables(OVERWRITE_WITH_GRADIENT).get(name, {}).get(_PRODUCT)
        return Parameters(
            params.get("kernel"),
            params.get("bias"),
            DotGeneralState(None, None, None)
            if state is None
            else map_variables(self.rule.recipe, lambda leaf, _: state[leaf]),
        )

    def _forward(self, stand_in) -> tuple:
        """Return the arrays that the module reads, and its forward as a function of
        them, with `stand_in(name, x, layer)` in place of the layers.
        """
        variables = dict(self.module.variables)
        variables.pop(OVERWRITE_WITH_GRADIENT, None)
        rngs = {name: jax.random.key(0) for name in self.module.scope.rngs}
        arrays, joined = split_arrays((variables, self.args, self.kwargs))

        def intercept(next_method, args, kwargs, context):
            name = context.module.name
            if name in self.rule.gated.names and context.method_name == "__call__":
                return stand_in(name, *args, context.module)
            return next_method(*args, **kwargs)

        def called(module, *args, **kwargs):
            return module._call_wrapped_method(self.function, args, kwargs)

        apply = nn.apply(called, self.plain, mutable=True)

        def run(arrays):
            variables, args, kwargs = joined(arrays)
            token = is_compared.set(True)
            try:
                with nn.intercept_methods(intercept):
                    apply(variables, *args, rngs=rngs, **kwargs)
            finally:
                is_compared.reset(token)

        return arrays, run
