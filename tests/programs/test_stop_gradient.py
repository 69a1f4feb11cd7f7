"""Products that read their layer through `stop_gradient` record nothing; the pass
beside them records its amaxes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8
import jaxfp8.nnx
from programs.cases import MATMUL, stacked

RECIPE = jaxfp8.DelayedScaling(amax_history_len=2)
KERNEL, X = jnp.full((8, 4), 5.0), jnp.full((2, 8), 3.0)
STOPPED = {
    "tree": lax.stop_gradient,
    "leaves": lambda layer: jax.tree.map(lax.stop_gradient, layer),
    "jit": jax.jit(lax.stop_gradient),
    "remat": jax.checkpoint(lax.stop_gradient),
    "scan": lambda layer: lax.scan(
        lambda layer, _: (lax.stop_gradient(layer), None), layer, None, length=2
    )[0],
    "vmap": lambda layer: jax.vmap(
        lambda _, layer: lax.stop_gradient(layer), (0, None), None
    )(jnp.ones(2), layer),
    "twice": lambda layer: lax.stop_gradient(lax.stop_gradient(layer)),
}


def use(x, kernel, state):
    return jnp.sum(jaxfp8.dot_general(x, kernel, MATMUL, recipe=RECIPE, state=state))


def in_a_loop(x, kernels, states):
    return lax.scan(
        lambda total, at: (total + use(x, *at), None), jnp.float32(0), (kernels, states)
    )[0]


def assert_student_alone(state):
    """Slot 0 of each history is the amax of the student's operand: 3, 5, and 1 for the
    gradient of a sum.
    """
    quantizers = (state.input, state.kernel, state.output_grad)
    newest = [np.asarray(quantizer.amax_history)[..., 0] for quantizer in quantizers]
    for amax, expected in zip(newest, (3, 5, 1), strict=True):
        np.testing.assert_array_equal(amax, np.full_like(amax, expected))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "grad", [jax.grad, jaxfp8.grad], ids=["jax.grad", "jaxfp8.grad"]
)
def test_teachers(grad, run):
    """All ways in one program: the amax of a teacher that records tells which one it
    is.
    """

    def loss(layer):
        teachers = ((2.0**i, stop(layer)) for i, stop in enumerate(STOPPED.values(), 1))
        return use(X, *layer) + sum(
            size * use(size * X, 7 * kernel, state)
            for size, (kernel, state) in teachers
        )

    assert_student_alone(run(grad(loss))((KERNEL, jaxfp8.init_state(RECIPE)))[1])


def test_stacked_layers():
    """The loops of student and teacher run over one reading."""
    layers = stacked((KERNEL, jaxfp8.init_state(RECIPE)), 3)

    def loss(layers):
        return in_a_loop(X, *layers) + 100 * in_a_loop(
            100 * X, *lax.stop_gradient(layers)
        )

    assert_student_alone(jax.jit(jaxfp8.grad(loss))(layers)[1])


def test_state_alone():
    """The kernel of the teacher has a gradient: the product says that its state
    stays.
    """

    def loss(kernel, state):
        return use(X, kernel, state) + use(100 * X, kernel, lax.stop_gradient(state))

    with pytest.warns(jaxfp8.FP8StateWarning, match="never updates FP8 state"):
        gradient, state = jax.jit(jaxfp8.grad(loss, (0, 1)))(
            KERNEL, jaxfp8.init_state(RECIPE)
        )
    assert_student_alone(state)
    np.testing.assert_allclose(gradient, np.full_like(gradient, 2 * 303), rtol=2**-4)
