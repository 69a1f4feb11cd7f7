"""User code for a type checker: nothing runs it. Lines with an ignore comment must be
errors, all others must not.

`make types` checks this file with basedpyright, for which an ignore comment that is not
needed is an error.
"""

from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfp8
import jaxfp8.linen

recipe = jaxfp8.DelayedScaling(
    margin=1, amax_history_len=16, amax_compute_algo=lambda history: history.max()
)
jaxfp8.DelayedScaling(amax_history_len="16")  # pyright: ignore[reportArgumentType]
jaxfp8.DelayedScaling(amax_history_length=16)  # pyright: ignore[reportCallIssue]
jaxfp8.DelayedScaling(amax_compute_algo="mean")  # pyright: ignore[reportArgumentType]
jaxfp8.DelayedScaling().margin = 2  # pyright: ignore[reportAttributeAccessIssue]

x, kernel = jnp.ones((4, 8)), np.ones((8, 2), np.float32)
matmul = (((1,), (0,)), ((), ()))
state = jaxfp8.init_state(recipe)
assert_type(state, jaxfp8.DotGeneralState)
assert_type(
    jaxfp8.dot_general(x, kernel, matmul, recipe=recipe, state=state), jax.Array
)
assert_type(jaxfp8.einsum("mk,kn->mn", x, kernel, recipe=None), jax.Array)
assert_type(
    jaxfp8.collectives.all_to_all(x, "expert", 0, 0, recipe=recipe), jaxfp8.QTensor
)
jaxfp8.dot_general(
    jaxfp8.activated(x, "gelu"), kernel, matmul, recipe=recipe, state=state
)
jaxfp8.dot_general(x, kernel, matmul)  # pyright: ignore[reportCallIssue]
jaxfp8.dot_general(x, kernel, matmul, recipe=jaxfp8.DelayedScaling)  # pyright: ignore[reportArgumentType]
jaxfp8.dot_general(x, kernel, (1, 0), recipe=recipe)  # pyright: ignore[reportArgumentType]

experts = jaxfp8.linen.Experts(8, 16, activation="gelu", recipe=recipe)
assert_type(experts, jaxfp8.linen.Experts)
jaxfp8.linen.Experts(8)  # pyright: ignore[reportCallIssue]
jaxfp8.ragged_dot(x, kernel, np.ones(3), recipe=None)
jaxfp8.ragged_dot(x, kernel, np.ones(3))  # pyright: ignore[reportCallIssue]

amax = jaxfp8.ops.amax(x)
assert_type(amax, jax.Array)
data, _ = jaxfp8.ops.quantize(x, 1.0, jnp.float8_e4m3fn)
jaxfp8.ops.quantize(x, dtype=jnp.float8_e4m3fn)  # pyright: ignore[reportCallIssue]
jaxfp8.ops.scaled_matmul(data, data, amax, amax, precise="yes")  # pyright: ignore[reportArgumentType]
with jaxfp8.ops.implementation("reference"), jaxfp8.autocast(recipe):
    pass
with jaxfp8.ops.implementation(3):  # pyright: ignore[reportArgumentType]
    pass

# What comes in comes back.
model = nn.Dense(8, dot_general_cls=jaxfp8.Fp8DotGeneral)
assert_type(jaxfp8.linen.quantize(model, [("head", None), (".*", recipe)]), nn.Dense)
assert_type(
    jaxfp8.quantize(
        nn.Dense(8, dot_general_cls=jaxfp8.make_dot_general_cls(recipe)), []
    ),
    nn.Dense,
)
assert_type(jaxfp8.Format.HYBRID.max, float)
assert_type(jaxfp8.__version__, str)
assert_type(jaxfp8.ops.has_cuda_kernels(), bool)
assert_type(jaxfp8.report(model), jaxfp8.inspect.Report)
jaxfp8.recipes.Float8CurrentScalingQuantizer(jaxfp8.Format.E4M3.dtype)
assert_type(jaxfp8.StaticScaling(output_grad=1.0).output_grad, float | None)
jaxfp8.StaticScaling(grad=1.0)  # pyright: ignore[reportCallIssue]
print(jaxfp8.no_such_thing)  # pyright: ignore[reportAttributeAccessIssue]
jaxfp8.make_dot_general_cls(jaxfp8.DelayedScaling)  # pyright: ignore[reportArgumentType]
jaxfp8.linen.quantize(model, [(recipe, ".*")])  # pyright: ignore[reportArgumentType]
variables: dict[str, Any] = {}
assert_type(jaxfp8.update_state(variables, variables), dict[str, Any])
assert_type(jaxfp8.accumulate_gradients(variables, variables), dict[str, Any])
train = jaxfp8.linen.TrainState.create(
    apply_fn=model.apply, params=variables, tx=optax.adam(1e-3)
)
assert_type(train, jaxfp8.linen.TrainState)
assert_type(train.apply_gradients(grads=variables), jaxfp8.linen.TrainState)


class Half(jaxfp8.Quantizer):
    """A quantizer of one's own."""

    def quantize(self, x: jax.Array, state: Any) -> tuple[jaxfp8.QTensor, Any]:
        """Half."""
        return jaxfp8.QTensor(
            x.astype(jnp.float8_e5m2), jnp.ones((1,), jnp.float32)
        ), state


def qfactory(role: str) -> jaxfp8.Quantizer | None:
    """As `CustomRecipe` wants it."""
    return Half() if role == "linear_input" else None


jaxfp8.CustomRecipe(qfactory)
jaxfp8.CustomRecipe(Half())  # pyright: ignore[reportArgumentType]
