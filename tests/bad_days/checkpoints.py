"""Checkpoints: saved and restored, fitted to changed models, with state that is missing, foreign or bad."""

import pathlib
import tempfile

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import test_checkpoints as straight_runs
from convert.test_transformer_engine import Replay, te_leaves

from jaxfp8 import convert

from .libraries import FLAX, HISTORY, OPERANDS, OWG
from .steps import in_two_octaves, same_bits, step_of, tally_products
from .verdict import Tally, row

M, K, N = 16, 24, 8


class Model(nn.Module):
    """Two layers in the FP8 of a library; in high precision without one."""

    library: object = None
    history: int = HISTORY

    @nn.compact
    def __call__(self, x):
        cls = self.library and self.library.dot_general_cls(self.history)
        return nn.Dense(N, dot_general_cls=cls)(nn.gelu(nn.Dense(K, dot_general_cls=cls)(x)))


def start(library, **fields):
    model = Model(library, **fields)
    variables = model.init(jax.random.key(0), data(0)[0])
    cls = library.train_state if library else straight_runs.TrainState
    return cls.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.05)).replace(step=jnp.int32(0))


def data(i):
    return in_two_octaves(2 * i, (M, K), 4.0), in_two_octaves(2 * i + 1, (M, N), 0.1)


@jax.jit
def advance(train, x, grad):
    return train.apply_gradients(grads=jax.grad(lambda v: jnp.vdot(train.apply_fn(v, x), grad))(train.params))


def run(train, steps):
    for i in steps:
        train = advance(train, *data(i))
    return train


@row("save at step 5, restore (orbax, msgpack, numpy), go on to 10: bitwise the straight run")
def restored(library):
    tally, at_five = Tally(), run(start(library), range(5))
    at_ten = run(at_five, range(5, 10))
    for name, through in straight_runs.FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            again = through(at_five, start(library), pathlib.Path(folder))
        tally(same_bits(again, at_five), f"{name}: other bits")
        tally(same_bits(run(again, range(5, 10)), at_ten), f"{name}: other bits at step 10")
    return tally.verdict("the same bits")


def restore(library, template, saved):
    """A saved tree into the variables of a model, in the way that the library has for it."""
    if library.is_ours:
        return convert.merge_state(template, saved)
    return flax.serialization.from_bytes(template, flax.serialization.to_bytes(saved))


def goes_on(tally, library, variables, what, **fields):
    """One step of the model: finite, and state of all its layers."""
    train = run(start(library, **fields).replace(params=variables), [5])
    tally(all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(train.params)), f"{what}: not finite")
    return train


@row("bf16 checkpoint into an FP8 model and back")
def from_high_precision(library):
    saved, tally = run(start(None), range(2)).params, Tally()
    variables = restore(library, start(library).params, saved)
    tally(same_bits(variables["params"], saved["params"]), "parameters changed")
    train = goes_on(tally, library, variables, "the step after")
    y = Model().apply({"params": train.params["params"]}, data(0)[0])
    tally(np.isfinite(y).all(), "back: not finite")
    return tally.verdict()


@row("changed history length")
def changed_length(library):
    """The window has the length that the model asks for, and keeps the largest of its newest entries."""
    saved, tally = run(start(library), range(5)).params, Tally()
    for length in (2, 7):
        variables = restore(library, start(library, history=length).params, saved)
        history = np.asarray(variables[OWG]["Dense_0"][library.module]["input_amax_history"])
        tally(history.shape == (length,), f"the model asks for {length} entries and has {history.size}")
        goes_on(tally, library, variables, "the step after", history=length)
    return tally.verdict()


@row("changed recipe", peer="Flax has one recipe")
def changed_recipe(library):
    """Saved with one margin, restored with another: the next products are right by the window that was saved."""
    tally, operands = (
        Tally(),
        (in_two_octaves(0, (M, K), 100.0), in_two_octaves(1, (K, N), 1), in_two_octaves(2, (M, N), 1)),
    )
    x, kernel, grad = operands
    saved = step_of(library, N)(library.variables(kernel), x, grad).variables
    for fields in ({"margin": 2}, {"amax_compute_algo": "most_recent"}, {"first_step": "current"}):
        layer = library.dense(N).clone(dot_general_cls=library.dot_general_cls(HISTORY, **fields))
        y = layer.apply(convert.merge_state(saved, saved), x)
        _, vjp = jax.vjp(layer.apply, saved, x)
        gradient, dx = vjp(jnp.asarray(grad))
        got = step_of(library, N)(saved, x, grad)._replace(y=y, dx=dx, dkernel=gradient["params"]["kernel"])
        tally_products(tally, got, operands, str(fields))
    return tally.verdict()


@row("missing state")
def missing_state(library):
    saved, tally = run(start(library), range(5)).params, Tally()
    lost = {**saved, OWG: {"Dense_1": saved[OWG]["Dense_1"]}}
    variables = restore(library, start(library).params, lost)
    tally(same_bits(variables[OWG]["Dense_1"], saved[OWG]["Dense_1"]), "state that was there changed")
    goes_on(tally, library, variables, "the step after")
    return tally.verdict()


@row("NaN in state")
def bad_numbers(library):
    """Products one step after a state that cannot be are right."""
    tally, step = Tally(), step_of(library, N)
    operands = in_two_octaves(0, (M, K), 4.0), in_two_octaves(1, (K, N), 4.0), in_two_octaves(2, (M, N), 4.0)
    x, kernel, grad = operands
    for what, (history, scale) in straight_runs.BAD_LEAVES.items():
        leaves = {
            f"{o}_{leaf}": np.float32(v)
            for o in OPERANDS
            for leaf, v in (("amax_history", history), ("scale", [scale]))
        }
        variables = {"params": {"kernel": kernel}, OWG: {library.module: leaves}}
        for _ in range(2):
            got = step(variables, x, grad)
            variables = got.variables
        tally_products(tally, got, operands, what)
    return tally.verdict()


@row("Flax's state: a converter or a named error", peer="it is Flax's own")
def from_flax(library):
    """A run of Flax's class goes on with ours: products right, the amax of the next step beside those of before."""
    tally = Tally()
    operands = in_two_octaves(0, (M, K), 400.0), in_two_octaves(1, (K, N), 1), in_two_octaves(2, (M, N), 1e-3)
    x, kernel, grad = operands
    theirs = step_of(FLAX, N)(FLAX.variables(kernel), x, grad).variables
    variables = convert.from_flax(theirs)
    got = step_of(library, N)(variables, x, grad)
    tally_products(tally, got, operands, "the step after")
    amax = np.abs(x).max()
    tally(np.array_equal(library.history(got.variables, "input"), [amax, 0, 0, amax]), "another window")
    return tally.verdict()


@row("TransformerEngine's state: a converter or a named error", peer="Flax has no converter and no such names")
def from_transformer_engine(library):
    tally = Tally()
    operands = in_two_octaves(0, (M, K), 400.0), in_two_octaves(1, (K, N), 1), in_two_octaves(2, (M, N), 1e-3)
    x, kernel, grad = operands
    largest = {"input": 448.0, "kernel": 448.0, "output_grad": 57344.0}
    quantizers = {name: Replay(np.zeros(HISTORY, np.float32), np.float32(1), top) for name, top in largest.items()}
    for name, value in zip(OPERANDS, operands, strict=True):
        quantizers[name].step(np.abs(value).max())
    converted = convert.from_transformer_engine({"fp8_metas": {"Dense_0": te_leaves(quantizers)}})
    variables = {"params": {"kernel": kernel}, OWG: converted[OWG]["Dense_0"]}
    tally_products(tally, step_of(library, N)(variables, x, grad), operands, "the step after")
    return tally.verdict()
