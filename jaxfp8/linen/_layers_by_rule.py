"""Linen modules of which a rule runs layers together: as one product, or as a
GatedMLP.
"""

import contextlib

import jax
from flax import linen as nn

from ..dot import LayersCall, Parameters, _contexts
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    DotGeneralState,
    QTensor,
    Rule,
    is_off,
    keeps_state,
    variable_names,
)
from ._layers import Dense

_PRODUCT = "Fp8DotGeneral_0"

# Whether a module runs to be compared with its rule alone, for interceptors.
is_compared = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def run_together(args, kwargs, context, plain: nn.Module, rule: Rule):
    """Enter a context for the call of a module whose layers the rule names.

    Args:
        args, kwargs, context: those of the interceptor of the module's method.
        plain: the module without variables and rules.
        rule: the rule.
    """
    module, named = context.module, rule.layers
    parameters = _parameters(module, rule)
    if parameters is None:
        yield
        return

    def forward():
        variables = dict(module.variables)
        variables.pop(OVERWRITE_WITH_GRADIENT, None)
        rngs = {name: jax.random.key(0) for name in module.scope.rngs}

        def method(module):  # without the transforms of its decorators
            return module._call_wrapped_method(context.orig_method.func, args, kwargs)

        with is_compared(True):
            nn.apply(method, plain, mutable=True)(variables, rngs=rngs)

    def intercept(next_method, args, kwargs, context):
        layer = context.module
        is_named = layer.name in named.names and context.method_name == "__call__"
        # In a lifted transform the parent of the layers is a copy of the module, with
        # an interceptor of its own.
        if is_named and (call.stand_in is not None or layer.parent is module):
            return call(layer.name, layer, args, kwargs)
        return next_method(*args, **kwargs)

    kinds = nn.Dense, nn.DenseGeneral, Dense
    path = "/".join(module.path)
    call = LayersCall(path, named, parameters, kinds, forward)
    with nn.intercept_methods(intercept):
        yield


def _parameters(module: nn.Module, rule: Rule) -> dict[str, Parameters] | None:
    """Return what the layers of a module have; None where each layer runs a product of
    its own: in high precision, with codes of kernels, and where variables are made.
    """
    is_observed = _contexts.observed_by.value is not None
    if is_off() or is_observed or module.is_initializing():
        return None
    recipe, parameters = rule.recipe, {}
    is_mutable = module.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
    makes_state = keeps_state(recipe) and is_mutable
    for name in rule.layers.names:
        params = module.get_variable("params", name, {})
        state = module.get_variable(OVERWRITE_WITH_GRADIENT, name, {}).get(_PRODUCT, {})
        is_frozen = _PRODUCT in params or isinstance(params.get("kernel"), QTensor)
        if is_frozen or (makes_state and not state):
            return None
        names = variable_names(recipe)
        if not state:
            names = DotGeneralState(None, None, None)
        params, state = nn.meta.unbox(params), jax.tree.map(state.__getitem__, names)
        if "kernel" in params:
            parameters[name] = Parameters(params["kernel"], params.get("bias"), state)
    return parameters
