"""calibrate: the histories that training on the same batches records, and nothing else
changes.
"""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx
from programs.known_amax import leaves

import jaxfp8
import jaxfp8.nnx

H, M, K, N = 4, 8, 16, 5
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)
FP8 = jaxfp8.make_dot_general_cls(RECIPE)
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
FORWARD = ("input", "kernel")


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


BATCHES = [normal(seed, M, K) * size for seed, size in enumerate((3, 9, 1))]
GRADS = [normal(seed, M, N) for seed in range(9, 12)]


def dense():
    return nn.Dense(N, use_bias=False, dot_general_cls=FP8)


def variables_of(model, *args):
    return model.init(jax.random.key(0), *args)


def expected(kernel, xs, grads=GRADS, state=None):
    """The oracle's state after a step for each x."""
    state = state or oracle.LayerState.init(H)
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
    history = np.asarray(state["input_amax_history"])
    assert [float(h) for h in history[[0, 3, 2]]] == [
        float(oracle.amax(x)) for x in BATCHES[::-1]
    ]


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
    got = jaxfp8.calibrate(model, {"params": variables["params"]}, BATCHES)
    assert_same_bits(
        got[OWG], jaxfp8.calibrate(model, variables, BATCHES)[OWG], "made "
    )
    got = jaxfp8.calibrate(
        model, {"params": variables["params"]}, BATCHES, mutable=["batch_stats"]
    )
    assert_same_bits(
        got[OWG],
        jaxfp8.calibrate(model, variables, BATCHES)[OWG],
        "made, with other collections ",
    )


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

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(
                K,
                N,
                use_bias=False,
                dot_general=jaxfp8.nnx.Fp8DotGeneral(RECIPE),
                rngs=rngs,
            )
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.dense(x))

    model = Model(nnx.Rngs(0))
    dense, count = model.dense, model.dropout.rngs.count
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
        loss_fn=lambda model, x, grad: jnp.vdot(model.dense(x), grad),
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


def test_errors():
    model = dense()
    variables = variables_of(model, BATCHES[0])
    with pytest.raises(
        ValueError, match=r"calibrate: batches: expected at least one batch"
    ):
        jaxfp8.calibrate(model, variables, [])
    with pytest.raises(
        ValueError,
        match=r"calibrate: variables: expected state of quantizers, found none",
    ):
        jaxfp8.calibrate(nn.Dense(3), variables_of(nn.Dense(3), BATCHES[0]), BATCHES)
    with pytest.raises(
        TypeError,
        match=(
            r"calibrate: expected calibrate\(model, variables, batches\), got "
            r"\(Dense, list\)"
        ),
    ):
        jaxfp8.calibrate(model, BATCHES)
    with pytest.raises(
        TypeError,
        match=(
            r"got an array of shape .*, whose rows would be the batches; "
            r".*pass \[x\]"
        ),
    ):
        jaxfp8.calibrate(model, variables, BATCHES[0])
    with pytest.raises(
        TypeError, match=r"calibrate: expected no arguments of the model beside loss_fn"
    ):
        jaxfp8.calibrate(model, variables, BATCHES, loss_fn=lambda *_: 0.0, method="f")
    with pytest.raises(
        TypeError,
        match=r"calibrate: model: expected a result with floating-point arrays",
    ):
        jaxfp8.calibrate(lambda v, x: jnp.argmax(model.apply(v, x)), variables, BATCHES)
