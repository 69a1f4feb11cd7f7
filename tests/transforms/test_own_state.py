"""States of their own: what only one branch, some iterations or one layer of a scan used, and what nothing used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8
from transforms import cases


@pytest.mark.parametrize("entry", [lambda tree: tree, jaxfp8.max_grad], ids=["grad", "max_grad"])
@pytest.mark.parametrize("taken", [True, False])
def test_cond(taken, entry):
    """A state that only the other branch uses comes back as zeros: untouched."""
    x, kernel, grad = cases.operands()
    state = cases.oracle_state()

    def loss(states, predicate):
        here, there = entry(states)
        branches = [lambda x, state=state: cases.product(x, kernel, state) for state in (here, there)]
        return jnp.sum(lax.cond(predicate, *branches, x) * grad)

    here, there = jax.jit(jax.grad(loss))((cases.pack(state),) * 2, taken)
    used, unused = (here, there) if taken else (there, here)
    cases.assert_state(used, cases.one_product(x, kernel, grad, state).state)
    cases.assert_untouched(unused)


def test_an_expert_that_some_iterations_use():
    """Three experts; each iteration of a scan picks one, and one is never picked."""
    x, kernel, grad = cases.operands(4)
    picks = np.array([0, 2, 0, 0])
    states = [cases.oracle_state(seed) for seed in range(3)]

    def loss(packed, picks):
        def body(carry, xs):
            pick, x_i = xs
            branches = [lambda x, state=state: cases.product(x, kernel, state) for state in packed]
            return carry, lax.switch(pick, branches, x_i)

        return jnp.sum(lax.scan(body, 0, (picks, x))[1] * grad)

    got = jax.jit(jax.grad(loss))([cases.pack(state) for state in states], picks)
    for expert in (0, 2):
        rows = picks == expert
        expected = cases.one_product(x[rows], kernel, grad[rows], states[expert])
        cases.assert_state(got[expert], expected.state, f"expert {expert}")
    cases.assert_untouched(got[1])


def test_layers_in_a_scan():
    """State and kernels stacked on axis 0, one row an iteration, x the carry: each layer has its own state."""
    depth = 3
    rng = np.random.default_rng(0)
    x = rng.standard_normal((cases.ROWS, cases.K)).astype(np.float32)
    kernels = rng.standard_normal((depth, cases.K, cases.K)).astype(np.float32)
    grad = rng.standard_normal(x.shape).astype(np.float32)
    states = [cases.oracle_state(seed) for seed in range(depth)]

    def loss(kernels, packed):
        def body(x, layer):
            y = cases.product(x, *layer)
            return y, (x, y)

        y, seen = lax.scan(body, x, (kernels, packed))
        return jnp.sum(y * grad), seen

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (dkernels, got), (xs, ys) = step(kernels, cases.pack(states))

    # Layer by layer with the operands that the program had: those of one are the results of its neighbour.
    for i in reversed(range(depth)):
        expected = cases.one_product(np.asarray(xs[i]), kernels[i], grad, states[i])
        cases.assert_state(jax.tree.map(lambda leaf, i=i: leaf[i], got), expected.state, f"layer {i}")
        expected.y.check(ys[i], f"y of layer {i}")
        expected.wgrad.check(dkernels[i], f"wgrad of layer {i}")
        _, backward = jax.vjp(lambda x, state, i=i: cases.product(x, kernels[i], state), xs[i], cases.pack(states[i]))
        dx, _ = backward(jnp.asarray(grad))
        expected.dgrad.check(dx, f"dgrad of layer {i}")
        grad = np.asarray(dx)
