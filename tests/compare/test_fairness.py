"""Equal weights, text, memory figures; float16 scales its loss."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8.compare import Corpus, __main__ as command, _training
from jaxfp8.compare._arms import ARMS, FP8_ARMS
from jaxfp8.compare._model import LanguageModel, attend
from jaxfp8.compare._programs import compile_step, count_operations

LENGTH, VOCABULARY = 16, 50


@pytest.fixture(autouse=True)
def user_promotion():
    """JAX as a user has it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def state_of(name, seed=3):
    arm = ARMS[name]
    model = LanguageModel(VOCABULARY, LENGTH, arm.dtype, width=32, layers=1)
    return _training.create_state(arm, model, seed, _training.make_optimizer(100))


def windows(seed=0):
    return jax.random.randint(jax.random.key(seed), (4, LENGTH + 1), 0, VOCABULARY)


@pytest.mark.slow
def test_arms_start_from_the_same_weights():
    reference = state_of("bf16")
    assert set(reference.params) == {"params"}
    for name in ARMS:
        state = state_of(name)
        chex.assert_trees_all_equal(state.params["params"], reference.params["params"])
        # The optimizer, its clipping and its weight decay see the parameters and nothing else.
        assert len(jax.tree.leaves(state.opt_state)) == len(jax.tree.leaves(reference.opt_state)), name
        assert (jaxfp8.OVERWRITE_WITH_GRADIENT in state.params) == (name == "delayed")
        assert (state.loss_scale is not None) == (name == "f16")
    other = state_of("bf16", seed=4).params["params"]["logits"]["kernel"]
    assert not np.array_equal(other, reference.params["params"]["logits"]["kernel"])


def test_arms_see_the_same_text():
    args = command.parse_arguments(["--tiny", "--arms", "bf16", "block"])
    comparison = command.Comparison(args, Corpus())
    first, again = (list(comparison.batches(1, 3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, list(comparison.batches(2, 3)))


@pytest.mark.slow
def test_an_arm_is_its_region():
    """One model: outside of FP8 arms no FP8, in them four layers of three products, all by the arm's recipe."""
    for name, arm in ARMS.items():
        state = state_of(name)
        with arm.region():
            ops = count_operations(_training.train_step.trace(state, windows()).jaxpr.jaxpr)
        counts = {op: number for op, number in ops.items() if "matmul" in op}
        assert sum(counts.values()) == (12 if name in FP8_ARMS else 0), name
        one_scale, blocks = (counts.get(f"jaxfp8_{op}", 0) for op in ("scaled_matmul", "block_scaled_matmul"))
        expected = {"delayed": (12, 0), "current": (12, 0), "custom": (4, 8)}.get(name, (0, 12))
        assert name not in FP8_ARMS or (one_scale, blocks) == expected, name


@pytest.mark.slow
def test_memory_is_that_of_the_compiled_step():
    programs = {name: compile_step(ARMS[name], state_of(name), windows()) for name in ("f32", "bf16", "current")}
    for program in programs.values():
        analysis = program.step.memory_analysis()
        assert program.peak_bytes == (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        )
        assert analysis.temp_size_in_bytes > 0
    kept = {name: program.kept_bytes for name, program in programs.items()}
    assert kept["current"] < kept["bf16"] < kept["f32"]


@pytest.mark.slow
def test_float16_scales_its_loss():
    """The next scale follows GradScaler's rule; a step that overflows changes nothing else."""
    state, batch = state_of("f16"), windows()
    assert state.loss_scale.value == 2.0**16
    with ARMS["f16"].region():
        before = jax.device_get(state)
        state, loss, made = _training.train_step(state, batch)
        assert made and state.loss_scale.good_steps == 1 and state.step == 1
        plain = _training.loss_fn(before.params, state.apply_fn, batch)
        np.testing.assert_allclose(loss, plain, rtol=1e-3)  # reported without the scale

        state = state.replace(loss_scale=jaxfp8.mixed_precision.DynamicLossScale(2.0**60))
        before = jax.device_get(state)
        state, loss, made = _training.train_step(state, batch)
        assert not made and np.isfinite(loss) and state.loss_scale.value == 2.0**59
        for field in ("step", "params", "opt_state"):
            chex.assert_trees_all_equal(getattr(state, field), getattr(before, field))


def test_skipped_steps_are_counted():
    """Two of three steps overflow."""
    made = iter((False, True, False))

    def step(state, batch):
        return state, jnp.float32(1), jnp.array(next(made))

    _, runs = _training.train({"f16": ARMS["f16"]}, {"f16": step}, {"f16": 0}, [0] * 3, None, 3)
    assert runs["f16"].skipped == 2 and len(runs["f16"].step_ms) == 3


@pytest.mark.slow
def test_attention_is_causal_and_a_mean():
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 5, 3, 32)) for i in range(3))
    ours = attend(query, key, value)
    expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(ours, expected, atol=1e-5)  # f32, sums of 32 and 5 products of order 1
