"""Trained and frozen models that tests export: two FP8 layers, a norm, and a head in
high precision.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from draws import normal
from promotion import as_users_have_jax

import jaxfp8

DELAYED = jaxfp8.DelayedScaling(amax_history_len=4)
RECIPES = {
    "tensor": DELAYED,
    "block128": jaxfp8.Float8BlockScaling(),
    "mxfp8": jaxfp8.MXFP8BlockScaling(),
}
LAYOUTS = list(RECIPES)
K, N = 160, 224  # blocks of 128 have a rest on both sides
X = normal(6, K)
NAMES = {
    r"(up|down)/kernel": r"model.\1_proj.weight",
    "down/bias": "model.down_proj.bias",
    "norm/scale": "norm.weight",
}
NAMES |= {"head/kernel": "lm_head.weight"}


class Model(nn.Module):
    """Two FP8 layers, a norm, and a head in high precision."""

    recipe: object

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, dot_general_cls=jaxfp8.make_dot_general_cls(self.recipe)
        )
        x = nn.relu(dense(N, use_bias=False, name="up")(nn.RMSNorm(name="norm")(x)))
        return nn.Dense(3, use_bias=False, name="head", param_dtype=jnp.bfloat16)(
            dense(K, name="down")(x)
        )


@functools.cache
def trained(layout):
    """`(model, variables after four steps, frozen variables)`."""
    with as_users_have_jax():
        model = Model(RECIPES[layout])
        variables = model.init(jax.random.key(0), X)

        @jax.jit
        def step(variables):
            grads = jax.grad(
                lambda v: jnp.mean(
                    jnp.square(model.apply(v, X) - 1).astype(jnp.float32)
                )
            )(variables)
            params = jax.tree.map(
                lambda p, g: p - jnp.asarray(0.1, p.dtype) * g,
                variables["params"],
                grads["params"],
            )
            return grads | {"params": params}

        for _ in range(4):
            variables = step(variables)
        return model, variables, jaxfp8.freeze(model, variables, X)
