"""Checkpoints: saved and restored, fitted to changed models, with state that is
missing or bad.
"""

import pathlib
import tempfile

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from draws import KEY
from flax.training.train_state import TrainState

from jaxfp8 import convert

from . import steps
from .libraries import HISTORY, OPERANDS, OWG
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
        return nn.Dense(N, dot_general_cls=cls)(
            nn.gelu(nn.Dense(K, dot_general_cls=cls)(x))
        )


def start(library, **fields):
    model = Model(library, **fields)
    variables = model.init(KEY, data(0)[0])
    cls = library.train_state if library else TrainState
    train = cls.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.05))
    return train.replace(step=jnp.int32(0))


def data(i):
    return in_two_octaves(2 * i, (M, K), 4.0), in_two_octaves(2 * i + 1, (M, N), 0.1)


@jax.jit
def advance(train, x, grad):
    return train.apply_gradients(
        grads=jax.grad(lambda v: jnp.vdot(train.apply_fn(v, x), grad))(train.params)
    )


def run(train, steps):
    for i in steps:
        train = advance(train, *data(i))
    return train


def through_orbax(tree, template, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(
            folder / "checkpoint",
            jax.tree.map(ocp.utils.to_shape_dtype_struct, template),
        )


def through_msgpack(tree, template, folder):
    (folder / "checkpoint").write_bytes(flax.serialization.to_bytes(tree))
    return flax.serialization.from_bytes(template, (folder / "checkpoint").read_bytes())


def through_numpy(tree, template, folder):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    np.savez(
        folder / "checkpoint.npz",
        **{jax.tree_util.keystr(path): leaf for path, leaf in leaves},
    )
    with np.load(folder / "checkpoint.npz") as saved:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: saved[jax.tree_util.keystr(path)], template
        )


FORMATS = {"orbax": through_orbax, "msgpack": through_msgpack, "numpy": through_numpy}


@row("save at step 5 (orbax, msgpack, numpy), restore, go on to 10: bitwise")
def restored(library):
    tally = Tally()
    first = start(library)
    at_five = run(first, range(5))
    at_ten = run(at_five, range(5, 10))
    for name, through in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            again = through(at_five, first, pathlib.Path(folder))
        tally(same_bits(again, at_five), f"{name}: other bits")
        after = run(again, range(5, 10))
        tally(same_bits(after, at_ten), f"{name}: other bits at step 10")
    return tally.verdict("the same bits")


def restore(library, template, saved):
    """A saved tree into the variables of a model, in the way that the library has for
    it.
    """
    if library.is_ours:
        return convert.merge_state(template, saved)
    return flax.serialization.from_bytes(template, flax.serialization.to_bytes(saved))


def goes_on(tally, library, variables, what, **fields):
    """One step of the model: finite, and state of all its layers."""
    train = run(start(library, **fields).replace(params=variables), [5])
    tally(
        all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(train.params)),
        f"{what}: not finite",
    )
    return train


@row("bf16 checkpoint into an FP8 model and back")
def from_high_precision(library):
    saved = run(start(None), range(2)).params
    tally = Tally()
    new = start(library).params
    variables = restore(library, new, saved)
    tally(same_bits(variables["params"], saved["params"]), "parameters changed")
    tally(
        same_bits(variables[OWG], new[OWG]),
        "state that does not begin as a new model's",
    )
    train = goes_on(tally, library, variables, "the step after")
    y = Model().apply({"params": train.params["params"]}, data(0)[0])
    tally(np.isfinite(y).all(), "back: not finite")
    return tally.verdict()


@row("changed history length")
def changed_length(library):
    """The window has the length that the model asks for, and its newest entries."""
    saved = run(start(library), range(5)).params
    tally = Tally()

    def newest_first(variables):
        history = np.asarray(
            variables[OWG]["Dense_0"][library.module]["input_amax_history"]
        )
        return [float(amax) for amax in (history[0], *history[:0:-1])]

    for length in (2, 7):
        variables = restore(library, start(library, history=length).params, saved)
        entries = newest_first(variables)
        expected = [*newest_first(saved), *[0] * length][:length]
        what = (
            f"the model asks for {length} entries and has {len(entries)}: {entries} "
            f"for {expected}"
        )
        tally(entries == expected, what)
        goes_on(tally, library, variables, "the step after", history=length)
    return tally.verdict()


@row("changed recipe", peer="Flax has one recipe")
def changed_recipe(library):
    """Saved with one margin, restored with another: the next products are right by the
    window that was saved.
    """
    tally = Tally()
    operands = steps.operands(M, K, N, 100.0)
    x, kernel, grad = operands
    saved = step_of(library, N)(library.variables(kernel), x, grad).variables
    for fields in (
        {"margin": 2},
        {"amax_compute_algo": "most_recent"},
        {"first_step": "current"},
    ):
        layer = library.dense(N).clone(
            dot_general_cls=library.dot_general_cls(HISTORY, **fields)
        )
        y = layer.apply(convert.merge_state(saved, saved), x)
        _, vjp = jax.vjp(layer.apply, saved, x)
        gradient, dx = vjp(jnp.asarray(grad))
        got = step_of(library, N)(saved, x, grad)._replace(
            y=y, dx=dx, dkernel=gradient["params"]["kernel"]
        )
        tally_products(tally, got, operands, str(fields))
    return tally.verdict()


@row("missing state")
def missing_state(library):
    saved = run(start(library), range(5)).params
    tally = Tally()
    lost = {**saved, OWG: {"Dense_1": saved[OWG]["Dense_1"]}}
    new = start(library).params
    variables = restore(library, new, lost)
    tally(
        same_bits(variables[OWG]["Dense_1"], saved[OWG]["Dense_1"]),
        "state that was there changed",
    )
    tally(
        same_bits(variables[OWG]["Dense_0"], new[OWG]["Dense_0"]),
        "state that does not begin as a new layer's",
    )
    goes_on(tally, library, variables, "the step after")
    return tally.verdict()


# The history and the scale of a damaged checkpoint.
BAD_LEAVES = {
    "NaN everywhere": ([np.nan] * 4, np.nan),
    "NaN in the window": ([2, np.nan, 1, 3], 0.5),
    "Inf in the window": ([np.inf, 1, 2, 3], 0.5),
    "zero scale": ([0, 0, 0, 0], 0),
    "Inf scale": ([0, 0, 0, 0], np.inf),
}


@row("NaN in state")
def bad_numbers(library):
    """Products one step after a state that cannot be are right."""
    tally = Tally()
    step = step_of(library, N)
    operands = steps.operands(M, K, N, 4, 4, 4)
    x, kernel, grad = operands
    for what, (history, scale) in BAD_LEAVES.items():
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
