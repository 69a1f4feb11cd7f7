"""nnx.GatedMLP, NormDense and Linear of several dimensions: the Linen layers' numbers,
in NNX's own training.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx
from linen.test_fused_layers import BF16, F32, LAYERS, OWG, WIDTH, inputs

import jaxfp8
import jaxfp8.nnx

CLASSES = {
    "Dense": jaxfp8.nnx.Linear,
    "GatedMLP": jaxfp8.nnx.GatedMLP,
    "NormDense": jaxfp8.nnx.NormDense,
}


def of_nnx(layer):
    """The layer of NNX with the fields of a Linen layer."""
    names = [
        field.name
        for field in dataclasses.fields(layer)
        if field.name not in ("parent", "name")
    ]
    fields = {
        "out_features" if name == "features" else name: getattr(layer, name)
        for name in names
    }
    return CLASSES[type(layer).__name__](in_features=WIDTH, **fields, rngs=nnx.Rngs(0))


def as_linen(model, kind):
    """Variables of one kind as Linen nests them: the state of a Linear is in its
    `dot_general`.
    """
    tree = nnx.to_pure_dict(nnx.state(model, kind))

    def rename(node):
        if not isinstance(node, dict):
            return node
        return {
            "Fp8DotGeneral_0" if key == "dot_general" else key: rename(value)
            for key, value in node.items()
        }

    return rename(tree)


def variables_of(model):
    return {
        "params": as_linen(model, nnx.Param),
        OWG: as_linen(model, jaxfp8.nnx.OverwriteWithGradient),
    }


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_linen_and_nnx_agree(layer, dtype):
    """Same fields, same parameters, same tree, same bits: two steps of SGD."""
    module = layer.clone(dtype=dtype)
    model = of_nnx(module)
    x, variables = inputs(dtype), variables_of(model)
    optimizer = jaxfp8.nnx.Optimizer(model, optax.sgd(0.125), wrt=nnx.Param)
    assert jax.tree.map(jnp.shape, module.init(jax.random.key(0), x)) == jax.tree.map(
        jnp.shape, variables
    )

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
        params = jax.tree.map(
            lambda p, g: p - np.float32(0.125) * g,
            variables["params"],
            gradients["params"],
        )
        return {"params": params, OWG: gradients[OWG]}, y

    for i in range(2):
        y = step(model, optimizer)
        variables, expected = linen_step(variables)
        oracle.assert_bitwise(y, np.asarray(expected), f"step {i}: y")
        assert_same_bits(variables_of(model), variables, f"step {i}: ")
        assert y.dtype == dtype
