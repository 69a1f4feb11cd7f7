"""Losses with a gradient inside: right where the loss takes it as a constant, refused
where it is differentiated.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal
from equality import assert_same_bits
from jax import lax
from numpy.testing import assert_allclose
from parametrize import each_row

import jaxfp8
from programs.cases import MATMUL

# Inner gradients with respect to x leave the state as it is.
pytestmark = pytest.mark.filterwarnings("ignore::jaxfp8.FP8StateWarning")
RECIPE = jaxfp8.DelayedScaling(amax_history_len=2)
X, KERNEL = normal(4, 8), normal(8, 6, seed=1)
LAYER = jnp.asarray(KERNEL), jaxfp8.init_state(RECIPE)


def loss(layer, x):
    kernel, state = layer
    return jnp.sum(
        jnp.tanh(jaxfp8.dot_general(x, kernel, MATMUL, recipe=RECIPE, state=state))
    )


def gradient_of_rows(layer, x):
    """A gradient for each row by itself, as vmap and scan give it; one state gives all
    rows one scale.
    """
    return jax.vmap(jax.grad(loss, 1), (None, 0))(layer, x[:, None])[:, 0]


def gradient_in_scan(layer, x):
    return lax.scan(
        lambda _, row: (None, jax.grad(loss, 1)(layer, row)), None, x[:, None]
    )[1][:, 0]


def of_kernel(layer, x):
    return jax.grad(lambda kernel: loss((kernel, layer[1]), x))(layer[0])


def of_all(layer, x):
    return jaxfp8.grad(loss)(layer, x)[0]


OF_X = {
    "grad": jax.grad(loss, 1),
    "jaxfp8.grad": jaxfp8.grad(loss, 1),
    "jit": jax.jit(jax.grad(loss, 1)),
    "remat": jax.grad(jax.checkpoint(loss), 1),
    "vjp": lambda layer, x: jax.vjp(loss, layer, x)[1](jnp.float32(1))[1],
    "vmap": gradient_of_rows,
    "scan": gradient_in_scan,
    "around remat": jax.checkpoint(jax.grad(loss, 1)),
}


def adversarial(layer, names):
    """Return the inputs after a step along the sign of the gradient."""
    return [
        X + 0.5 * jnp.sign(lax.stop_gradient(OF_X[name](layer, X))) for name in names
    ]


def in_jit(*args, **options):
    return jax.jit(jaxfp8.grad(*args, **options))


@pytest.mark.parametrize(
    "differentiate, names",
    [(jax.grad, ["grad", "jit"]), (in_jit, OF_X)],
    ids=["eager", "jit"],
)
def test_adversarial_inputs(differentiate, names):
    """Several ways in one program. Each makes the same input, and the loss of it has
    its plain gradient and state.
    """
    moved = X + 0.5 * np.sign(np.asarray(jax.grad(loss, 1)(LAYER, X)))
    expected, next_state = jax.jit(jax.grad(loss))(LAYER, moved)

    def outer(layer):
        inputs = adversarial(layer, names)
        return sum(loss(layer, x) for x in inputs), inputs

    (gradient, state), inputs = differentiate(outer, has_aux=True)(LAYER)
    for name, x in zip(names, inputs, strict=True):
        np.testing.assert_array_equal(x, moved, err_msg=name)
    assert_same_bits(state, next_state, "state")
    assert_allclose(gradient, len(names) * expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inner", [of_kernel, of_all])
def test_first_order_steps(inner):
    """First-order MAML: the gradient at the kernel after an inner step, with respect to
    the kernel before it.
    """

    def outer(layer):
        return loss((layer[0] - lax.stop_gradient(inner(layer, X)), layer[1]), 2 * X)

    after = KERNEL - np.asarray(jax.grad(loss)(LAYER, X)[0])
    expected = jax.jit(jax.grad(loss))((after, LAYER[1]), 2 * X)
    # XLA rounds the step as it fuses it.
    jax.tree.map(
        lambda got, wanted: assert_allclose(got, wanted, rtol=1e-5),
        in_jit(outer)(LAYER),
        expected,
    )


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_jax_grad_of_variables_inside_of_ours(transform):
    """JAX takes no gradient by the state as jaxfp8.grad casts it: the error says what
    does.
    """

    def outer(layer):
        return loss(
            jax.tree.map(
                jnp.subtract, layer, lax.stop_gradient(transform(loss)(layer, X))
            ),
            X,
        )

    with pytest.raises(
        TypeError,
        match=r"in place of jax.grad\(loss\).*stop_gradient\(jaxfp8.grad",
    ):
        jax.eval_shape(jaxfp8.grad(outer), LAYER)


VALUES = {
    "value_and_grad": lambda layer: jax.value_and_grad(loss, 1)(layer, X)[0],
    "jaxfp8": lambda layer: jaxfp8.value_and_grad(loss)(layer, X)[0],
    "remat": lambda layer: jax.value_and_grad(jax.checkpoint(loss), 1)(layer, X)[0],
    "around remat": lambda layer: jax.checkpoint(jax.value_and_grad(loss, 1))(layer, X)[
        0
    ],
    "vjp": lambda layer: jax.vjp(loss, layer, X)[0],
    "scan": lambda layer: lax.scan(
        lambda total, row: (total + jax.value_and_grad(loss, 1)(layer, row)[0], None),
        0.0,
        X[:, None],
    )[0],
    "vmap": lambda layer: jnp.sum(
        jax.vmap(jax.value_and_grad(loss, 1), (None, 0))(layer, X[:, None])[0]
    ),
    "twice": lambda layer: jax.value_and_grad(
        lambda x: jax.value_and_grad(loss, 1)(layer, x)[0]
    )(X)[0],
}


@each_row("value", VALUES)
@pytest.mark.parametrize(
    "differentiate",
    [jaxfp8.grad, in_jit, lambda f: jaxfp8.grad(jax.jit(f))],
    ids=["eager", "jit", "of jit"],
)
def test_the_value_of_an_inner_gradient(value, differentiate):
    """A loss that takes the value alone has its plain gradient and next state: the
    value is differentiated once.
    """
    gradient, state = differentiate(value)(LAYER)
    expected, next_state = jax.jit(jax.grad(loss))(LAYER, X)
    assert_allclose(gradient, expected, rtol=1e-6)
    assert_same_bits(state, next_state, "state")


EXPERTS = normal(2, 8, 6)


def loss_of_experts(layer, x):
    return jnp.sum(
        jnp.tanh(
            jaxfp8.ragged_dot(
                x, layer[0], jnp.int32([1, 3]), recipe=RECIPE, state=layer[1]
            )
        )
    )


def test_gelu_and_its_value():
    """A product with an activation has two results."""

    def activated(layer, x):
        y = jaxfp8.dot_general(
            x, layer[0], MATMUL, recipe=RECIPE, state=layer[1], activation="gelu"
        )
        return jnp.sum(y.value**2)

    expected = jaxfp8.grad(activated)(LAYER, X)
    assert_same_bits(
        jaxfp8.grad(lambda layer: jaxfp8.value_and_grad(activated, 1)(layer, X)[0])(
            LAYER
        ),
        expected,
    )


@pytest.mark.parametrize(
    "differentiate",
    [jax.grad, jaxfp8.grad, in_jit],
    ids=["jax.grad", "jaxfp8.grad", "jit"],
)
def test_the_gradient_around_updates_the_state(differentiate):
    """Then an inner gradient with respect to x is no reason for a warning; without one
    around it is.
    """

    def outer(layer):
        moved = X + 0.5 * jnp.sign(lax.stop_gradient(jax.grad(loss, 1)(layer, X)))
        of_experts = jnp.sum(
            lax.stop_gradient(jax.grad(loss_of_experts, 1)((EXPERTS, layer[1]), X))
        )
        return (
            loss(layer, moved) + jax.value_and_grad(loss, 1)(layer, X)[0] + of_experts
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxfp8.FP8StateWarning)
        differentiate(outer)(LAYER)
    with pytest.warns(
        jaxfp8.FP8StateWarning, match="this gradient never updates FP8 state"
    ):
        differentiate(lambda pair: outer(LAYER) + loss(LAYER, pair[0] + pair[1]))(
            (X, X)
        )


def squared(gradient):
    return lambda layer: jnp.sum(gradient(layer, X) ** 2)


def of_codes(layer, x):
    """The kernel as codes: the gradient of x reads them, and their source moves with
    the layer.
    """
    codes = jaxfp8.quantize_params({"kernel": layer[0]}, {"kernel": layer[1]}, RECIPE)[
        "kernel"
    ]
    return jax.grad(lambda x: loss((codes, layer[1]), x))(x)


def of_experts(layer, x):
    """The gradient of the experts' kernels reads the codes of the activated input
    alone.
    """
    rows, sizes = jaxfp8.activated(layer[0], "silu"), jnp.int32([3, 5])

    def experts(kernels):
        return jnp.sum(
            jaxfp8.ragged_dot(
                rows, kernels, sizes, recipe=jaxfp8.Float8CurrentScaling()
            )
        )

    return jax.grad(experts)(jnp.ones((2, 6, 4)))


REFUSED = {
    **{name: squared(gradient) for name, gradient in OF_X.items()},
    "a step": lambda layer: loss((layer[0] - of_kernel(layer, X), layer[1]), X),
    "a value beside its gradient": lambda layer: sum(
        map(jnp.sum, jax.value_and_grad(loss, 1)(layer, X))
    ),
    "codes": squared(of_codes),
    "a norm": squared(
        jax.grad(
            lambda layer, x: loss(layer, jaxfp8.normalized(x, X[0], kind="rms")), 1
        )
    ),
    "an activation": squared(
        jax.grad(lambda layer, x: loss(layer, jaxfp8.activated(x, "silu")), 1)
    ),
    "experts": squared(of_experts),
}


@each_row("loss", REFUSED)
@pytest.mark.parametrize(
    "differentiate", [jax.grad, jaxfp8.grad], ids=["jax.grad", "jaxfp8.grad"]
)
def test_refused(loss, differentiate):
    """The error comes while the program is traced, and names `stop_gradient`."""
    with pytest.raises(
        TypeError,
        match=(
            "first derivatives in reverse mode only.*stop_gradient of the inner "
            "gradient"
        ),
    ):
        jax.eval_shape(differentiate(loss), LAYER)
