"""nnx.GatedMLP, NormDense and Linear of several dimensions: the Linen layers' numbers, in NNX's own training."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8.nnx import GatedMLP, Linear, NormDense

from .cases import RECIPE

ROWS, WIDTH, HIDDEN = 5, 6, 8
FEATURES = (3, 2, 4)
F32, BF16 = np.dtype(np.float32), oracle.BF16
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
BIAS = {"use_bias": True, "bias_init": nn.initializers.normal(0.5)}
NORM = {"scale_init": nn.initializers.normal(1.0), "norm_bias_init": nn.initializers.normal(0.5), "epsilon": 0.25}


def pair(name, dtype):
    """The layer of Linen and that of NNX."""
    options, rngs = BIAS | {"recipe": RECIPE, "dtype": dtype}, nnx.Rngs(0)
    if name == "dense":
        return jaxfp8.linen.Dense(FEATURES, **options), Linear(WIDTH, FEATURES, **options, rngs=rngs)
    if name.endswith("mlp"):
        options |= NORM | {"norm": "layer"} if name == "norm mlp" else {"activation": name.split()[0]}
        return jaxfp8.linen.GatedMLP(HIDDEN, 7, **options), GatedMLP(WIDTH, HIDDEN, 7, **options, rngs=rngs)
    options |= NORM | {"kind": name.split()[0]}
    return jaxfp8.linen.NormDense(FEATURES, **options), NormDense(WIDTH, FEATURES, **options, rngs=rngs)


NAMES = ["dense", "silu mlp", "gelu mlp", "norm mlp", "rms dense", "layer dense"]


def inputs(dtype=F32, rows=ROWS):
    return np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(F32).astype(dtype)


def as_linen(model, kind):
    """Variables of one kind as Linen nests them: the state of a Linear is in its `dot_general`."""
    tree = nnx.to_pure_dict(nnx.state(model, kind))

    def rename(node):
        if not isinstance(node, dict):
            return node
        return {"Fp8DotGeneral_0" if key == "dot_general" else key: rename(value) for key, value in node.items()}

    return rename(tree)


def variables_of(model):
    return {"params": as_linen(model, nnx.Param), OWG: as_linen(model, jaxfp8.nnx.OverwriteWithGradient)}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_linen_and_nnx_agree(name, dtype):
    """Same parameters, same tree, same bits: two steps of SGD."""
    module, model = pair(name, dtype)
    x, variables = inputs(dtype), variables_of(model)
    optimizer = jaxfp8.nnx.Optimizer(model, optax.sgd(0.125), wrt=nnx.Param)
    assert jax.tree.map(jnp.shape, module.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, variables)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            y = model(x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        gradients, y = jaxfp8.nnx.grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return y

    @jax.jit
    def linen_step(variables):
        def loss(variables):
            y = module.apply(variables, x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        gradients, y = jax.grad(loss, has_aux=True)(variables)
        params = jax.tree.map(lambda p, g: p - np.float32(0.125) * g, variables["params"], gradients["params"])
        return {"params": params, OWG: gradients[OWG]}, y

    for i in range(2):
        y = step(model, optimizer)
        variables, expected = linen_step(variables)
        oracle.assert_bitwise(y, np.asarray(expected), f"step {i}: y")
        assert_same_bits(variables_of(model), variables, f"step {i}: ")
        assert y.dtype == dtype
