"""Linen modules of which a rule runs layers together: as one product, or as a
GatedMLP.
"""

import contextlib
import contextvars
from typing import Any

import jax
from flax import linen as nn

from .._jax._trees import split_arrays
from ..dot import Parameters, _frozen, layers_call
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


@contextlib.contextmanager
def run_together(args, kwargs, context, plain: nn.Module, rule: Rule):
    """Enter a context for the call of a module whose layers the rule names.

    Args:
        args, kwargs, context: those of the interceptor of the module's method.
        plain: the module without variables and rules.
        rule: the rule.
    """
    layers = _Layers(args, kwargs, context, plain, rule)
    with nn.intercept_methods(layers.intercept):
        yield
        layers.call.finish()


class _Layers:
    """The interceptor of the layers, for one call of their module.

    Attributes:
        stand_in: takes the place of the layers while the module is compared with the
            rule; else None.
    """

    def __init__(self, args, kwargs, context, plain, rule):
        self.module, self.plain, self.rule = context.module, plain, rule
        self.args, self.kwargs = args, kwargs
        # without the transforms of its decorators
        self.function = context.orig_method.func
        self.stand_in = None
        path = "/".join(self.module.path)
        kinds = nn.Dense, nn.DenseGeneral, Dense
        self.call = layers_call(
            path, rule.layers, self._parameters, kinds, self._forward
        )

    def intercept(self, next_method, args, kwargs, context):
        """Run a method; a layer in its own way, or together with the others."""
        layer = context.module
        is_named = layer.name in self.rule.layers.names
        is_named = is_named and context.method_name == "__call__"
        if is_named and self.stand_in is not None:
            return self.stand_in(layer.name, args[0])
        # In a lifted transform the parent of the layers is a copy of the module, with
        # an interceptor of its own.
        is_own = is_named and layer.parent is self.module
        if is_own and self.module.is_initializing():
            self.call.enter(layer.name, layer, args, kwargs)
        elif is_own and not self._runs_apart():
            return self.call(layer.name, layer, args, kwargs)
        return next_method(*args, **kwargs)

    def _runs_apart(self) -> bool:
        """Tell whether each layer runs a product of its own: in high precision, with
        codes of kernels, and where state is made.
        """
        names = self.rule.layers.names
        params = [self._variables("params", name) for name in names]
        is_missing = any(
            _PRODUCT not in self._variables(OVERWRITE_WITH_GRADIENT, name)
            for name in names
        )
        return (
            is_off()
            or _frozen.is_freezing()
            or any(_PRODUCT in layer for layer in params)
            or any(isinstance(layer.get("kernel"), QTensor) for layer in params)
            or (
                is_missing
                and keeps_state(self.rule.recipe)
                and self.module.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
            )
        )

    def _variables(self, collection: str, name: str) -> Any:
        return self.module.variables.get(collection, {}).get(name, {})

    def _parameters(self, name: str) -> Parameters:
        params = nn.meta.unbox(self._variables("params", name))
        variables = self._variables(OVERWRITE_WITH_GRADIENT, name).get(_PRODUCT)
        state = DotGeneralState(None, None, None)
        if variables is not None:
            state = map_variables(self.rule.recipe, lambda leaf, _: variables[leaf])
        return Parameters(params.get("kernel"), params.get("bias"), state)

    def _forward(self, stand_in) -> tuple:
        """Return the arrays that the module reads, and its forward as a function of
        them, with `stand_in` in place of the layers.
        """
        variables = dict(self.module.variables)
        variables.pop(OVERWRITE_WITH_GRADIENT, None)
        rngs = {name: jax.random.key(0) for name in self.module.scope.rngs}
        arrays, joined = split_arrays((variables, self.args, self.kwargs))

        def run(arrays):
            variables, args, kwargs = joined(arrays)

            def method(module):
                return module._call_wrapped_method(self.function, args, kwargs)

            self.stand_in, token = stand_in, is_compared.set(True)
            try:
                nn.apply(method, self.plain, mutable=True)(variables, rngs=rngs)
            finally:
                self.stand_in = None
                is_compared.reset(token)

        return arrays, run
