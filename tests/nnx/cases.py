"""What the tests of NNX layers share; programs whose every amax is known are in
`programs/`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from draws import KEY
from equality import assert_same_bits
from flax import nnx
from programs import known_amax
from programs.cases import sgd
from programs.known_amax import HISTORY, RECIPES, K as K, M as M, N as N, leaves, merged
from programs.nnx import NNX, use as use

import jaxfp8
import jaxfp8.nnx

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
RECIPE, H = RECIPES["delayed"].recipe, HISTORY
linear = functools.partial(NNX.make, RECIPE)


def operands(seed, uses):
    """x `(uses, M, K)` and grad `(uses, M, N)`, f32, of another size in each use."""
    x, _, grad = known_amax.operands(seed)
    return x[:uses], grad[:uses]


def expected_state(uses, state):
    """The state after a step in which the layer ran on each `(x, kernel, grad)`."""
    return merged([oracle.dense_step(*operands, state).state for operands in uses])


def of_nnx(layer, in_features, seed=0):
    """The layer of NNX with the fields of a Linen layer."""
    names = {"Dense": "Linear", "features": "out_features"}
    fields = {
        names.get(field.name, field.name): getattr(layer, field.name)
        for field in dataclasses.fields(layer)
        if field.name not in ("parent", "name")
    }
    cls = type(layer).__name__
    cls = getattr(jaxfp8.nnx, names.get(cls, cls))
    return cls(in_features=in_features, **fields, rngs=nnx.Rngs(seed))


IN_LINEN = {"dot_general": "Fp8DotGeneral_0", "ragged_dot": "Fp8RaggedDot_0"}
KINDS = {"params": nnx.Param, OWG: jaxfp8.nnx.OverwriteWithGradient}


def as_linen(model):
    """The variables of a model as Linen nests and names them."""

    def renamed(node):
        if not isinstance(node, dict):
            return node
        return {
            IN_LINEN.get(name, name): renamed(child) for name, child in node.items()
        }

    trees = {
        name: renamed(nnx.to_pure_dict(nnx.state(model, kind)))
        for name, kind in KINDS.items()
    }
    return {name: tree for name, tree in trees.items() if tree}


def compare_with_linen(module, in_features, *args):
    """Same fields, same parameters, same tree, same bits: two steps of SGD."""
    model = of_nnx(module, in_features)
    variables = as_linen(model)
    shapes = jax.eval_shape(module.init, KEY, *args)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables)
    optimizer = jaxfp8.nnx.Optimizer(model, optax.sgd(0.125), wrt=nnx.Param)

    def loss_of(y):
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    @nnx.jit
    def step(model, optimizer):
        gradients, y = jaxfp8.nnx.grad(
            lambda model: loss_of(model(*args)), has_aux=True
        )(model)
        optimizer.update(model, gradients)
        return y

    @jax.jit
    def linen_step(variables):
        gradients, y = jax.grad(
            lambda v: loss_of(module.apply(v, *args)), has_aux=True
        )(variables)
        params = sgd(variables["params"], gradients["params"], np.float32(0.125))
        return {"params": params, OWG: gradients[OWG]}, y

    for i in range(2):
        y = step(model, optimizer)
        variables, expected = linen_step(variables)
        assert_same_bits(y, expected, f"step {i}: y")
        assert_same_bits(as_linen(model), variables, f"step {i}: ")
        assert y.dtype == module.dtype


def assert_state(product, expected, what):
    """Compare the variables of a Fp8DotGeneral or Fp8Einsum with an
    oracle.LayerState.
    """
    got = nnx.to_pure_dict(nnx.state(product, jaxfp8.nnx.OverwriteWithGradient))
    assert_same_bits(got, leaves(expected), what)
