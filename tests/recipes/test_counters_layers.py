"""Every layer over several steps, and every way by which a tensor comes to its codes."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxfp8

from .counter_cases import Expected, K, M, N, assert_counters, counted_state, of_state, tensors, use


def test_steps():
    """Scale 1, then the first from an amax, then no new largest amax for a while, then one."""
    x, kernel, grad = tensors()
    expected, state, seen = Expected(), counted_state(), []
    gradient = jax.jit(jax.grad(use, argnums=1))
    for step, size in enumerate(np.float32([1, 1, 0.5, 4, 1])):
        operands = (x[0] * size, kernel, grad[0])
        state = jaxfp8.update_state(state, gradient(kernel, state, operands[0], operands[2]))
        counters = expected.step([operands])
        assert_counters(of_state(state), counters, f"step {step}")
        seen.append(counters["input"])
    # The case covers what it is about: both fractions, and a scale that stays, changes, stays and changes.
    assert np.all(np.float32(seen)[:, 1] > 0) and seen[0][0] > 0 and seen[3][0] > 0
    assert [of[2] for of in seen] == [1, 0, 1, 2, 0]


def test_inputs_that_are_computed_on_the_way():
    """relu is exact. A vmap that shares the state is more rows."""
    x, kernel, grad = tensors(9, uses=2)

    def loss(state, x, grad):
        return use(kernel, state, jaxfp8.activated(x, "relu"), grad)

    values = np.maximum(x, 0)
    got = jax.jit(jax.grad(loss))(counted_state(), x[0], grad[0])
    assert_counters(of_state(got), Expected().step([(values[0], kernel, grad[0])]), "one")
    got = jax.grad(lambda s: jnp.sum(jax.vmap(loss, (None, 0, 0))(s, x, grad)))(counted_state())
    rows = values.reshape(-1, K), kernel, grad.reshape(-1, N)
    assert_counters(of_state(got), Expected().step([rows]), "vmap")


def test_inputs_are_counted_as_they_are_quantized():
    """In float32: 448 * (1 + 2**-12) saturates, and 2**-10 * (1 + 2**-12) does not become zero; in bfloat16 they are
    448 and 2**-10.

    The first four of 16 in a row are 2**row, so x / sqrt(mean(x**2)) is 2 for these, and 0 for the others.
    """
    x = np.zeros((M, 16), oracle.BF16)
    x[:, :4], gamma = 2.0 ** np.arange(M)[:, None] / 16, np.ones(16, np.float32)
    gamma[:4] = np.float32([224, 224, 2**-11, 2**-11]) * np.float32([1, 1 + 2**-12, 1, 1 + 2**-12])
    kernel, grad = np.ones((16, N), oracle.BF16), np.ones((M, N), oracle.BF16)
    got = jax.jit(
        jax.grad(lambda state: use(kernel, state, jaxfp8.normalized(x, gamma, kind="rms", epsilon=0.0), grad))
    )(counted_state())
    oracle.assert_bitwise(got.input.counters, np.float32([1 / 16, 1 / 16, 1]), "norm")
