"""adamw: codes and parameters of its steps, beside the oracle, `quantized(optax.adamw)`
and optax.
"""

import copy
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cpu_mesh import mesh_of
from equality import assert_same_bits
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import adam

import jaxfp8
from jaxfp8 import optim

from . import cases, oracle

# optax raises a float to an integer power
pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")
DECAY = dict(weight_decay=0.1)


def steps(tx, variables, count, apply):
    """The parameters and the state after some steps."""
    if not apply:
        return cases.train(tx, variables, count)
    state = tx.init(variables)
    step = jax.jit(tx.apply)
    for i in range(count):
        variables, state = step(cases.grads(i), state, variables)
    return variables, state


def of_oracle(shape, axis, grads, params, mu, nu, step, numbers, seed):
    """A step of one leaf, of whose moments the numbers in the state are 1 and 2."""
    keys = [oracle.keys(seed, step, leaf, shape, axis) for leaf in (1, 2)]

    def on_matrices(*operands):
        return adam.step(*operands, np.float32([numbers]))

    return oracle.on_rows(on_matrices, axis, shape, grads, params, mu, nu, *keys)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_steps_are_those_of_the_oracle(shape):
    """Parameters and moments to the bit, of gradients that are clipped: b1**t is
    0.5**t, which is exact.
    """
    axis = cases.SHAPES[shape]
    b1 = 0.5
    b2 = 0.75
    rng = np.random.default_rng(0)
    params = rng.normal(size=shape).astype(np.float32)
    tx = optim.adamw(
        2.0**-7, b1, b2, 1e-8, 1e-12, weight_decay=0.25, seed=3, min_size=1
    )
    state = tx.init(jnp.asarray(params))
    mu, nu = (
        tuple(map(np.asarray, moment)) for moment in (state.inner.mu, state.inner.nu)
    )
    got = jnp.asarray(params)
    # Half of the rows have gradients of one size, the others of all sizes: blocks have
    # several exponents.
    spread = np.expand_dims(
        np.arange(shape[0]) < shape[0] // 2, tuple(range(1, len(shape)))
    )
    for t in range(1, 4):
        grads = rng.choice([-1, 1], shape) * np.float32(2.0) ** (
            spread * rng.uniform(-20, 20, shape)
        )
        grads = grads.astype(np.float32)
        got, state = jax.jit(tx.apply)(jnp.asarray(grads), state, got)
        one = np.float32(1)
        numbers = [
            b1,
            1 - b1,
            b2,
            1 - b2,
            one / (one - b1**t),
            one / (one - b2**t),
            1e-12,
            1e-8,
            2.0**-7,
            0.25,
            1,
        ]
        params, mu, nu = of_oracle(
            shape, axis, grads, params, mu, nu, t - 1, np.float32(numbers), seed=3
        )
        np.testing.assert_array_equal(got, params, f"parameters after step {t}")
        assert_same_bits(tuple(state.inner.mu), mu)
        assert_same_bits(tuple(state.inner.nu), nu)
    assert len(np.unique(np.append(mu[2], nu[2]))) > 1


@pytest.mark.parametrize("apply", [False, True], ids=["update", "apply"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_max_norm_clips_as_optax(max_norm, apply):
    """By a factor in place of a quotient and a product: gradients differ by 2 ulp,
    their codes hardly.
    """
    clip = optax.clip_by_global_norm(max_norm)
    rest = optim.adamw(1e-2, **DECAY)
    a, a_state = steps(optax.chain(clip, rest), cases.params(), 2, False)
    b, b_state = steps(
        optim.adamw(1e-2, **DECAY, max_norm=max_norm), cases.params(), 2, apply
    )
    for x, y in zip(cases.moments(a_state), cases.moments(b_state), strict=True):
        assert cases.same_codes(x, y) > 0.999
        np.testing.assert_allclose(x.amax, y.amax, rtol=1e-5)
    chex.assert_trees_all_close(a, b, rtol=0, atol=3e-3)
    # The control: the norm is that of all gradients, and not of each leaf.
    amax = max(float(x.amax.max()) for x in cases.moments(b_state))
    assert (amax < 0.05) == (max_norm == 0.5)


def test_masks_schedules_and_traced_numbers():
    """What decays is what `mask` says; a learning rate may be a schedule or a traced
    number.
    """
    params = cases.params()
    masks = {"tree": lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)}
    masks |= {
        "values": masks["tree"](params),
        "prefix": {"dense": True, "odd": False, "layers": True, "embedding": True},
    }

    def schedule(count):
        return jnp.where(count < 1, 1e-2, 3e-3)

    for name, mask in masks.items():
        got, expected = (
            steps(make(schedule, weight_decay=0.5, mask=mask), params, 3, apply)
            for make, apply in ((optim.adamw, True), (optax.adamw, False))
        )
        # The decay moves a parameter of size 1 by 8e-3; an update is off by 3 parts in
        # 10.
        chex.assert_trees_all_close(
            got[0], expected[0], rtol=0, atol=5e-3, custom_message=name
        )

    @jax.jit
    def step(rate, grads, state, params):
        return optim.adamw(rate, **DECAY).apply(grads, state, params)

    state = optim.adamw(0.0).init(params)
    got = step(1e-2, cases.grads(0), state, params)
    expected = jax.jit(optim.adamw(1e-2, **DECAY).apply)(cases.grads(0), state, params)
    assert_same_bits(cases.moments(got[1]), cases.moments(expected[1]))
    chex.assert_trees_all_close(got[0], expected[0], rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="broadcast"):
        optim.adamw(1e-3, mask={"a": True}).init(params)


@pytest.mark.parametrize("apply", [False, True], ids=["update", "apply"])
@pytest.mark.parametrize("axis", [0, 1])
def test_parameters_and_moments_stay_where_they_are(axis, apply):
    """XLA cuts gradients as products leave them; without out_shardings the next step
    would find its state moved.
    """
    mesh = mesh_of(d=8)
    cuts = [P("d", None), P(None, "d")]
    here, there = (NamedSharding(mesh, cut) for cut in (cuts[axis], cuts[1 - axis]))
    params = jax.device_put(jnp.ones((256, 1024)), here)
    tx = optim.adamw(1e-2)
    state = jax.jit(
        tx.init, out_shardings=optim.shardings(jax.eval_shape(tx.init, params), params)
    )(params)

    @jax.jit
    def step(params, state):
        grads = jax.lax.with_sharding_constraint(2 * params, there)
        if apply:
            return tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    after, after_state = step(params, state)
    kept = jax.tree.map(
        lambda old, new: new.sharding.is_equivalent_to(old.sharding, old.ndim),
        *(
            (x, y.inner.mu.data, y.inner.nu.data)
            for x, y in ((params, state), (after, after_state))
        ),
    )
    assert kept == (True, True, True)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
def test_nnx_optimizer_writes_parameters_in_one_pass(graph):
    """Moments and FP8 state are those of `update`; state that a cast of the model made
    bf16 is f32 again.
    """

    def trained(tx):
        model = jaxfp8.nnx.quantize(
            nnx.Linear(128, 256, rngs=nnx.Rngs(0)), [("", jaxfp8.DelayedScaling())]
        )
        optimizer = jaxfp8.nnx.Optimizer(model, tx, wrt=nnx.Param, graph=graph)
        state = nnx.state(model, jaxfp8.nnx.OverwriteWithGradient)
        nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))

        @nnx.jit
        def step(model, optimizer, x):
            _, grads = jaxfp8.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(
                model
            )
            return optimizer.update(model, grads)

        updates = step(
            model, optimizer, jax.random.normal(jax.random.key(1), (16, 128))
        )
        assert optimizer.step.get_value() == 1
        state = nnx.state(model, jaxfp8.nnx.OverwriteWithGradient)
        return (
            updates,
            model.kernel.get_value(),
            jax.device_get(nnx.as_pure((state, optimizer.opt_state))),
        )

    tx = optim.adamw(1e-2)
    applied = trained(tx)
    updated = trained(optax.GradientTransformationExtraArgs(*tx))
    assert applied[0] is None and jax.tree.leaves(updated[0])
    np.testing.assert_allclose(
        applied[1], updated[1], rtol=6 * 2.0**-23, atol=6 * 2.0**-23
    )
    assert_same_bits(applied[2], updated[2])
    assert {x.dtype for x in jax.tree.leaves(applied[2][0])} == {np.dtype(np.float32)}


def test_optimizer_of_variables_writes_parameters_in_one_pass():
    model = nn.Dense(256, dot_general_cls=jaxfp8.Fp8DotGeneral)
    x = jnp.ones((16, 128))
    variables = model.init(jax.random.key(1), x)
    grads = jaxfp8.grad(lambda variables: jnp.mean(model.apply(variables, x) ** 2))(
        variables
    )
    train = jaxfp8.linen.TrainState.create(
        apply_fn=model.apply, params=variables, tx=optim.adamw(1e-2)
    )
    tx = jaxfp8.train.optimizer(train.tx)
    after, opt_state = jax.jit(tx.apply)(grads, tx.init(variables), variables)
    step = jax.jit(lambda train: train.apply_gradients(grads=grads))
    assert re.findall(r"adam_update_v1.*apply = true", step.lower(train).as_text())
    expected = step(train)
    assert_same_bits(jax.device_get(after), jax.device_get(expected.params))
    jax.tree.map(
        np.testing.assert_array_equal,
        *map(cases.moments, (opt_state, expected.opt_state)),
    )
    with pytest.raises(
        ValueError,
        match=(
            r"train.optimizer: apply: params: .* call apply\(grads, opt_state, "
            r"params\)"
        ),
    ):
        tx.apply(grads, opt_state, None)


def test_state_converts():
    """A float32 state of optax becomes one in FP8 and goes on, as does one of
    `quantized(optax.adamw)`; the reverse.
    """
    params = cases.params()
    tx = optim.adamw(1e-2)
    _, plain_state = cases.train(optax.adamw(1e-2), params, 1)
    state = optim.quantize_state(plain_state[0])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    _, state = jax.jit(tx.apply)(cases.grads(1), state, params)
    assert state.inner.count == 2
    assert jax.tree.structure(optim.dequantize_state(state)) == jax.tree.structure(
        plain_state[0]
    )
    _, whole = cases.train(optim.quantized(optax.adamw(1e-2)), params, 1)
    of_adam = optim.QuantizedState(whole.update_count, whole.inner[0])
    _, state = jax.jit(tx.update)(cases.grads(1), of_adam, params)
    _, whole = cases.train(optim.quantized(optax.adamw(1e-2)), params, 1, 1, whole)
    a, b = (cases.moments(tree)[0] for tree in (state, whole))
    assert cases.same_codes(a, b) > 0.999


@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_have_the_dtypes_of_optax(dtype, grad_dtype):
    """Neither is rounded to the dtype of the gradient: float16 would lose a learning
    rate of 1e-8.
    """
    params = {"large": jnp.ones((64, 128), dtype), "small": jnp.ones(8, dtype)}
    grads = jax.tree.map(lambda x: jnp.ones(x.shape, grad_dtype), params)
    tx = optim.adamw(1e-8, weight_decay=0.0)
    plain = optax.adamw(1e-8, weight_decay=0.0)
    updates, _ = tx.update(grads, tx.init(params), params)
    expected, _ = plain.update(grads, plain.init(params), params)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(
        jnp.result_type, expected
    )
    wide = (optax.tree.cast(tree, jnp.float32) for tree in (updates, expected))
    chex.assert_trees_all_close(*wide, rtol=0.3)
    after, _ = tx.apply(grads, tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(dtype)}


def test_copies_and_what_takes_the_place_of_a_function():
    tx = optim.adamw(1e-2)
    params = cases.params()
    for other in (copy.copy(tx), copy.deepcopy(tx)):
        assert_same_bits(
            other.apply(cases.grads(0), tx.init(params), params),
            tx.apply(cases.grads(0), tx.init(params), params),
        )
    train = jaxfp8.linen.TrainState.create(
        apply_fn=None, params=params, tx=tx._replace(update=tx.update)
    )
    train.apply_gradients(grads=cases.grads(0))


def test_a_loss_that_contains_a_step():
    """Reverse mode through the updates of one step of `quantized` is that of optax; all
    else names the optimizer.
    """
    p = jnp.ones((64, 64))
    moved = jnp.linspace(-1, 1, 4096).reshape(64, 64)

    def loss(tx, steps, state=lambda state: state):
        def of_gradients(grads):
            updates, after = tx.update(grads, tx.init(p), p)
            return jnp.sum(
                (tx.update(grads, state(after), p)[0] if steps == 2 else updates)
                * moved
            )

        return of_gradients

    adamw = optim.adamw(1e-3)
    quantized = optim.quantized(optax.adamw(1e-3))
    plain = optax.adamw(1e-3)
    for steps in (1, 2):
        with pytest.raises(
            TypeError,
            match=r"^jaxfp8.optim.adamw has no derivative: a step rounds.* optax.adamw",
        ):
            jax.grad(loss(adamw, steps))(moved)
    for derivative in (
        lambda: jax.grad(loss(quantized, 2))(moved),
        lambda: jax.jvp(loss(quantized, 1), (moved,), (moved,)),
    ):
        with pytest.raises(
            TypeError,
            match=(
                "^jaxfp8.optim.quantized has no derivative through its state, nor in "
                "forward"
            ),
        ):
            derivative()
    np.testing.assert_allclose(
        *(jax.grad(loss(tx, 1))(moved) for tx in (quantized, plain)), rtol=1e-5
    )
    assert np.all(
        np.isfinite(jax.grad(loss(quantized, 2, jax.lax.stop_gradient))(moved))
    )


BAD_OPTIONS = [
    ("seed", "0", TypeError, "as an integer"),
    ("max_norm", jnp.float32(0), ValueError, "max_norm: expected a positive .* 0.0"),
    ("max_norm", np.nan, ValueError, "max_norm: expected a positive .* nan"),
]


@pytest.mark.parametrize("name, value, error, expected", BAD_OPTIONS)
def test_bad_options_are_named(name, value, error, expected):
    with pytest.raises(error, match=expected):
        optim.adamw(**({"learning_rate": 1e-3} | {name: value}))


@pytest.mark.parametrize("name", ["update", "apply"])
def test_bad_arguments_of_a_step_are_named(name):
    params = cases.params()
    tx = optim.adamw(1e-3)
    state, of_lion = (tx.init(params) for tx in (tx, optim.quantized(optax.lion(1e-3))))
    turned = params | {"odd": {"kernel": jnp.ones((200, 48))}}
    for arguments, message in (
        ((params, state, None), f"params: .*got None; pass them: tx.{name}[(]grads"),
        ((params, of_lion, params), "state.inner: expected a ScaleByAdamState"),
        ((turned, state, params), r"grads\['odd'\]\['kernel'\]: expected the shape"),
    ):
        with pytest.raises(ValueError, match=f"optim.adamw: {name}: {message}"):
            getattr(tx, name)(*arguments)


@pytest.mark.parametrize(
    "make",
    [optim.adamw, lambda rate: optim.quantized(optax.adamw(rate))],
    ids=["adamw", "quantized"],
)
def test_state_among_parameters_is_refused(make):
    """An optimizer would step on it; inside of `train.optimizer` it sees parameters
    alone.
    """
    variables = {
        "params": {"w": jnp.ones((4, 4))},
        "layer": jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=2)),
    }
    with pytest.raises(
        ValueError,
        match=(
            r"init: params: .*got FP8 state among them, "
            r"layer/.*train.optimizer\(tx\)"
        ),
    ):
        make(1e-3).init(variables)
    jaxfp8.train.optimizer(make(1e-3)).init(variables)
