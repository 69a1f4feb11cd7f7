"""Several uses of one state combine by max; members and layers with states of their own count for themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn

import jaxfp8
from jaxfp8.inspect import with_counters

from .counter_cases import OWG, RECIPE, Expected, K, N, assert_counters, counted_state, of_state, tensors, use


def scanned(kernel, state, x, grad):
    def body(total, of):
        return total + use(kernel, state, *of), None

    return jax.lax.scan(body, jnp.float32(0), (x, grad))[0]


def test_uses_of_one_state():
    x, kernel, grad = tensors(1, uses=3)
    uses = [(of, kernel, g) for of, g in zip(x, grad, strict=True)]
    expected, state = Expected(), counted_state()
    gradient = jax.jit(jaxfp8.grad(scanned, argnums=1))
    for step in range(2):
        state = jaxfp8.update_state(state, gradient(kernel, state, x, grad))
        assert_counters(of_state(state), expected.step(uses), f"step {step}")


def test_vmap():
    """A batch that shares its state is one larger tensor; states of their own count for themselves."""
    x, kernel, grad = tensors(3, uses=3)
    rows = x.reshape(-1, K), kernel, grad.reshape(-1, N)
    shared = jax.grad(lambda s: jnp.sum(jax.vmap(use, (None, None, 0, 0))(kernel, s, x, grad)))(counted_state())
    assert_counters(of_state(shared), Expected().step([rows]), "shared")
    stacked = with_counters(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), jaxfp8.init_state(RECIPE)))
    kernels = np.stack([kernel] * 3)
    own = jax.grad(lambda s: jnp.sum(jax.vmap(use)(kernels, s, x, grad)))(stacked)
    for i, of in enumerate(zip(x, grad, strict=True)):
        assert_counters(of_state(own), Expected().step([(of[0], kernel, of[1])]), f"member {i}", i)


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_layers_of_a_scan(axis):
    """Stacked state, the layers along either axis: a row each, and one that is not touched keeps what it has."""
    model = nn.scan(
        Block, variable_axes={"params": 0, OWG: axis}, split_rngs={"params": True}, variable_broadcast=False, length=3
    )()
    x = tensors(4)[0][0]
    variables = with_counters(model.init(jax.random.key(0), x, None))
    grads = jaxfp8.grad(lambda v: jnp.sum(model.apply(v, x, None)[0]))(variables)
    rows = np.asarray(grads[OWG]["Dense_0"]["Fp8DotGeneral_0"]["input_counters"])
    rows = rows if axis == 0 else rows.T
    oracle.assert_bitwise(rows[0, :2], oracle.counts(x, 1, oracle.E4M3) / np.float32(x.size), "the first layer")
    module = grads[OWG]["Dense_0"]["Fp8DotGeneral_0"]
    index = (slice(1, 2), slice(None)) if axis == 0 else (slice(None), slice(1, 2))
    module["input_scale"] = module["input_scale"].at[index].set(0)  # the second layer did not run
    after = jaxfp8.update_state(variables, grads)[OWG]["Dense_0"]["Fp8DotGeneral_0"]["input_counters"]
    after = np.asarray(after) if axis == 0 else np.asarray(after).T
    oracle.assert_bitwise(after[[0, 2]], rows[[0, 2]], "layers that ran")
    oracle.assert_bitwise(after[1], np.zeros(3, np.float32), "one that did not")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(K, use_bias=False, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(RECIPE))(x), None
