"""Checkpoints: a run that stops at step 5, saves, restores and goes on is bitwise the straight run; and bad ones."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import pytest
from equality import assert_same_bits
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxfp8
from jaxfp8 import convert

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
OPERANDS = ("input", "kernel", "output_grad")
BATCH, WIDTH, CLASSES, LENGTH = 4, 6, 3, 4


class Model(nn.Module):
    """Two layers; in FP8 with a recipe, in high precision without."""

    recipe: jaxfp8.DelayedScaling | None = jaxfp8.DelayedScaling(amax_history_len=LENGTH)

    @nn.compact
    def __call__(self, x):
        cls = None if self.recipe is None else lambda: jaxfp8.Fp8DotGeneral(recipe=self.recipe)
        x = nn.gelu(nn.Dense(WIDTH, dot_general_cls=cls)(x))
        return nn.Dense(CLASSES, dot_general_cls=cls)(x)


def data(step):
    """Batches that grow and shrink, so that the window matters."""
    rng = np.random.default_rng(step)
    scale = np.float32(2.0 ** (3 * np.sin(step)))
    x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32) * scale
    return x, rng.normal(size=(BATCH, CLASSES)).astype(np.float32)


def loss(apply_fn, variables, batch):
    x, target = batch
    return jnp.mean((apply_fn(variables, x) - target) ** 2)


@jax.jit
def train_step(train, batch):
    grads = jax.grad(lambda v: loss(train.apply_fn, v, batch))(train.params)
    with jax.numpy_dtype_promotion("standard"):  # adam raises a float to an integer power
        return train.apply_gradients(grads=grads)


MODEL = Model()
TX = optax.adam(0.05)


def start(model=MODEL):
    variables = model.init(jax.random.key(0), data(0)[0])
    train = TrainState.create(apply_fn=model.apply, params=variables, tx=TX)
    return train.replace(step=jnp.int32(0))  # Flax starts with a Python int, which orbax restores as one


def run(train, steps):
    for step in steps:
        train = train_step(train, data(step))
    return train


# ------------------------------------------------------------------------------------------------- save, restore, go on


def through_orbax(tree, template, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", jax.tree.map(ocp.utils.to_shape_dtype_struct, template))


def through_msgpack(tree, template, folder):
    (folder / "checkpoint").write_bytes(flax.serialization.to_bytes(tree))
    return flax.serialization.from_bytes(template, (folder / "checkpoint").read_bytes())


def through_numpy(tree, template, folder):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    np.savez(folder / "checkpoint.npz", **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    with np.load(folder / "checkpoint.npz") as saved:
        return jax.tree_util.tree_map_with_path(lambda path, _: saved[jax.tree_util.keystr(path)], template)


FORMATS = {"orbax": through_orbax, "msgpack": through_msgpack, "numpy": through_numpy}


@pytest.fixture(scope="module")
def straight():
    """The run at step 5 and at step 10."""
    at_five = run(start(), range(5))
    return at_five, run(at_five, range(5, 10))


# ---------------------------------------------------------------------------------------------- changed, missing, bad


def state_of(variables, layer="Dense_0"):
    """One layer's state as the oracle's."""
    module = variables[OWG][layer]["Fp8DotGeneral_0"]
    return oracle.LayerState(
        *(oracle.State(np.asarray(module[f"{o}_amax_history"]), np.asarray(module[f"{o}_scale"])[0]) for o in OPERANDS)
    )


def next_input_and_kernel(model, variables, batch):
    """What one more step stores for the first layer's operands, whose values are known outside."""
    after = jax.jit(jax.grad(lambda v: loss(model.apply, v, batch)))(variables)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    after = state_of(after)
    return after.input, after.kernel


def assert_next(model, variables, batch, before, options=oracle.Options(), fmt=oracle.E4M3):  # noqa: B008 (frozen)
    values = (batch[0], np.asarray(variables["params"]["Dense_0"]["kernel"]))
    got = next_input_and_kernel(model, variables, batch)
    for what, value, old, new in zip(("input", "kernel"), values, (before.input, before.kernel), got, strict=True):
        _, _, expected = oracle.step(value, old, fmt, options)
        oracle.assert_bitwise(new.amax_history, expected.amax_history, f"{what} history")
        oracle.assert_bitwise(new.scale, expected.scale, f"{what} scale")


def test_bfloat16_checkpoint_into_an_fp8_model_and_back(tmp_path):
    high = start(Model(recipe=None))
    assert set(high.params) == {"params"}
    saved = through_msgpack(run(high, range(2)).params, high.params, tmp_path)
    fp8 = start().params
    with pytest.raises(ValueError, match=OWG):  # the raw way: msgpack names the missing collection
        flax.serialization.from_bytes(fp8, flax.serialization.to_bytes(saved))
    merged = convert.merge_state(fp8, saved)
    assert_same_bits(merged["params"], saved["params"])
    assert_next(MODEL, merged, data(2), state_of(fp8))

    trained = run(TrainState.create(apply_fn=MODEL.apply, params=merged, tx=TX), range(2, 4)).params
    x = data(4)[0]
    back = Model(recipe=None).apply({"params": trained["params"]}, x)
    oracle.assert_bitwise(Model(recipe=None).apply(trained, x), np.asarray(back), "with the state beside it")
    assert np.isfinite(back).all()


@pytest.mark.parametrize("length", [2, 7])
def test_changed_history_length(straight, length, tmp_path):
    """Restored in its own shapes, then fitted: the next step is the oracle's with the resized window."""
    saved = straight[0].params
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint")
    model = Model(jaxfp8.DelayedScaling(amax_history_len=length))
    merged = convert.merge_state(model.init(jax.random.key(1), data(0)[0]), restored)
    assert merged[OWG]["Dense_1"]["Fp8DotGeneral_0"]["kernel_amax_history"].shape == (length,)
    before, by_age = state_of(merged), [0, 3, 2, 1]  # slots of a window of 4, newest first
    for operand in OPERANDS:
        old = getattr(state_of(saved), operand).amax_history[by_age]
        new = getattr(before, operand).amax_history
        newest_first = np.concatenate([new[:1], new[:0:-1]])
        expected = np.concatenate([old, np.zeros(length, np.float32)])[:length]
        oracle.assert_bitwise(newest_first, expected, operand)
    assert_next(model, merged, data(5), before)


def test_state_missing_from_one_layer(straight):
    fresh, saved = start().params, straight[0].params
    lost = {**saved, OWG: {"Dense_1": saved[OWG]["Dense_1"]}}
    merged = convert.merge_state(fresh, lost)
    assert_same_bits(merged[OWG]["Dense_1"], saved[OWG]["Dense_1"])
    assert_next(MODEL, merged, data(5), oracle.LayerState.init(LENGTH))
