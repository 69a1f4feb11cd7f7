"""Calibrated and frozen models that tests export: two FP8 layers, a norm, and a head in
high precision.
"""

import functools

import flax.linen as nn
import jax.numpy as jnp
from draws import normal
from inference.models import frozen

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
    "head/kernel": "lm_head.weight",
}


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
def calibrated(layout):
    """`(model, calibrated variables, frozen variables)`."""
    return frozen(Model(RECIPES[layout]), X)
