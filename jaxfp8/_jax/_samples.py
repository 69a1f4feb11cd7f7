"""A traced function of single numbers, computed at a few samples in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

# Operations that only type or place their operand.
_IDENTITIES = {
    "convert_element_type",
    "copy",
    "name",
    "optimization_barrier",
    "reduce_precision",
    "sharding_constraint",
}
_LOOPS = {"scan", "shard_map"}


class Samples:
    """Computes a jaxpr, traced at any shapes, at samples of its operands.

    Each operation is applied to the samples as it was to the arrays. Conversions to
    other floats are left out, so that all is float32.

    Attributes:
        eps: the largest machine epsilon of a constant that was used: a constant in
            bfloat16 is rounded.
    """

    def __init__(self):
        self.eps = float(np.finfo(np.float32).eps)

    def compute(self, jaxpr, operands):
        """Return the results of `jaxpr` at `operands`, samples of its first operands.

        Raises:
            ValueError: the results read another operand.
        """
        jaxpr, constants = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        values = dict(zip(jaxpr.invars, operands, strict=False))
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            # one that is traced is a value from outside of the function
            if not isinstance(constant, jax.core.Tracer):
                values[var] = constant
        makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

        def value(atom):
            if isinstance(atom, Literal):
                return self._constant(atom.val)
            if atom not in values:
                eqn = makers.get(atom)
                if eqn is None:
                    raise ValueError("it reads another value")
                results = self._apply(eqn, list(map(value, eqn.invars)))
                values.update(zip(eqn.outvars, results, strict=True))
            return values[atom]

        return list(map(value, jaxpr.outvars))

    def _constant(self, value):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        self.eps = max(self.eps, float(jnp.finfo(value.dtype).eps))
        return np.asarray(value, np.float32)

    def _apply(self, eqn, operands):
        name = eqn.primitive.name
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None and name not in _LOOPS:
            return self.compute(inner, operands)
        is_scalar = name == "broadcast_in_dim" and np.size(operands[0]) == 1
        if name in _IDENTITIES or is_scalar:
            return operands
        result = eqn.primitive.bind(*operands, **eqn.params)
        return result if eqn.primitive.multiple_results else [result]
