"""Losses whose backward takes gradients of FP8 layers itself, as chunked cross-entropy
does (jax issue 35915).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from draws import normal
from equality import assert_same_bits
from numpy.testing import assert_allclose

import jaxfp8
from programs.cases import MATMUL, stacked

X = normal(16, 4)
LABELS = jnp.arange(16) % 8
HEAD = nn.Dense(8, dot_general_cls=jaxfp8.Fp8DotGeneral)
BODY = nn.Dense(4, dot_general_cls=jaxfp8.Fp8DotGeneral)
VARIABLES = {
    "head": HEAD.init(jax.random.key(1), X),
    "body": BODY.init(jax.random.key(2), X),
}


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, -1) - picked)


def loss_of_chunk(head, x, labels):
    return cross_entropy(HEAD.apply(head, x), labels)


def chunks(x):
    return zip(jnp.split(x, 4), jnp.split(LABELS, 4), strict=True)


def plain(head, x):
    return sum(loss_of_chunk(head, *chunk) for chunk in chunks(x))


def gradients_in_scan(gradient, head, x):
    def body(total, chunk):
        of_head, of_chunk = gradient(loss_of_chunk, argnums=(0, 1))(head, *chunk)
        return jaxfp8.accumulate_gradients(total, of_head), of_chunk

    stacked = x.reshape(4, 4, 4), LABELS.reshape(4, 4)
    total, of_x = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, head), stacked)
    return total, of_x.reshape(x.shape)


def at_once(gradient, head, x):
    return gradient(plain, argnums=(0, 1))(head, x)


def by_vjp(gradient, head, x):
    del gradient
    return jax.vjp(plain, head, x)[1](jnp.float32(1))


FORMS = [at_once, gradients_in_scan, by_vjp]


def with_own_backward(form, gradient, is_early=False):
    """`plain`, whose backward is `form`; with `is_early` the forward computes the
    gradients and keeps them.
    """

    @jax.custom_vjp
    def loss(head, x):
        return plain(head, x)

    def forward(head, x):
        return plain(head, x), form(gradient, head, x) if is_early else (head, x)

    def backward(residuals, ct):
        del ct  # 1: the loss is the last function
        return residuals if is_early else form(gradient, *residuals)

    loss.defvjp(forward, backward)
    return loss


def of_model(loss):
    """The loss of both layers, whose head is used once more beside the function with
    its own backward.
    """

    def whole(variables):
        x = BODY.apply(variables["body"], X)
        return loss(variables["head"], x) + 0.5 * plain(variables["head"], 3 * x)

    return whole


@pytest.fixture(scope="module")
def expected():
    return jax.jit(jaxfp8.grad(of_model(plain)))(VARIABLES)


def assert_right(got, expected):
    state, wanted = (
        tree["head"]["_overwrite_with_gradient"] for tree in (got, expected)
    )
    # The head's gradient is a sum of chunks in another order, of which the body's
    # output gradient is made.
    jax.tree.map(
        lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        got,
        expected,
    )
    assert_same_bits(state, wanted, "state of the head")


@pytest.mark.parametrize("is_early", [False, True], ids=["backward", "forward"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_gradients_by_ours(form, is_early, jit, expected):
    """The state of the head is the max of both uses, and the gradient of the kernel
    their sum.
    """
    loss = with_own_backward(form, jaxfp8.grad, is_early)
    assert_right(jit(jaxfp8.grad(of_model(loss)))(VARIABLES), expected)


@pytest.mark.parametrize("gradient", [jax.grad, jaxfp8.grad], ids=["jax", "ours"])
@pytest.mark.parametrize("form", FORMS)
def test_below_jax_grad(form, gradient):
    """A head that is used once."""
    got = jax.jit(jax.grad(with_own_backward(form, gradient)))(VARIABLES["head"], X)
    want = jax.jit(jax.grad(plain))(VARIABLES["head"], X)
    assert_right({"head": got}, {"head": want})


def test_stacked_state():
    """The layers of a scan, whose state jaxfp8.grad reads before the loop."""
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    kernels = normal(3, 4, 4)
    state = stacked(jaxfp8.init_state(recipe), 3)

    def layers(parameters, x):
        def body(x, layer):
            kernel, state = layer
            return jnp.tanh(
                jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)
            ), None

        return jnp.sum(jax.lax.scan(body, x, parameters)[0])

    @jax.custom_vjp
    def own(parameters, x):
        return layers(parameters, x)

    own.defvjp(
        lambda *args: (layers(*args), args),
        lambda args, ct: jaxfp8.grad(layers, (0, 1))(*args),
    )
    got, want = (
        jax.jit(jaxfp8.grad(loss))((kernels, state), X) for loss in (own, layers)
    )
    assert_allclose(got[0], want[0], rtol=1e-6)
    assert_same_bits(got[1], want[1], "state")


def test_advice():
    """JAX's own gradient inside of ours, and a factor on all gradients: errors whose
    advice is in the tests above.
    """
    inner = of_model(with_own_backward(at_once, jax.grad))
    with pytest.raises(TypeError, match=r"in a custom_vjp jaxfp8.grad\(loss\)"):
        jaxfp8.grad(inner)(VARIABLES)

    def times_two(gradient, head, x):
        return jax.tree.map(
            lambda leaf: 2 * leaf, gradient(plain, argnums=(0, 1))(head, x)
        )

    with pytest.raises(
        TypeError, match="expected a loss that passes FP8 state to products alone"
    ):
        jaxfp8.grad(of_model(with_own_backward(times_two, jaxfp8.grad)))(VARIABLES)


class Lifted(nn.Module):
    """A layer inside of Flax's custom_vjp (flax issue 1713)."""

    grad_vars: object = None

    @nn.compact
    def __call__(self, x):
        names = {} if self.grad_vars is None else {"grad_vars": self.grad_vars}

        def run(layer, x):
            return layer(x)

        def forward(layer, x):
            return nn.vjp(
                run, layer, x, **({"vjp_variables": self.grad_vars} if names else {})
            )

        lifted = nn.custom_vjp(
            run, forward_fn=forward, backward_fn=lambda pull, ct: pull(ct), **names
        )
        return lifted(
            nn.Dense(4, dot_general_cls=jaxfp8.Fp8DotGeneral, name="layer"), x
        )


@pytest.mark.parametrize("gradient", [jax.grad, jaxfp8.grad], ids=["jax", "ours"])
def test_lifted_custom_vjp(gradient):
    """With the state among its variables the layer has the gradients of the same layer
    without it.
    """
    variables = Lifted().init(jax.random.key(1), X)
    layer = nn.Dense(4, dot_general_cls=jaxfp8.Fp8DotGeneral)

    def loss_of(model):
        return lambda variables: jnp.sum(model.apply(variables, X) ** 2)

    grad_vars = ("params", "_overwrite_with_gradient")
    got = jax.jit(gradient(loss_of(Lifted(grad_vars))))(variables)
    alone = {name: collection["layer"] for name, collection in variables.items()}
    want = jax.jit(jaxfp8.grad(loss_of(layer)))(alone)
    assert_same_bits({name: got[name]["layer"] for name in got}, want, "gradients")
    with pytest.raises(
        TypeError,
        match=(
            r"flax.linen.custom_vjp pass grad_vars=\['params', "
            r"'_overwrite_with_gradient'\]"
        ),
    ):
        jaxfp8.grad(loss_of(Lifted()))(variables)
