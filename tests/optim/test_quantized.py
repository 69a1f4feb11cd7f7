"""quantized beside optax: with other transformations, wherever it stands; what stays
float32; what is refused.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from equality import assert_same_bits

import jaxfp8
from jaxfp8 import optim
from jaxfp8.optim import _moments

from . import cases

# optax raises a float to an integer power
pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")
MASK = {"dense": True, "odd": False, "layers": True, "embedding": True}
LABELS = {"dense": "a", "odd": "b", "layers": "a", "embedding": "a"}


def adam():
    return optax.adam(1e-2)


# Transformations that are quantized as a whole.
WHOLE = {
    "alone": adam,
    "chain outside": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2)
    ),
    "mask inside": lambda: optax.masked(adam(), MASK),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=1e-2
    ),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-3, bias_correction=True),
    "adagrad": lambda: optax.adagrad(1e-2),
}
# Of others a part: name -> the transformation by what makes moments FP8.
PARTS = {
    "chain inside": lambda q: optax.chain(q(optax.scale_by_adam()), optax.scale(-1e-2)),
    "masked": lambda q: optax.masked(q(adam()), MASK),
    "several": lambda q: optax.partition(
        {"a": q(adam()), "b": optax.sgd(1e-2)}, LABELS
    ),
    "train.optimizer": lambda q: jaxfp8.train.optimizer(q(adam())),
    "adamw": lambda q: optim.adamw(1e-2) if q is optim.quantized else optax.adamw(1e-2),
    "adamw, several": lambda q: optax.partition(
        {"a": PARTS["adamw"](q), "b": optax.sgd(1e-2)}, LABELS
    ),
    "adamw in train.optimizer": lambda q: jaxfp8.train.optimizer(PARTS["adamw"](q)),
    "inside train.optimizer": lambda q: q(jaxfp8.train.optimizer(adam())),
}
PLACES = {name: lambda q, make=make: q(make()) for name, make in WHOLE.items()} | PARTS


@pytest.mark.filterwarnings("ignore:jaxfp8.optim. these leaves")  # of AMSGrad
@pytest.mark.parametrize("place", PLACES)
def test_it_trains_as_without_fp8(place):
    """Updates are near float32's: the roots of moments are off by 2**-3 at most, their
    quotient by 2**-2 and a little.

    A few steps with moments that are off by as much add up to no more: of each update
    the error is below a half.
    """
    start = cases.params()
    quantizers = (optim.quantized, lambda tx: tx)
    (got, state), (expected, plain_state) = (
        cases.train(PLACES[place](q), start, 4) for q in quantizers
    )
    assert cases.moments(state)
    size, plain_size = (
        sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (state, plain_state)
    )
    assert size < (0.8 if place == "amsgrad" else 0.6) * plain_size
    moved, exact = (
        jax.tree.leaves(jax.tree.map(jnp.subtract, after, start))
        for after in (got, expected)
    )
    for a, b in zip(moved, exact, strict=True):
        assert jnp.linalg.norm(a - b) <= 0.5 * jnp.linalg.norm(b)
    assert any(np.any(a != b) for a, b in zip(moved, exact, strict=True))


def test_what_is_small_or_no_moment_stays():
    state = cases.train(optim.quantized(adam()), cases.params(), 1)[1].inner[0]
    assert state.count.dtype == jnp.int32
    assert (
        state.mu["dense"]["bias"].dtype
        == state.nu["layers"]["scale"].dtype
        == jnp.float32
    )
    assert isinstance(state.mu["odd"]["kernel"], optim.SignedMoment)
    assert isinstance(state.nu["odd"]["kernel"], optim.SquaredMoment)
    kernel = (
        optim.quantized(adam(), min_size=64 * 256 + 1)
        .init(cases.params())
        .inner[0]
        .mu["dense"]["kernel"]
    )
    assert kernel.dtype == jnp.float32


# accumulated gradients
@pytest.mark.filterwarnings("ignore:jaxfp8.optim. these leaves")
@pytest.mark.parametrize(
    "wrap, dtype",
    [
        (
            lambda tx: optim.quantized(
                optax.MultiSteps(tx, 2).gradient_transformation()
            ),
            jnp.float32,
        ),
        (
            lambda tx: optax.MultiSteps(
                optim.quantized(tx), 2
            ).gradient_transformation(),
            jnp.bfloat16,
        ),
    ],
)
def test_the_steps_between_change_no_moment(wrap, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), cases.params())
    tx = wrap(adam())
    states = []
    state = tx.init(params)
    for i in range(4):
        _, state = jax.jit(tx.update)(
            jax.tree.map(lambda x: x.astype(dtype), cases.grads(i)), state, params
        )
        states.append(cases.moments(state))
    assert_same_bits(states[2], states[1])
    assert any(
        np.any(np.asarray(a.data) != np.asarray(b.data))
        for a, b in zip(states[1], states[3], strict=True)
    )


def is_even(step, *args, **kwargs):
    return step % 2 == 0


DTYPES = {
    "alone": lambda q, tx: q(tx),
    "apply_if_finite around": lambda q, tx: optax.apply_if_finite(q(tx), 3),
    "apply_if_finite inside": lambda q, tx: q(optax.apply_if_finite(tx, 3)),
    "conditionally_transform": lambda q, tx: optax.conditionally_transform(
        q(tx), is_even
    ),
    "conditionally_mask": lambda q, tx: q(optax.conditionally_mask(tx, is_even)),
}


@pytest.mark.parametrize("place", DTYPES)
@pytest.mark.parametrize(
    "dtype, mu_dtype", [("bfloat16", None), ("float32", "bfloat16")]
)
def test_updates_have_the_dtypes_of_optax(place, dtype, mu_dtype):
    """Under lax.scan, which raises where a carry changes its dtype."""
    tx = DTYPES[place](optim.quantized, optax.adam(1e-2, mu_dtype=mu_dtype))
    params = {"a": jnp.ones((64, 128), dtype)}

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=3)
    assert params["a"].dtype == dtype and params["a"][0, 0] != 1


def test_what_is_large_and_stays_is_said():
    params = {"a": jnp.ones((64, 128)), "b": jnp.ones(8)}
    cases = {
        r"stay as they are: \[0\].nu\['a'\] .*nu_max\['a'\] \(float32\)": (
            optax.amsgrad(1e-2)
        ),
        r"muon'\].*mu\['a'\] \(float32\); name moments": optax.contrib.muon(1e-2),
        r": .z\['a'\] \(float32\); name": optax.contrib.schedule_free_adamw(1e-2),
        r"\[0\].mu\['a'\] \(float32\), \[0\].nu\['a'\]": optax.rmsprop(
            1e-2, centered=True, momentum=0.9
        ),
    }
    for message, tx in cases.items():
        with pytest.warns(UserWarning, match=message):
            jax.eval_shape(optim.quantized(tx).init, params)
    with warnings.catch_warnings(action="error"):
        jax.eval_shape(optim.quantized(adam()).init, params)


def test_an_ensemble():
    """A stack of moments decodes along the axis of its members' blocks, and all members
    draw the same bits.
    """
    params = {
        "a": jnp.asarray(np.random.default_rng(0).normal(size=(64, 2, 30)), jnp.float32)
    }
    tx = optim.quantized(adam(), seed=-1, min_size=1)
    _, state = jax.vmap(tx.update)(params, jax.vmap(tx.init)(params), params)
    member = jax.tree.map(lambda x: x[3], (params, state))
    whole = optim.dequantize_state(state)
    assert_same_bits(
        jax.tree.map(lambda x: x[3], whole), optim.dequantize_state(member[1])
    )
    _, alone = tx.update(member[0], tx.init(member[0]), member[0])
    assert_same_bits(alone, member[1])


def test_tools_of_optax():
    params = cases.params()
    tx = optim.quantized(adam())
    state = tx.init(params)
    assert optax.tree.get(state, "count") == 0
    is_leaf = lambda node: isinstance(node, optim.Moment)  # noqa: E731
    shapes = optax.tree.map_params(
        tx, lambda moment, param: param.shape, state, params, is_leaf=is_leaf
    )
    assert shapes.inner[0].mu == jax.tree.map(jnp.shape, params)


def test_donated_states_are_updated_in_place():
    tx = optim.quantized(adam())
    params = cases.params()
    step = jax.jit(lambda grads, state: tx.update(grads, state)[1], donate_argnums=1)
    compiled = step.lower(params, tx.init(params)).compile()
    moments = sum(x.nbytes for x in jax.tree.leaves(tx.init(params)))
    assert compiled.memory_analysis().alias_size_in_bytes == moments


def test_from_and_to_float32():
    """One rounding is between a float32 state and the one in FP8.

    A normal code is off by 2**-4, and k = 1/2 doubles that: 2**-3 (1 + 2**-5) of the
    element. Smaller codes are off by 2**-10 / 448 of u**k: for k = 2 and u >= 2**-9.4
    by 2**-10 / 448 / 2 / 2**-9.4 < 2**-10 of the amax, else by less.
    """
    params, plain = cases.train(adam(), cases.params(), 3)
    state = optim.quantize_state(plain)
    got = optim.dequantize_state(state)
    assert jax.tree.structure(got) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(
            a,
            b,
            rtol=2.0**-3 * (1 + 2.0**-5),
            atol=2.0**-10 * float(jnp.max(jnp.abs(b))),
        )
    assert_same_bits(optim.dequantize_state({"a": state})["a"], got)
    cases.train(optim.quantized(adam()), params, 1, opt_state=state)  # it goes on


def test_what_has_no_moments_is_refused():
    params = cases.params()
    no_moments = "tx: expected a transformation that keeps moments.*EmptyState"
    for tx, message in (
        (optax.sgd(1e-2), no_moments),
        (optim.quantized(adam()), "got some in FP8"),
    ):
        with pytest.raises(ValueError, match=message):
            optim.quantized(tx).init(params)
    with pytest.raises(TypeError, match="as an integer"):
        optim.quantized(adam(), seed="0")


def without_first_block(moment):
    return moment._replace(amax=moment.amax[:, :1], exponent=moment.exponent[:, :1])


MIN_SIZE = "restore the checkpoint with the min_size and the moments"
# What a checkpoint of another transformation has in the place of a moment.
WRONG_MOMENTS = {
    "float32": _moments.decode,
    "another dtype": lambda x: x._replace(data=x.data.astype(jnp.bfloat16)),
    "other blocks": without_first_block,
    "another kind": lambda x: optim.SquaredMoment(*x),
}


@pytest.mark.parametrize("wrong", WRONG_MOMENTS.values(), ids=WRONG_MOMENTS)
def test_states_of_others_are_refused(wrong):
    params = cases.params()
    tx = optim.quantized(adam())
    state = tx.init(params)
    of_adam = state.inner[0]
    mu = of_adam.mu | {"odd": {"kernel": wrong(of_adam.mu["odd"]["kernel"])}}
    restored = state._replace(inner=(of_adam._replace(mu=mu), *state.inner[1:]))
    for given, message in (
        (restored, f"expected a SignedMoment of float8_e4m3fn codes.*{MIN_SIZE}"),
        (restored.inner, "expected a QuantizedState, got tuple; .*quantize_state"),
    ):
        with pytest.raises(ValueError, match=message):
            tx.update(params, given, params)
