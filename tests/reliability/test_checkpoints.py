"""Checkpoints within an accumulation and of NNX models; state that no one converted is never misread."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_checkpoints as straight_runs
from flax import nnx
from nnx.cases import linear, use
from train import replay
from train.conftest import promotion_as_optax_wants as promotion_as_optax_wants

import jaxfp8

from .cases import OWG, Step, assert_same_bits, dense, in_two_octaves, products_are_right, variables_of

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")

FORMATS = pytest.mark.parametrize("through", straight_runs.FORMATS.values(), ids=straight_runs.FORMATS)

# ------------------------------------------------------------------------------------------------ save, restore, go on

MINI_STEPS = 3


def tx():
    return optax.MultiSteps(optax.adam(1e-2), MINI_STEPS)


def train_state():
    """`(first tree, advance)` of a run with our TrainState."""
    train = jaxfp8.linen.TrainState.create(apply_fn=replay.LAYER.apply, params=replay.variables(), tx=tx())

    @jax.jit
    def advance(train, x, grad):
        return train.apply_gradients(grads=jax.grad(replay.loss)(train.params, x, grad))

    return train.replace(step=jnp.int32(0)), advance  # Flax starts with a Python int, which orbax restores as one


def optax_loop():
    optimizer = jaxfp8.train.optimizer(tx())

    @jax.jit
    def advance(train, x, grad):
        variables, opt_state = train
        updates, opt_state = optimizer.update(jax.grad(replay.loss)(variables, x, grad), opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state

    return (replay.variables(), optimizer.init(replay.variables())), advance


class NnxRun(nnx.Module):
    def __init__(self):
        self.model = linear()
        self.optimizer = jaxfp8.nnx.Optimizer(self.model, tx())


def nnx_model():
    """The tree is a dict from paths to arrays, of the model and its optimizer."""
    graphdef, state = nnx.split(NnxRun())
    structure = jax.tree.structure(state)

    def tree_of(state):
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}

    names = list(tree_of(state))

    @jax.jit
    def advance(tree, x, grad):
        run = nnx.merge(graphdef, jax.tree.unflatten(structure, [tree[name] for name in names]))
        run.optimizer.update(run.model, jaxfp8.nnx.grad(use)(run.model, x, grad))
        return tree_of(nnx.state(run))

    return tree_of(state), advance


RUNS = {"TrainState": train_state, "optax loop": optax_loop, "NNX": nnx_model}


@pytest.mark.varied
@FORMATS
@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_saved_within_an_accumulation(make, through, tmp_path):
    """Saved after the second mini-step of three, with the max so far; mini-step 10 is bitwise the straight run's."""
    first, advance = make()

    def run(tree, steps):
        for i in steps:
            # The amaxes of steps 3 and 4, before the checkpoint, are the largest of their optimizer step.
            tree = advance(tree, *replay.batch(i, 100.0 if i in (3, 4) else 1.0))
        return tree

    at_five = run(first, range(5))
    restored = through(at_five, first, tmp_path)
    assert_same_bits(restored, at_five, "restored")
    at_ten = run(at_five, range(5, 10))
    assert_same_bits(run(restored, range(5, 10)), at_ten, "step 10")
    assert any(np.max(leaf) > 100 for leaf in histories(at_ten)), "steps 3 and 4 are in the window"
    assert not any(np.max(leaf) > 100 for leaf in histories(at_five)), "and were not yet when it was saved"


def histories(tree):
    """Of the stored input states, without what an optimizer accumulates."""
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    found = [leaf for path, leaf in found.items() if "input_amax_history" in path and "optimizer" not in path]
    assert found
    return found


# ------------------------------------------------------------------------------------------------- nothing converted


def fresh(cls):
    """Variables as Flax's classes make them."""
    layer = nn.Dense(8, use_bias=False, dot_general_cls=cls)
    return layer.init(jax.random.key(0), np.ones((1, 24), np.float32))[OWG]


def renamed(state):
    """The names of TransformerEngine's collection."""
    return {"DenseGeneral_0": {f"x_{name}": leaf for name, leaf in state["Fp8DotGeneral_0"].items()}}


FOREIGN = {
    "Flax's state": lambda: {OWG: fresh(nn.Fp8DotGeneral)},
    "TransformerEngine's names": lambda: {OWG: renamed(fresh(jaxfp8.Fp8DotGeneral))},
    "no state": lambda: {OWG: {}},
    "no collection": dict,
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_foreign_state_is_not_misread(foreign):
    """Applied without `convert`, products take their scales from the tensors at hand: right, whatever the other state
    says; and nothing is written into it."""
    operands = in_two_octaves(0, (16, 24), 1e4), in_two_octaves(1, (24, 8), 1), in_two_octaves(2, (16, 8), 1e-7)
    x, kernel, grad = operands
    state = jax.tree.map(lambda leaf: np.full_like(leaf, 1e-3), foreign())
    y, vjp = jax.vjp(dense(8).apply, {"params": {"kernel": kernel}, **state}, x)
    gradient, dx = vjp(grad)
    got = Step(y, dx, gradient["params"]["kernel"], {})
    assert products_are_right(got, *operands) == [True] * 3
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient.get(OWG, {}))), "untouched"


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_foreign_checkpoints_are_named(foreign):
    """Flax's own loader says which module it misses; `convert.merge_state` what to call, or fills in what is absent."""
    variables = variables_of(np.zeros((24, 8), np.float32))
    saved = {"params": variables["params"], **foreign()}
    with pytest.raises(ValueError, match=f"{OWG}|Fp8DotGeneral_0"):
        flax.serialization.from_bytes(variables, flax.serialization.to_bytes(saved))
    if jax.tree.leaves(saved.get(OWG)):
        with pytest.raises(
            ValueError, match="merge_state: restored: .*(from_flax|from_transformer_engine|no such state)"
        ):
            jaxfp8.convert.merge_state(variables, saved)
    else:
        assert_same_bits(jaxfp8.convert.merge_state(variables, saved), variables, "merged")
