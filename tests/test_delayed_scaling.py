"""Delayed scaling, step by step, against the oracle: scales and histories bitwise, the three products in their bound.

The cotangent of the state is the next state, so one `jax.vjp` is one training step; no test here adds anything to it.
"""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax.training.train_state import TrainState

import jaxfp8

M, K, N = 24, 40, 33
MATMUL = (((1,), (0,)), ((), ()))
DTYPES = pytest.mark.parametrize("dtype", [np.dtype(np.float32), oracle.BF16, oracle.F16], ids=["f32", "bf16", "f16"])
OPERANDS = ("input", "kernel", "output_grad")
FORMATS = {
    "HYBRID": (jaxfp8.HYBRID, oracle.E4M3, oracle.E5M2),
    "E4M3": (jaxfp8.E4M3, oracle.E4M3, oracle.E4M3),
    "E5M2": (jaxfp8.E5M2, oracle.E5M2, oracle.E5M2),
}


def newest_two(history):
    """A callable algorithm that numpy and jnp run alike."""
    return history[:2].max()


def to_package(state: oracle.LayerState, dtype=np.float32):
    """The oracle's state as the package's pytree."""
    parts = (getattr(state, name) for name in OPERANDS)
    template = jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=len(state.input.amax_history)))
    leaves = [leaf for part in parts for leaf in (part.amax_history.astype(dtype), part.scale.reshape(1).astype(dtype))]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def assert_state(got, expected: oracle.LayerState, what: str, dtype=np.float32) -> None:
    for name in OPERANDS:
        part, wanted = getattr(got, name), getattr(expected, name)
        oracle.assert_bitwise(part.scale, wanted.scale.reshape(1).astype(dtype), f"{what}: {name} scale")
        oracle.assert_bitwise(part.amax_history, wanted.amax_history.astype(dtype), f"{what}: {name} amax_history")


def assert_step(got, expected: oracle.DenseStep, what: str) -> None:
    """`got` is (y, dx, dkernel, next state)."""
    y, dx, dkernel, state = got
    assert_state(state, expected.state, what)
    expected.y.check(y, f"{what}: y")
    expected.dgrad.check(dx, f"{what}: dgrad")
    expected.wgrad.check(dkernel, f"{what}: wgrad")


def training_step(recipe):
    """One jitted step of plain jaxfp8.dot_general: (x, kernel, grad, state) -> (y, dx, dkernel, next state)."""

    @jax.jit
    def step(x, kernel, grad, state):
        def product(x, kernel, state):
            return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)

        y, vjp = jax.vjp(product, x, kernel, state)
        return (y, *vjp(grad))

    return step


def linen_step(recipe, dtype):
    """The same of a linen Dense whose variables are rebuilt around kernel and state at each step."""
    layer = nn.Dense(N, use_bias=False, dtype=dtype, dot_general_cls=_dot_general_cls(recipe))

    @jax.jit
    def step(x, kernel, grad, state):
        variables = {
            "params": {"kernel": kernel.astype(jnp.float32)},
            jaxfp8.OVERWRITE_WITH_GRADIENT: {"Fp8DotGeneral_0": as_variables(state)},
        }
        y, vjp = jax.vjp(layer.apply, variables, x)
        cotangent, dx = vjp(grad)
        next_state = from_variables(cotangent[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"], state)
        return y, dx, cotangent["params"]["kernel"].astype(kernel.dtype), next_state

    return step


def _dot_general_cls(recipe):
    def make(**kwargs):
        return jaxfp8.Fp8DotGeneral(recipe=recipe, **kwargs)

    return make


def as_variables(state):
    return {f"{n}_{leaf}": getattr(getattr(state, n), leaf) for n in OPERANDS for leaf in ("amax_history", "scale")}


def from_variables(variables, like):
    leaves = [variables[f"{name}_{leaf}"] for name in OPERANDS for leaf in ("amax_history", "scale")]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def values(rng, shape, size, dtype):
    with np.errstate(over="ignore", under="ignore"):
        return (rng.standard_normal(shape) * size).astype(np.float32).astype(dtype)


def random_run(seed: int, steps: int, dtype):
    """(x, kernel, grad) of each step: ordinary values with drift, spikes, zeros, tiny amaxes, Infs and NaNs."""
    rng = np.random.default_rng(seed)
    for i in range(steps):
        operands = [
            values(rng, shape, size * 2.0 ** (3 * np.sin(i / 5)), dtype)
            for shape, size in (((M, K), 1.0), ((K, N), 0.1), ((M, N), 1e-3))
        ]
        for operand in operands:
            event = rng.integers(0, 12)
            where = tuple(rng.integers(0, n) for n in operand.shape)
            if event == 0:
                with np.errstate(over="ignore"):
                    operand *= np.array(1e4, dtype)
            elif event == 1:
                operand[:] = 0
            elif event == 2:
                operand[where] = rng.choice([np.nan, np.inf, -np.inf])
            elif event == 3:
                operand[:] = values(rng, operand.shape, 2.0 ** rng.integers(-140, -100), dtype)
            elif event == 4:
                operand[where] = np.array(3e4, dtype)
        yield operands


def scripted_run(dtype):
    """Every event once, where it decides a scale of a window of 4: bad values, a spike, zeros, tiny amaxes."""
    rng = np.random.default_rng(0)

    def step(size=1.0, **changes):
        operands = [
            values(rng, shape, size * ordinary, dtype)
            for shape, ordinary in (((M, K), 1.0), ((K, N), 0.1), ((M, N), 1e-3))
        ]
        for operand in operands:
            for where, value in changes.items():
                operand[{"first": (0, 0), "last": (-1, -1)}[where]] = np.array(value, dtype)
        return operands

    yield step()
    yield step(size=2.0)
    yield step(first=np.nan)
    yield step(last=-np.inf, first=-0.0)
    yield step(last=3e4)
    yield from (step() for _ in range(5))  # the spike acts, then leaves the window
    yield from (step(size=0.0) for _ in range(5))  # an empty window: the stored scale stays
    yield step()
    yield from (step(size=2.0**-128) for _ in range(5))  # subnormal in bf16 and f32, zero in float16
    yield from (step() for _ in range(3))


def products_of(dtype):
    return {"out_dtype": dtype, "dgrad_dtype": dtype, "wgrad_dtype": dtype}


# ------------------------------------------------------------------------------------------------------- many steps


@DTYPES
@pytest.mark.parametrize("interface", ["dot_general", "linen.Dense"])
def test_fifty_random_steps(interface, dtype):
    recipe = jaxfp8.DelayedScaling(amax_history_len=8)
    step = training_step(recipe) if interface == "dot_general" else linen_step(recipe, dtype)
    state = oracle.LayerState.init(8)
    package_state = jaxfp8.init_state(recipe)
    for i, operands in enumerate(random_run(1, 50, dtype)):
        expected = oracle.dense_step(*operands, state, **products_of(dtype))
        got = step(*operands, package_state)
        assert_step(got, expected, f"{interface} step {i}")
        state, package_state = expected.state, got[-1]


@DTYPES
@pytest.mark.parametrize("name", ["ffi", "reference"])
def test_scripted_steps(dtype, name):
    with jaxfp8.ops.implementation(name):
        compare_scripted_steps(dtype)


def compare_scripted_steps(dtype):
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    step, state, package_state = training_step(recipe), oracle.LayerState.init(4), jaxfp8.init_state(recipe)
    scales = []
    for i, operands in enumerate(scripted_run(dtype)):
        expected = oracle.dense_step(*operands, state, **products_of(dtype))
        got = step(*operands, package_state)
        assert_step(got, expected, f"step {i}")
        scales.append(float(expected.scales["input"]))
        state, package_state = expected.state, got[-1]
    assert scales[0] == 1 and len(set(scales)) >= 8, "the script moves the scale"
    assert (scales[-3] == 2.0**126) == (dtype != oracle.F16), "the script reaches the clamp"


OPTIONS = {
    "margin 3": ({"margin": 3}, oracle.Options(margin=3)),
    "margin -2": ({"margin": -2}, oracle.Options(margin=-2)),
    "most_recent": ({"amax_compute_algo": "most_recent"}, oracle.Options(amax_compute_algo="most_recent")),
    "callable": ({"amax_compute_algo": newest_two}, oracle.Options(amax_compute_algo=newest_two)),
    "first_step current": ({"first_step": "current"}, oracle.Options(first_step="current")),
    "current, most_recent, margin": (
        {"first_step": "current", "amax_compute_algo": "most_recent", "margin": 1},
        oracle.Options(margin=1, amax_compute_algo="most_recent", first_step="current"),
    ),
}


@pytest.mark.parametrize("keywords, options", OPTIONS.values(), ids=OPTIONS)
def test_options(keywords, options):
    recipe = jaxfp8.DelayedScaling(amax_history_len=4, **keywords)
    step, state, package_state = training_step(recipe), oracle.LayerState.init(4), jaxfp8.init_state(recipe)
    for i, operands in enumerate(random_run(2, 20, np.float32)):
        expected = oracle.dense_step(*operands, state, options)
        got = step(*operands, package_state)
        assert_step(got, expected, f"step {i}")
        state, package_state = expected.state, got[-1]


@pytest.mark.parametrize("length", [1, 2, 1024])
def test_history_lengths(length):
    recipe = jaxfp8.DelayedScaling(amax_history_len=length)
    step, state, package_state = training_step(recipe), oracle.LayerState.init(length), jaxfp8.init_state(recipe)
    assert package_state.input.amax_history.shape == (length,)
    for i, operands in enumerate(random_run(3, 8, oracle.BF16)):
        expected = oracle.dense_step(*operands, state, **products_of(oracle.BF16))
        got = step(*operands, package_state)
        assert_step(got, expected, f"step {i}")
        state, package_state = expected.state, got[-1]


@pytest.mark.parametrize("fmt, forward, backward", FORMATS.values(), ids=FORMATS)
def test_formats_and_that_a_wrong_one_would_be_seen(fmt, forward, backward):
    recipe = jaxfp8.DelayedScaling(amax_history_len=4, fp8_format=fmt)
    step, state, package_state = training_step(recipe), oracle.LayerState.init(4), jaxfp8.init_state(recipe)
    for i, operands in enumerate(random_run(4, 6, np.float32)):
        expected = oracle.dense_step(*operands, state, forward=forward, backward=backward)
        got = step(*operands, package_state)
        assert_step(got, expected, f"step {i}")
        if i == 0:  # both start at scale 1: only the codes differ yet, and already they are out of bound
            for wrong in itertools.product((oracle.E4M3, oracle.E5M2), repeat=2):
                if wrong != (forward, backward):
                    other = oracle.dense_step(*operands, state, forward=wrong[0], backward=wrong[1])
                    with pytest.raises(AssertionError, match="out of bound"):
                        assert_step(got, other, "the wrong format")
        state, package_state = expected.state, got[-1]


@DTYPES
def test_codes_through_an_identity(dtype):
    """With an identity as the other operand each product is a single one, and gives the codes back bit for bit."""
    rng = np.random.default_rng(5)
    n = 32
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)
    step, options = training_step(recipe), oracle.Options()
    eye = np.eye(n, dtype=dtype)
    state = oracle.LayerState(*(oracle.State(np.float32([a, a / 3]), np.float32(1)) for a in (3.3, 1.7, 0.01)))
    for seed in range(3):
        x, kernel = values(rng, (n, n), 2.0, dtype), values(rng, (n, n), 1.0, dtype)
        grad = values(rng, (n, n), 0.02, dtype)
        (x_codes, _, x_next), (kernel_codes, _, kernel_next), (grad_codes, _, grad_next), *eyes = (
            oracle.step(value, part, fmt, options)
            for value, part, fmt in (
                (x, state.input, oracle.E4M3),
                (kernel, state.kernel, oracle.E4M3),
                (grad, state.output_grad, oracle.E5M2),
                (eye, state.input, oracle.E4M3),
                (eye, state.kernel, oracle.E4M3),
            )
        )
        x_eye, kernel_eye = (oracle.widen(codes)[0, 0] for codes, _, _ in eyes)

        def product(codes, one, a, b):
            return ((oracle.widen(codes) * one) * (a.scale * b.scale)).astype(dtype)

        y, dx, _, _ = step(x, eye, grad, to_package(state))
        oracle.assert_bitwise(y, product(x_codes, kernel_eye, x_next, kernel_next), f"codes of x, run {seed}")
        oracle.assert_bitwise(dx, product(grad_codes, kernel_eye, grad_next, kernel_next), f"codes of grad, run {seed}")
        y, _, dkernel, _ = step(eye, kernel, grad, to_package(state))
        oracle.assert_bitwise(y, product(kernel_codes, x_eye, x_next, kernel_next), f"codes of kernel, run {seed}")
        oracle.assert_bitwise(dkernel, product(grad_codes, x_eye, x_next, grad_next), f"wgrad's codes, run {seed}")


def test_rotation_table():
    """H = 4, amaxes 1 to 5: slot 0 newest, slot 1 oldest."""
    step = training_step(recipe := jaxfp8.DelayedScaling(amax_history_len=4))
    state, table = jaxfp8.init_state(recipe), []
    for value in (1, 2, 3, 4, 5):
        operands = [np.full(shape, value, np.float32) for shape in ((2, 3), (3, 4), (2, 4))]
        *_, state = step(*operands, state)
        for name in OPERANDS:
            row = np.asarray(getattr(state, name).amax_history).tolist()
            assert row == [[1, 0, 0, 0], [2, 0, 0, 1], [3, 0, 1, 2], [4, 1, 2, 3], [5, 2, 3, 4]][value - 1], name
        table.append(float(state.input.scale[0]))
    # The scale of a step comes from the steps before it: 1, then amax / 448 of the largest so far.
    assert table == [1.0, *(float(np.float32(1) / (np.float32(448) / np.float32(a))) for a in (1, 2, 3, 4))]


def test_float16_with_a_long_contraction():
    """K = 4096 and gradients from 1e-1 to 1e-5: finite, within the bound. Casting before scaling would overflow."""
    k, recipe = 4096, jaxfp8.DelayedScaling(amax_history_len=2)
    rng = np.random.default_rng(12)
    step, state = training_step(recipe), oracle.LayerState.init(2)
    package_state = jaxfp8.init_state(recipe)
    for i, size in enumerate((1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-5)):
        x, kernel = values(rng, (8, k), 1.0, oracle.F16), values(rng, (k, 16), k**-0.5, oracle.F16)
        operands = (x, kernel, values(rng, (8, 16), size, oracle.F16))
        expected = oracle.dense_step(*operands, state, **products_of(oracle.F16))
        got = step(*operands, package_state)
        assert_step(got, expected, f"step {i}")
        assert all(np.isfinite(product).all() for product in got[:3])
        state, package_state = expected.state, got[-1]
    # Scales now fit the data, and the products are those of float64 to a few percent (e5m2 has 2 mantissa bits: at
    # most 1/8 off an element, averaged over 16 and 8 terms).
    y, _, dkernel, _ = got
    x, kernel, grad = (value.astype(np.float64) for value in operands)
    for product, exact in ((y, x @ kernel), (dkernel, x.T @ grad)):
        assert np.linalg.norm(np.asarray(product, np.float64) - exact) < 0.1 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["eager", "jit", "remat", "remat in jit", "donated", "scan"])
def test_transforms_change_no_bit(name):
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    operands = next(random_run(13, 1, oracle.BF16))

    def layer(x, kernel, state):
        return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)

    def step_of(layer):
        def step(x, kernel, grad, state):
            y, vjp = jax.vjp(layer, x, kernel, state)
            return (y, *vjp(grad))

        return step

    def scanned(*args):
        _, outputs = jax.lax.scan(lambda carry, _: (carry, step_of(layer)(*args)), 0, length=2)
        return jax.tree.map(lambda leaf: leaf[1], outputs)

    runs = {
        "eager": step_of(layer),
        "jit": jax.jit(step_of(layer)),
        "remat": step_of(jax.checkpoint(layer)),
        "remat in jit": jax.jit(step_of(jax.checkpoint(layer))),
        "donated": jax.jit(step_of(layer), donate_argnums=3),
        "scan": jax.jit(scanned),
    }
    expected = oracle.dense_step(*operands, oracle.LayerState.init(4), **products_of(oracle.BF16))
    want = training_step(recipe)(*operands, jaxfp8.init_state(recipe))
    assert_step(want, expected, "as usual")
    got = runs[name](*operands, jaxfp8.init_state(recipe))
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.assert_bitwise(leaf, other, name)


# ----------------------------------------------------------------------------------------------- what state may hold

NAN, INF = np.float32(np.nan), np.float32(np.inf)
STATES = {
    "clean": ([3, 1, 2, 0], 0.5),
    "negative and non-finite entries": ([NAN, 2, -5, INF], 0.5),
    "negative zero": ([-0.0, -0.0, -0.0, -0.0], 0.25),
    "nothing usable in the history": ([-1, -INF, NAN, INF], 0.25),
    "empty, scale kept": ([0, 0, 0, 0], 0.003),
    "scale 0": ([0, 0, 0, 0], 0.0),
    "scale 0 with a history": ([0, 7, 0, 0], 0.0),
    "scale negative": ([0, 0, 0, 0], -3.0),
    "scale NaN": ([0, 0, 0, 0], NAN),
    "scale Inf": ([0, 0, 0, 0], INF),
    "scale NaN with a history": ([1, 2, 3, 4], NAN),
    "scale Inf with a history": ([1, 2, 3, 4], INF),
    "scale out of range below": ([0, 0, 0, 0], 1e-45),
    "scale out of range above": ([0, 0, 0, 0], 3e38),
    "amax below 5e-36": ([1e-37, 2e-38, 0, 0], 1.0),
    "smallest amax": ([1e-45, 0, 0, 0], 1.0),
    "largest amax": ([3.4e38, 0, 0, 0], 1.0),
}


@pytest.mark.parametrize("history, scale", STATES.values(), ids=STATES)
@pytest.mark.parametrize("margin", [0, 5])
def test_states_that_a_trainer_may_leave(history, scale, margin):
    """Each quantizer in turn: the product of two scales of 2**126 would overflow f32, which is GEMM's business."""
    clean = oracle.State(np.float32([2, 1, 1, 1]), np.float32(0.01))
    odd = oracle.State(np.float32(history), np.float32(scale))
    rng = np.random.default_rng(6)
    operands = [values(rng, shape, 1.0, np.float32) for shape in ((M, K), (K, N), (M, N))]
    recipe, options = jaxfp8.DelayedScaling(amax_history_len=4, margin=margin), oracle.Options(margin=margin)
    step = training_step(recipe)
    for name in OPERANDS:
        state = oracle.LayerState(**{other: odd if other == name else clean for other in OPERANDS})
        got = step(*operands, to_package(state))
        expected = oracle.dense_step(*operands, state, options)
        assert_step(got, expected, f"{name}, first step")
        for leaf in jax.tree.leaves(got[-1]):
            assert np.isfinite(leaf).all() and (np.asarray(leaf) >= 0).all()
        # By the next step nothing of it is left but what the history says.
        got = step(*operands, got[-1])
        assert_step(got, oracle.dense_step(*operands, expected.state, options), f"{name}, second step")


def test_bf16_state_is_read_as_f32():
    """Trainers cast trees; the arithmetic stays f32 and the cotangent has the leaf's dtype, as autodiff demands."""
    rounded = np.float32(np.float32([3.3, 0.7, 1.1]).astype(oracle.BF16))
    part = oracle.State(rounded, np.float32(np.float32(0.013).astype(oracle.BF16)))
    state = oracle.LayerState(part, part, part)
    recipe = jaxfp8.DelayedScaling(amax_history_len=3)
    operands = next(random_run(7, 1, np.float32))
    y, dx, dkernel, got = training_step(recipe)(*operands, to_package(state, oracle.BF16))
    expected = oracle.dense_step(*operands, state)
    expected.y.check(y)
    expected.dgrad.check(dx)
    expected.wgrad.check(dkernel)
    assert_state(got, expected.state, "bf16 state", oracle.BF16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spoilt", [0, 1, 2], ids=OPERANDS)
def test_one_bad_step_leaves_no_trace(bad, spoilt):
    """Visible in the product, 0 in the history, and the next good step has the scale it would have had."""
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    step = training_step(recipe)
    good = [np.full(shape, value, np.float32) for shape, value in (((M, K), 2.0), ((K, N), 0.5), ((M, N), 0.01))]
    *_, state = step(*good, jaxfp8.init_state(recipe))
    operands = [value.copy() for value in good]
    operands[spoilt][1, 1] = bad
    y, dx, dkernel, after = step(*operands, state)
    seen = {0: (y, dkernel), 1: (y, dx), 2: (dx, dkernel)}[spoilt]
    assert all(np.isnan(product).any() for product in seen)
    history = np.asarray(getattr(after, OPERANDS[spoilt]).amax_history)
    assert history[0] == 0 and np.isfinite(history).all()
    y, dx, dkernel, recovered = step(*good, after)
    assert np.isfinite(y).all() and np.isfinite(dx).all() and np.isfinite(dkernel).all()
    for name in OPERANDS:
        want = np.asarray(getattr(after, name).scale)  # same amax as before the bad step, so the same scale
        np.testing.assert_array_equal(getattr(recovered, name).scale, want)


def test_forward_alone_updates_nothing_and_equals_the_forward_of_training():
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    x, kernel, grad = next(random_run(8, 1, oracle.BF16))
    state = jaxfp8.init_state(recipe)
    y = jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)
    oracle.assert_bitwise(y, training_step(recipe)(x, kernel, grad, state)[0], "forward alone")
    layer = nn.Dense(N, dtype=jnp.bfloat16, dot_general_cls=jaxfp8.Fp8DotGeneral)
    variables = layer.init(jax.random.key(0), x)
    _, updates = layer.apply(variables, x, mutable=True)
    for name, leaf in as_flat(variables[jaxfp8.OVERWRITE_WITH_GRADIENT]).items():
        oracle.assert_bitwise(as_flat(updates[jaxfp8.OVERWRITE_WITH_GRADIENT])[name], leaf, name)


def test_empty_operands_leave_the_state_untouched():
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    for shapes in (((0, 3), (3, 4), (0, 4)), ((2, 0), (0, 4), (2, 4)), ((2, 3), (3, 0), (2, 0))):
        operands = (np.ones(shape, np.float32) for shape in shapes)
        y, dx, dkernel, state = training_step(recipe)(*operands, jaxfp8.init_state(recipe))
        assert [v.shape for v in (y, dx, dkernel)] == [shapes[2], shapes[0], shapes[1]]
        assert not any(np.asarray(v).any() for v in (y, dx, dkernel))
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state)), "a zero cotangent: untouched"


# -------------------------------------------------------------------------------------------------- other contractions

CONTRACTIONS = {
    "dense": ((5, 7), (7, 3), (((1,), (0,)), ((), ()))),
    "rank 3 x": ((7, 5, 3), (3, 41), (((2,), (0,)), ((), ()))),
    "rank 1 x": ((9,), (9, 4), (((0,), (0,)), ((), ()))),
    "vectors": ((217,), (217,), (((0,), (0,)), ((), ()))),
    "outer product": ((5,), (7,), (((), ()), ((), ()))),
    "kernel transposed": ((5, 7), (3, 7), (((1,), (1,)), ((), ()))),
    "x transposed": ((7, 5), (7, 3), (((0,), (0,)), ((), ()))),
    "two contracting dims": ((4, 3, 5), (3, 5, 6), (((1, 2), (0, 1)), ((), ()))),
    "contracting dims swapped": ((4, 3, 5), (5, 3, 6), (((1, 2), (1, 0)), ((), ()))),
    "batch": ((4, 5, 7), (4, 7, 3), (((2,), (1,)), ((0,), (0,)))),
    "two batch dims": ((2, 3, 5, 7), (2, 3, 7, 4), (((3,), (2,)), ((0, 1), (0, 1)))),
    "batch not first": ((5, 4, 7), (7, 3, 4), (((2,), (0,)), ((1,), (2,)))),
    "rank 5": ((2, 1, 3, 2, 5), (5, 2, 4), (((4, 3), (0, 1)), ((), ()))),
    "size 1": ((1, 1), (1, 1), (((1,), (0,)), ((), ()))),
}


def to_batched_matrix(value, batch, contract):
    """`[batch..., free..., contract...]` as `[g, rows, k]`."""
    free = [d for d in range(value.ndim) if d not in batch and d not in contract]
    moved = np.transpose(value, [*batch, *free, *contract])
    sizes = [int(np.prod([value.shape[d] for d in dims])) for dims in (batch, free, contract)]
    return moved.reshape(sizes)


def batched_product(a, b, a_inv, b_inv) -> oracle.Product:
    parts = [oracle.scaled_matmul(a[i], b[i], a_inv, b_inv) for i in range(len(a))]
    return oracle.Product(np.stack([p.exact for p in parts]), np.stack([p.bound for p in parts]))


@pytest.mark.parametrize("x_shape, kernel_shape, dims", CONTRACTIONS.values(), ids=CONTRACTIONS)
def test_any_contraction(x_shape, kernel_shape, dims):
    rng = np.random.default_rng(9)
    (x_contract, kernel_contract), (x_batch, kernel_batch) = dims
    x, kernel = values(rng, x_shape, 1.0, np.float32), values(rng, kernel_shape, 0.2, np.float32)
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)
    state = oracle.LayerState(*(oracle.State(np.float32([a, 0]), np.float32(1)) for a in (2.5, 0.4, 1e-3)))

    def run(x, kernel, state):
        return jaxfp8.dot_general(x, kernel, dims, recipe=recipe, state=state)

    y, vjp = jax.vjp(run, x, kernel, to_package(state))
    assert y.shape == jax.eval_shape(lambda *xs: jax.lax.dot_general(*xs, dims), x, kernel).shape
    grad = values(rng, y.shape, 1e-3, np.float32)
    dx, dkernel, got = vjp(grad)

    steps = [
        oracle.step(value, part, fmt)
        for value, part, fmt in (
            (x, state.input, oracle.E4M3),
            (kernel, state.kernel, oracle.E4M3),
            (grad, state.output_grad, oracle.E5M2),
        )
    ]
    assert_state(got, oracle.LayerState(*(s[2] for s in steps)), "next state")
    (x_codes, _, x_next), (kernel_codes, _, kernel_next), (grad_codes, _, grad_next) = steps
    x3 = to_batched_matrix(x_codes, x_batch, x_contract)
    kernel3 = to_batched_matrix(kernel_codes, kernel_batch, kernel_contract)
    grad3 = grad_codes.reshape(x3.shape[0], x3.shape[1], kernel3.shape[1])
    batched_product(x3, kernel3, x_next.scale, kernel_next.scale).check(np.asarray(y).reshape(grad3.shape), "y")
    dgrad = batched_product(grad3, kernel3.swapaxes(1, 2), grad_next.scale, kernel_next.scale)
    dgrad.check(to_batched_matrix(np.asarray(dx), x_batch, x_contract), "dgrad")
    wgrad = batched_product(grad3.swapaxes(1, 2), x3.swapaxes(1, 2), grad_next.scale, x_next.scale)
    wgrad.check(to_batched_matrix(np.asarray(dkernel), kernel_batch, kernel_contract), "wgrad")


def test_mixed_operand_dtypes():
    """x bf16 with an f32 kernel: no bf16 copy of the kernel, an f32 kernel gradient; result dtype by result_type."""
    x, kernel, grad = next(random_run(10, 1, np.float32))
    x = x.astype(oracle.BF16)
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)
    state = oracle.LayerState.init(2)
    for out_dtype in (None, oracle.BF16, oracle.F16):

        def run(x, kernel, state, out_dtype=out_dtype):
            return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state, preferred_element_type=out_dtype)

        y, vjp = jax.vjp(run, x, kernel, to_package(state))
        assert y.dtype == (out_dtype or np.float32)
        cotangent = grad.astype(y.dtype)
        got = (y, *vjp(cotangent))
        assert got[1].dtype == oracle.BF16 and got[2].dtype == np.float32
        expected = oracle.dense_step(x, kernel, cotangent, state, out_dtype=y.dtype, dgrad_dtype=oracle.BF16)
        assert_step(got, expected, f"{y.dtype}")


# ---------------------------------------------------------------------------------------------------- Flax integration


def as_flat(tree) -> dict:
    return {"/".join(str(k.key) for k in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_variables_are_those_of_flax():
    """Names, shapes, dtypes, first values and collection of nn.Fp8DotGeneral: checkpoints and trainers interchange."""
    x = np.ones((2, 3), np.float32)

    def state_of(cls):
        return nn.Dense(4, dot_general_cls=cls).init(jax.random.key(0), x)

    ours, theirs = state_of(jaxfp8.Fp8DotGeneral), state_of(nn.Fp8DotGeneral)
    assert set(ours) == set(theirs) == {"params", "_overwrite_with_gradient"}
    assert jaxfp8.OVERWRITE_WITH_GRADIENT == "_overwrite_with_gradient"
    ((our_module, ours),) = ours[jaxfp8.OVERWRITE_WITH_GRADIENT].items()
    ((_, theirs),) = theirs[jaxfp8.OVERWRITE_WITH_GRADIENT].items()
    assert our_module == "Fp8DotGeneral_0"
    assert set(ours) == {f"{name}_{leaf}" for name in OPERANDS for leaf in ("amax_history", "scale")}
    assert set(ours) == set(theirs)
    for name, leaf in ours.items():
        oracle.assert_bitwise(leaf, theirs[name], name)


def test_flax_train_state_unmodified():
    """flax.training's TrainState overwrites the collection: five steps of SGD end in the oracle's state."""
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    layer = nn.Dense(N, use_bias=False, dot_general_cls=_dot_general_cls(recipe))
    rng = np.random.default_rng(11)
    x, grad = values(rng, (M, K), 1.0, np.float32), values(rng, (M, N), 0.1, np.float32)
    variables = layer.init(jax.random.key(1), x)
    train = TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.sgd(0.1))

    @jax.jit
    def step(train):
        return train.apply_gradients(grads=jax.grad(lambda v: jnp.vdot(train.apply_fn(v, x), grad))(train.params))

    state = oracle.LayerState.init(4)
    for i in range(5):
        kernel = np.asarray(train.params["params"]["kernel"])
        state = oracle.dense_step(x, kernel, grad, state).state
        train = step(train)
        stored = train.params[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"]
        assert_state(from_variables(stored, jaxfp8.init_state(recipe)), state, f"step {i}")
        assert not np.array_equal(kernel, train.params["params"]["kernel"]), "the kernel trains"


def test_flax_fields():
    """A plain swap for nn.Fp8DotGeneral: its fields set history length and formats."""
    x = np.ones((2, 3), np.float32)

    def make(**kwargs):
        return jaxfp8.Fp8DotGeneral(
            amax_history_length=7, e4m3_dtype=jnp.float8_e5m2, e5m2_dtype=jnp.float8_e5m2, **kwargs
        )

    layer = nn.Dense(4, dot_general_cls=make, use_bias=False)
    variables = layer.init(jax.random.key(0), x)
    state = variables[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"]
    assert state["input_amax_history"].shape == (7,)
    y = layer.apply(variables, 300 * x)  # 300 is no e5m2 number
    x_codes, _ = oracle.quantize(300 * x, 1, oracle.E5M2)
    kernel_codes, _ = oracle.quantize(np.asarray(variables["params"]["kernel"]), 1, oracle.E5M2)
    oracle.scaled_matmul(x_codes, kernel_codes.T, 1, 1).check(y)


# ---------------------------------------------------------------------------------------------------- recipes, errors


def test_recipes_compare_and_hash_by_value():
    make = lambda **kw: jaxfp8.DelayedScaling(**{"amax_history_len": 16, **kw})  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())
    others = [
        make(margin=1),
        make(amax_history_len=17),
        make(amax_compute_algo="most_recent"),
        make(amax_compute_algo=newest_two),
        make(fp8_format=jaxfp8.E4M3),
        make(first_step="current"),
        make(pipeline_axes=("pp",)),
    ]
    assert len({make(), *others}) == 1 + len(others)
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().margin = 3
    assert jaxfp8.DelayedScaling() == jaxfp8.DelayedScaling(
        margin=0,
        amax_history_len=1024,
        amax_compute_algo="max",
        fp8_format=jaxfp8.HYBRID,
        first_step="unit",
        pipeline_axes=(),
    )


BAD_OPTIONS = {
    "amax_compute_algo": ["mean", None, 3],
    "first_step": ["none", None],
    "amax_history_len": [0, -1, 2.5, "8"],
    "fp8_format": ["HYBRID", None],
    "margin": ["1", None, np.nan, np.inf],
    "pipeline_axes": ["pp"],
}


@pytest.mark.parametrize("name, value", [(n, v) for n, vs in BAD_OPTIONS.items() for v in vs])
def test_unknown_options_raise_and_are_named(name, value):
    error = ValueError if name in ("amax_compute_algo", "first_step") else (TypeError, ValueError)
    with pytest.raises(error, match=name):
        jaxfp8.DelayedScaling(**{name: value})


GOOD_X, GOOD_KERNEL = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)


def run(x=GOOD_X, kernel=GOOD_KERNEL, dims=MATMUL, **options):
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)
    return jaxfp8.dot_general(x, kernel, dims, **{"recipe": recipe, "state": jaxfp8.init_state(recipe), **options})


BAD_ARGUMENTS = {
    "x int": ({"x": np.ones((2, 3), np.int32)}, TypeError, r"\bx\b"),
    "x bool": ({"x": np.ones((2, 3), bool)}, TypeError, r"\bx\b"),
    "x complex": ({"x": np.ones((2, 3), np.complex64)}, TypeError, r"\bx\b"),
    "x f64": ({"x": np.ones((2, 3), np.float64)}, TypeError, r"\bx\b"),
    "x fp8": ({"x": np.ones((2, 3), oracle.E4M3.dtype)}, TypeError, r"\bx\b"),
    "kernel int": ({"kernel": np.ones((3, 4), np.int32)}, TypeError, r"\bkernel\b"),
    "kernel fp8": ({"kernel": np.ones((3, 4), oracle.E5M2.dtype)}, TypeError, r"\bkernel\b"),
    "k differs": ({"kernel": np.ones((5, 4), np.float32)}, ValueError, "contracting"),
    "batch differs": (
        {
            "x": np.ones((2, 2, 3), np.float32),
            "kernel": np.ones((3, 3, 4), np.float32),
            "dims": (((2,), (1,)), ((0,), (0,))),
        },
        ValueError,
        "batch",
    ),
    "no such dimension": ({"dims": (((2,), (0,)), ((), ()))}, ValueError, "dimension"),
    "no state": ({"state": None}, ValueError, "state"),
    "output dtype": ({"preferred_element_type": np.int32}, TypeError, "preferred_element_type"),
}


@pytest.mark.parametrize("arguments, error, match", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_of_dot_general(arguments, error, match):
    assert np.asarray(run()).tolist() == [[3.0] * 4] * 2, "the defaults are good"
    with pytest.raises(error, match=match):
        run(**arguments)


def test_forward_mode_and_second_derivatives_raise():
    x = jnp.ones((2, 3))

    def loss(x):
        return jnp.sum(run(x) ** 2)

    assert jnp.isfinite(jax.grad(loss)(x)).all()
    with pytest.raises(TypeError):
        jax.jvp(loss, (x,), (x,))
    for second in (jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)), jax.hessian(loss), jax.jacfwd(jax.grad(loss))):
        with pytest.raises(TypeError):
            second(x)
        with pytest.raises(TypeError):
            jax.jit(second)(x)
