"""linen.Fp8Einsum: a plain swap for nn.Fp8Einsum whose input stays the input."""

import dataclasses
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jaxfp8.linen import Fp8Einsum

from .probes import OWG, RECIPE, assert_state

EQN = "emh,gecm->gech"  # jnp.einsum hands its operands over in the other order


def operands():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 6)).astype(np.float32) * 4
    return x, rng.standard_normal((2, 3, 4, 5)).astype(np.float32) * 0.1


def test_variables_and_signature_are_those_of_flax():
    x, kernel = operands()
    ours, theirs = (cls().init(jax.random.key(0), EQN, x, kernel) for cls in (Fp8Einsum, nn.Fp8Einsum))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        oracle.assert_bitwise(leaf, other, jax.tree_util.keystr(path))
    signatures = [list(inspect.signature(cls.__call__).parameters) for cls in (Fp8Einsum, nn.Fp8Einsum)]
    assert signatures[0] == [*signatures[1], "out_sharding"]
    fields = [{f.name for f in dataclasses.fields(cls)} for cls in (Fp8Einsum, nn.Fp8Einsum)]
    assert fields[0] - fields[1] == {"recipe"} and not fields[1] - fields[0]


def test_steps():
    """Three steps of an expert layer: the state is the oracle's of the einsum's operands, in their order."""
    module = Fp8Einsum(recipe=RECIPE)
    x, kernel = operands()
    variables = module.init(jax.random.key(0), EQN, x, kernel)

    @jax.jit
    def step(variables, x, kernel, grad):
        return jax.grad(lambda variables: jnp.vdot(module.apply(variables, EQN, x, kernel), grad))(variables)

    grad = np.random.default_rng(1).standard_normal((2, 3, 4, 6)).astype(np.float32)
    parts = {"input": x, "kernel": kernel, "output_grad": grad}
    formats = {"input": oracle.E4M3, "kernel": oracle.E4M3, "output_grad": oracle.E5M2}
    states = {name: oracle.State.init(RECIPE.amax_history_len) for name in parts}
    for i in range(3):
        scaled = {name: value * np.float32(i + 1) for name, value in parts.items()}
        variables = step(variables, scaled["input"], scaled["kernel"], scaled["output_grad"])
        states = {name: oracle.step(scaled[name], states[name], formats[name])[2] for name in parts}
        assert_state(variables[OWG], oracle.LayerState(**states), f"step {i}")
