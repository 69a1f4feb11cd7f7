"""calibrate: the histories that training on the same batches records, and nothing else
changes.
"""

import collections
import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY, normal
from equality import assert_same_bits
from flax import nnx
from parametrize import each_row
from programs.known_amax import leaves

import jaxfp8
import jaxfp8.nnx

H, M, K, N = 4, 8, 16, 5
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)
FP8 = jaxfp8.make_dot_general_cls(RECIPE)
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
FORWARD = ("input", "kernel")


BATCHES = [normal(M, K, seed=size) * size for size in (3, 9, 1)]
GRADS = [normal(M, N, seed=seed) for seed in range(9, 12)]


def dense():
    return nn.Dense(N, use_bias=False, dot_general_cls=FP8)


def variables_of(model, *args):
    return model.init(KEY, *args)


def expected(kernel, xs, grads=GRADS):
    """The oracle's state after a step for each x."""
    state = oracle.LayerState.init(H)
    for x, grad in zip(xs, grads, strict=False):
        state = oracle.dense_step(x, np.asarray(kernel), grad, state).state
    return state


def assert_state(variables, wanted, names, what):
    for name, leaf in leaves(wanted).items():
        if name.startswith(tuple(names)):
            oracle.assert_bitwise(variables[name], leaf, f"{what}: {name}")


def test_linen():
    """A window that moves once a batch; the quantizer of the gradient, and every other
    array, stays as it is.
    """
    model = dense()
    variables = variables_of(model, BATCHES[0])
    calibrated = jaxfp8.calibrate(model, variables, iter(BATCHES))
    state = calibrated[OWG]["Fp8DotGeneral_0"]
    assert_state(
        state, expected(variables["params"]["kernel"], BATCHES), FORWARD, "calibrated"
    )
    assert_state(state, oracle.LayerState.init(H), ["output_grad"], "not calibrated")
    assert calibrated["params"]["kernel"] is variables["params"]["kernel"]


def test_with_a_loss():
    """The quantizer of the gradient as well: what steps of training record, in any
    model.
    """
    model = dense()
    variables = variables_of(model, BATCHES[0])

    def loss_fn(variables, x, grad):
        return jnp.vdot(model.apply(variables, x), grad)

    calibrated = jaxfp8.calibrate(
        model, variables, zip(BATCHES, GRADS, strict=True), loss_fn=loss_fn
    )
    wanted = expected(variables["params"]["kernel"], BATCHES)
    assert_state(
        calibrated[OWG]["Fp8DotGeneral_0"],
        wanted,
        (*FORWARD, "output_grad"),
        "calibrated",
    )


class Shared(nn.Module):
    """One layer called twice, inside a checkpointed function: autodiff alone would add
    up what they record.
    """

    @nn.compact
    def __call__(self, x, y):
        layer = nn.remat(nn.Dense)(N, use_bias=False, dot_general_cls=FP8)
        return layer(x), layer(y)


def test_a_layer_called_twice():
    model = Shared()
    (x, y, _) = BATCHES
    variables = variables_of(model, x, y)
    calibrated = jaxfp8.calibrate(model, variables, [(x, y)])
    both = np.concatenate([x, y])
    wanted = expected(
        variables["params"]["CheckpointDense_0"]["kernel"],
        [both],
        [np.ones((2 * M, N), np.float32)],
    )
    state = calibrated[OWG]["CheckpointDense_0"]["Fp8DotGeneral_0"]
    assert_state(state, wanted, FORWARD, "shared")


def test_state_that_is_not_there():
    """A bf16 checkpoint: the model makes the state, then fills it."""
    model = dense()
    variables = variables_of(model, BATCHES[0])
    expected = jaxfp8.calibrate(model, variables, BATCHES)[OWG]
    for options in ({}, {"mutable": ["batch_stats"]}):
        params = {"params": variables["params"]}
        got = jaxfp8.calibrate(model, params, BATCHES, **options)
        assert_same_bits(got[OWG], expected, str(options))


def test_a_named_tuple_is_one_argument():
    model = dense()
    batch = collections.namedtuple("Batch", "x grad")(BATCHES[0], GRADS[0])
    variables = variables_of(model, batch.x)
    got = jaxfp8.calibrate(
        lambda variables, batch: model.apply(variables, batch.x), variables, [batch]
    )
    assert_same_bits(
        got[OWG], jaxfp8.calibrate(model, variables, [batch.x])[OWG], "named tuple "
    )


def test_nnx():
    """In place; nothing but state changes, not even the counts of random streams."""
    rngs = nnx.Rngs(0)
    product = jaxfp8.nnx.Fp8DotGeneral(RECIPE)
    dense = nnx.Linear(K, N, use_bias=False, dot_general=product, rngs=rngs)
    dropout = nnx.Dropout(0.5, rngs=rngs)
    model, count = nnx.Sequential(dense, dropout), dropout.rngs.count
    before = int(count.get_value())

    def state():
        found = nnx.state(dense.dot_general, jaxfp8.nnx.OverwriteWithGradient)
        return nnx.to_pure_dict(found)

    assert jaxfp8.calibrate(model, BATCHES) is model
    wanted = expected(dense.kernel.get_value(), BATCHES)
    assert_state(state(), wanted, FORWARD, "nnx")
    assert_state(state(), oracle.LayerState.init(H), ["output_grad"], "nnx")
    assert int(count.get_value()) == before
    jaxfp8.calibrate(
        model,
        [(BATCHES[0], GRADS[0])],
        loss_fn=lambda model, x, grad: jnp.vdot(model.layers[0](x), grad),
    )
    assert state()["output_grad_amax_history"][0] == oracle.amax(GRADS[0])


class Opaque:
    """A class that JAX does not know."""

    def __init__(self, y):
        self.y = y


def test_results_that_are_not_arrays():
    """Numbers, text, None and objects beside an array leave the state what it is."""
    model = dense()
    variables = variables_of(dense(), BATCHES[0])
    filled = jaxfp8.calibrate(model, variables, BATCHES[:1])
    others = (3, 1.5, "text", None, Opaque(1))
    assert_same_bits(
        jaxfp8.calibrate(
            lambda v, x: (model.apply(v, x), *others), variables, BATCHES[:1]
        ),
        filled,
    )
    with pytest.raises(
        TypeError,
        match="got none; register the class of the result as a pytree, or pass loss_fn",
    ):
        jaxfp8.calibrate(lambda v, x: Opaque(model.apply(v, x)), variables, BATCHES[:1])


MODEL = dense()
VARIABLES = variables_of(MODEL, BATCHES[0])
calibrate = functools.partial(jaxfp8.calibrate, MODEL, VARIABLES)
ERRORS = {
    "no batch": (
        lambda: calibrate([]),
        ValueError,
        "calibrate: batches: expected at least one batch",
    ),
    "no state": (
        lambda: jaxfp8.calibrate(
            nn.Dense(N, use_bias=False), {"params": VARIABLES["params"]}, BATCHES
        ),
        ValueError,
        "calibrate: variables: expected state of quantizers, found none",
    ),
    "no variables": (
        lambda: jaxfp8.calibrate(MODEL, BATCHES),
        TypeError,
        r"expected calibrate\(model, variables, batches\), got \(Dense, list\)",
    ),
    "an array": (
        lambda: calibrate(BATCHES[0]),
        TypeError,
        r"got an array of shape .*, whose rows would be the batches; .*pass \[x\]",
    ),
    "a loss and arguments": (
        lambda: calibrate(BATCHES, loss_fn=lambda *_: 0.0, method="f"),
        TypeError,
        "calibrate: expected no arguments of the model beside loss_fn",
    ),
    "integers": (
        lambda: jaxfp8.calibrate(
            lambda v, x: jnp.argmax(MODEL.apply(v, x)), VARIABLES, BATCHES
        ),
        TypeError,
        "calibrate: model: expected a result with floating-point arrays",
    ),
}


@each_row("call, error, message", ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
