"""update_state against numpy: the overwrite is exact, and what happened to state on its
way is seen and undone.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from equality import assert_same_bits
from jax.sharding import PartitionSpec as P
from programs.cases import MATMUL

import jaxfp8
from jaxfp8.train import update_state

from . import replay

H = 4
F32 = np.float32
FP8_MAX = 512  # a power of two in the place of 448: sums and means of scales are exact


def pair(history, scale):
    return {
        "input_amax_history": np.asarray(history, F32),
        "input_scale": np.asarray(scale, F32).reshape(-1),
    }


def old_state():
    """A window that saw three steps; its largest entry is in the tail of the next
    one.
    """
    return pair([2.5, 0, 1.75, 0.5], 2.5 / FP8_MAX)


def made(old, amax=3.25):
    """What the gradient returns for one step on `old`."""
    history = np.roll(oracle.clean_history(old["input_amax_history"]), -1)
    history[0] = amax
    top = old["input_amax_history"].max()
    return pair(history, top / FP8_MAX if top > 0 else old["input_scale"])


def times(factor, tree):
    return jax.tree.map(lambda x: (x * F32(factor)).astype(x.dtype), tree)


@pytest.fixture(params=[False, True], ids=["eager", "jit"])
def update(request):
    return jax.jit(update_state) if request.param else update_state


# -------------------------------------------------------------------------- overwriting


def test_rows_decide_for_themselves(update):
    """Stacked state: rows that were not touched or are not finite keep the old value,
    the others take the new one.
    """
    rng = np.random.default_rng(1)
    old = pair(rng.lognormal(0, 2, (6, H)), np.ones(6))
    old["input_scale"] = old["input_scale"].reshape(6, 1)
    rows = [made({k: v[i] for k, v in old.items()}, F32(i)) for i in range(6)]
    new = {k: np.stack([row[k] for row in rows]) for k in old}
    expected = {k: v.copy() for k, v in new.items()}
    for row in (1, 3, 4):
        for k in old:
            expected[k][row] = old[k][row]
    new["input_amax_history"][1], new["input_scale"][1] = 0, 0  # not touched
    new["input_amax_history"][3, 2] = np.nan
    new["input_scale"][4] = np.inf
    assert_same_bits(update(old, new), expected)

    deep = lambda tree: {k: v.reshape(2, 3, -1) for k, v in tree.items()}  # noqa: E731
    assert_same_bits(update(deep(old), deep(new)), deep(expected), "two leading axes: ")


def test_untouched_by_the_scale_alone(update):
    """The scale decides: a history of zeros with a scale is a step that saw nothing but
    zeros.
    """
    old = pair([0, 2, 0, 0], 2 / FP8_MAX)
    assert_same_bits(
        update(old, pair([0, 0, 0, 0], 2 / FP8_MAX)), pair(np.zeros(H), 2 / FP8_MAX)
    )
    assert_same_bits(update(old, pair(np.zeros(H), 0)), old)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan, -0.0, 0.0])
def test_old_state_that_cannot_be(update, bad):
    """It is read as dot_general reads it, and the state returned is clean, touched or
    not.
    """
    old = pair([1.5, 7, bad, 0.25], bad)
    clean = pair(oracle.clean_history(old["input_amax_history"]), 1)
    new = made(clean)
    assert_same_bits(update(old, new), new, "touched: ")
    assert_same_bits(update(old, pair(np.zeros(H), 0)), clean, "untouched: ")


def test_state_is_float32_whatever_cast_the_tree_went_through(update):
    """Trainers cast whole trees: the next state is float32 again, touched or not, that
    of own quantizers too.
    """
    for dtype in (ml_dtypes.bfloat16, np.float16):
        narrow = {k: v.astype(dtype) for k, v in old_state().items()}
        wide = {k: v.astype(F32) for k, v in narrow.items()}
        new = made(wide, F32(3.4e38))
        assert_same_bits(update(narrow, new), new, "touched: ")
        assert_same_bits(update(narrow, pair(np.zeros(H), 0)), wide, "untouched: ")
        own = {replay.OWG: {"count": np.array([1, 2], dtype)}}
        for count in ([3, 0], [0, 0]):
            assert (
                update(own, {replay.OWG: {"count": F32(count)}})[replay.OWG][
                    "count"
                ].dtype
                == F32
            )


def test_trees_that_do_not_fit():
    old = old_state()
    two = pair(np.zeros((2, 4)), 1)
    for before, new, message in (
        (old, {"kernel": two}, "new: expected the gradient of input_amax_history"),
        (old, pair(np.zeros(8), 1), r"new: input: .*\(4,\)"),
        (two, two, r"old: input: .*history \(..., H\)"),
    ):
        with pytest.raises(ValueError, match=f"update_state: {message}"):
            update_state(before, new)


def test_a_state_for_each_example():
    """The `vmap` of a gradient, also for the state of a user's quantizer, which would
    broadcast.
    """
    example = made(old_state()) | {replay.OWG: {"count": np.float32([1, 2])}}
    old = old_state() | {replay.OWG: {"count": np.float32([3, 4])}}
    each = jax.tree.map(lambda a: np.stack([a, 0.5 * a, a]), example)
    for name, new in (
        ("input", each),
        (f"{replay.OWG}/count", example | {replay.OWG: each[replay.OWG]}),
    ):
        for function in (update_state, jax.jit(update_state)):
            with pytest.raises(
                ValueError,
                match=(
                    rf"new: {name}: .*for each of 3 examples.*"
                    r"take the max.*a\.max\(0\)"
                ),
            ):
                function(old, new)
    assert_same_bits(
        update_state(old, jax.tree.map(lambda a: a.max(0), each)),
        update_state(old, example),
    )


def test_layers_without_a_gradient_are_untouched():
    """A frozen layer's state may be absent from the gradient."""
    old = {"a": old_state(), "b": old_state()}
    got = update_state(old, {"a": made(old_state())})
    assert_same_bits(got["a"], made(old_state()))
    assert_same_bits(got["b"], old_state())


# --------------------------------------------------------------------- what is detected

# Sums over 2, 3, 90 uses, loss scales that were undone; then means over fewer uses than
# microbatches, clips, a step.
SUMS = (2, 3, 90.24)
SCALES = (0.5, 2.0**-16)
OTHERS = (1 / 3, 0.0317, 0.985, 1.5, 1.03, -0.01)


@pytest.mark.parametrize("factor", [*SUMS, *SCALES, *OTHERS[:3]])
def test_raises_outside_of_jit(factor):
    """The message names the quantizer, the factor, the cause and the remedy."""
    good = made(old_state())
    old = {"block": dict.fromkeys(("Dense_0", "Dense_1"), old_state())}
    bad = {"block": {"Dense_0": times(factor, good), "Dense_1": good}}
    cause, remedy = (
        ("summed", "max_grad")
        if factor > 1
        else ("averaged, clipped or unscaled", r"global_norm\(grads\['")
    )
    with pytest.raises(
        ValueError,
        match=(
            f"update_state: block/Dense_0/input: .* {F32(factor):.4g} times "
            f".*{cause}.*{remedy}"
        ),
    ):
        update_state(old, bad)


@pytest.mark.parametrize("factor", [2, 8, 0.5, 2.0**-16])
def test_first_step_is_seen_by_its_scale(factor):
    old = pair(np.zeros(H), 1)
    with pytest.raises(ValueError, match=f"{factor:.4g} times"):
        update_state(old, times(factor, made(old)))
    got = jax.jit(update_state)(old, times(factor, made(old)))
    expected = made(old)
    if factor > 1:
        expected["input_amax_history"][0] *= factor  # a bound
    assert_same_bits(got, expected)


def is_loud(state):
    """The next product is NaN: the stored scale is below zero."""
    return bool(np.all(np.asarray(state["input_scale"]) < 0))


@pytest.mark.parametrize("empty", [False, True], ids=["", "empty"])
@pytest.mark.parametrize("factor", OTHERS)
def test_other_factors_are_loud_under_jit(factor, empty):
    """What changed the state so has changed the gradients of parameters: no repair of
    the state alone is right.
    """
    old = pair(np.zeros(H), 1) if empty else old_state()
    step = jax.jit(update_state)
    state = step(old, times(factor, made(old)))
    assert is_loud(state)
    oracle.assert_bitwise(
        state["input_amax_history"],
        old["input_amax_history"],
        "the window is that of before",
    )
    # It stays so, and the next step outside of jit names what happened.
    assert is_loud(
        step(state, jax.tree.map(lambda x: np.full_like(x, np.nan), made(old)))
    )
    with pytest.raises(
        ValueError,
        match=r"got -.*clipped or averaged, or was that of another.*grads\['params'\]",
    ):
        update_state(state, made(old))


@pytest.mark.parametrize("factor", [*SUMS, *SCALES])
def test_safe_under_jit(factor):
    """The tail is exact; slot 0 is no less than the amax and the sum is no more than it
    came; the scale is divided.

    Rounding: factor * tail, factor * amax, their ratio and the quotient are four
    roundings of 2**-24 each, and the reciprocal steps of a compiler two more: below
    2**-21 in all.
    """
    old = old_state()
    new = made(old_state())
    got = jax.tree.map(np.asarray, jax.jit(update_state)(old, times(factor, new)))
    oracle.assert_bitwise(
        got["input_amax_history"][1:], new["input_amax_history"][1:], "tail"
    )
    bound = new["input_amax_history"][0] * max(factor, 1)
    assert abs(got["input_amax_history"][0] / bound - 1) < 2.0**-21
    assert abs(got["input_scale"][0] / new["input_scale"][0] - 1) < 2.0**-21


@pytest.mark.parametrize(
    "history, scale",
    [([-1e-3, 2, 1, 0], 0.5), ([1, 2, -np.inf, 0], 0.5), ([1, 2, 1, 0], -0.5)],
)
def test_old_state_below_zero(history, scale):
    """Only an optimizer that stepped on state makes it. It is not repaired and not
    cleaned; other quantizers go on.
    """
    good = old_state()
    bad = {
        name.replace("input", "kernel"): leaf
        for name, leaf in pair(history, scale).items()
    }
    old = {"Dense_0": good | bad}
    new = {
        "Dense_0": made(good)
        | {name: np.full_like(value, np.nan) for name, value in bad.items()}
    }
    message = (
        "update_state: old: Dense_0/kernel: expected a state that is not negative, "
        "got -.*reset_state"
    )
    with pytest.raises(ValueError, match=message):
        update_state(old, new)
    after = jax.jit(update_state)(old, new)["Dense_0"]
    assert_same_bits({name: after[name] for name in bad}, bad)
    assert_same_bits({name: after[name] for name in good}, made(good))


def test_state_that_was_lost():
    """A tail of zeros says nothing about the amax."""
    old = old_state()
    new = times(0.0, made(old)) | {"input_scale": np.float32([0.01])}  # not untouched
    with pytest.raises(ValueError, match="update_state: input"):
        update_state(old, new)
    assert is_loud(jax.jit(update_state)(old, new))


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_subnormal_numbers(update, slots):
    """Amaxes of 2**-149 pass to the bit, and a state that is that far below zero is
    below zero.
    """
    tiny = F32(2.0**-149)
    old = pair(tiny * F32(range(slots)), 2.0**-126)
    new = pair(np.roll(old["input_amax_history"], -1), 2.0**-126)
    new["input_amax_history"][0] = 7 * tiny
    assert_same_bits(update(old, new), new)
    old["input_amax_history"][-1] = -tiny
    assert_same_bits(jax.jit(update_state)(old, new), old)
    with pytest.raises(
        ValueError, match="input: expected a state that is not negative, got -1.4"
    ):
        update_state(old, new)


def test_all_quantizers_below_zero_are_named():
    """Some names and a count, where an optimizer stepped on the state of a whole
    model.
    """
    old = {f"Dense_{i}": times(-1, old_state()) for i in range(9)}
    with pytest.raises(
        ValueError,
        match=(
            r"old: Dense_0/input, Dense_1/input, .*Dense_3/input and 5 more: .*got "
            r"-2.5"
        ),
    ):
        update_state(old, {name: made(old_state()) for name in old})


@pytest.mark.parametrize("count", [1, 64, 65, 130])
def test_a_model_is_one_computation(count):
    """No effects and no callbacks. The arithmetic does not grow with the model: what
    grows is reshapes.
    """
    old = {f"Dense_{i}": old_state() for i in range(count)}
    new = {name: made(old_state(), 1 + i) for i, name in enumerate(old)}
    traced = jax.jit(update_state).trace(old, new)
    assert not traced.jaxpr.effects
    assert_same_bits(jax.jit(update_state)(old, new), new)
    text = traced.lower().as_text()
    assert "callback" not in text
    if jaxfp8.ops._ffi.is_loaded("cpu"):
        assert text.count("@jaxfp8_undo_factors_v1(") == 1
        assert text.count("@jaxfp8_write_histories_v5(") == -(-count // 64)
    with jaxfp8.ops.implementation("reference"):
        text = jax.jit(update_state).lower(old, new).as_text()
    assert text.count("stablehlo.reduce(") == 1 and text.count("stablehlo.divide") < 10


def test_casts_of_the_tree_pass():
    """bf16 moves a number by 2**-9: the tail is the exact one again, slot 0 and the
    scale are rounded.
    """
    old = old_state()
    new = made(old, 3.257)
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in new.items()}
    got = jax.tree.map(np.asarray, update_state(old, rounded))
    oracle.assert_bitwise(
        got["input_amax_history"][1:], new["input_amax_history"][1:], "tail"
    )
    assert got["input_amax_history"][0] == F32(rounded["input_amax_history"][0])
    assert got["input_scale"][0] == F32(rounded["input_scale"][0])


# --------------------------------------------------------------- programs that are fine


def floor(least):
    """The largest amax, but no less; a step from one multiple of the least to another
    is no sum of uses.
    """
    return lambda history: jnp.maximum(history.max(), least)


RECIPES = [
    jaxfp8.DelayedScaling(**{"amax_history_len": H, **options})
    for options in (
        {},
        {"first_step": "current"},
        {"first_step": "current", "margin": 2},
        {"first_step": "current", "margin": 0.5, "fp8_format": jaxfp8.Format.E5M2},
        {"amax_compute_algo": "most_recent"},
        *({"amax_compute_algo": floor(least)} for least in (1e-3, 7.0, 448.0, 1344.0)),
        {"amax_history_len": 1},
        {"amax_history_len": 2},
    )
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_false_alarm(recipe):
    """Steps as dot_general makes them pass bitwise, whatever the recipe and the size of
    the data.
    """

    @jax.jit
    def gradient(state, x, kernel):
        product = lambda state: jnp.sum(  # noqa: E731
            jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)
            * jnp.float32(1 / 3)
        )
        return jax.grad(product)(state)

    for size in (1e-36, 1e-7, 1.0, 1e4, 1e30):
        rng = np.random.default_rng(3)
        state = jaxfp8.init_state(recipe)
        for i in range(H + 2):
            x, kernel = (
                (rng.standard_normal((3, 3)) * size).astype(F32) for _ in range(2)
            )
            if i == 2:
                x[0, 0], kernel[:] = np.inf, 0
            new = gradient(state, x, kernel)
            got = update_state(state, new)
            assert_same_bits(got, new, f"size {size}, step {i}")
            state = got


# ------------------------------------------------------------------------------ devices


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_rows(kind):
    """Pipeline stages: rows live on different devices and are updated there."""
    mesh = mesh_of(kind, pipe=8)
    sharding = jax.sharding.NamedSharding(mesh, P("pipe"))
    rows = np.arange(1, 9, dtype=F32)[:, None]
    old, new = (
        jax.tree.map(lambda leaf: leaf * rows, tree)
        for tree in (old_state(), made(old_state()))
    )
    placed = jax.device_put((old, new), sharding)
    with jax.set_mesh(mesh):
        step = jax.jit(update_state)
        assert_same_bits(step(*placed), new)
        assert all(
            leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            for leaf in jax.tree.leaves(step(*placed))
        )
        text = step.lower(*placed).compile().as_text()
        assert not any(
            word in text
            for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        )
