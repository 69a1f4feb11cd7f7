"""diffrax: a neural ODE in FP8, by the adjoint that JAX differentiates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from programs import cases

import jaxfp8

diffrax = pytest.importorskip("diffrax")

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)


def test_a_solve_records_the_largest_amax_of_its_steps():
    kernel = 2 * jnp.eye(16)
    state = jaxfp8.init_state(RECIPE)

    def solve(parameters, start):
        def field(t, y, _):
            kernel, state = parameters
            return jaxfp8.dot_general(
                y, kernel, cases.MATMUL, recipe=RECIPE, state=state
            )

        return diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Euler(),
            t0=0,
            t1=1,
            dt0=0.25,
            y0=start,
            saveat=diffrax.SaveAt(steps=True, t0=True),
            max_steps=4,
            adjoint=diffrax.DirectAdjoint(),
        ).ys

    start = jnp.linspace(0.1, 1, 32).reshape(2, 16)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ys = solve((kernel, state), start)
        gradient = eqx.filter_grad(lambda p: jnp.sum(solve(p, start)[-1]))(
            (kernel, state)
        )
    amax = gradient[1].input.amax_history[0]
    assert amax == jnp.max(jnp.abs(ys[-2])) and amax > 2 * jnp.max(start)
    assert jnp.isfinite(gradient[0]).all() and gradient[0].any()
