"""Checkpoints: saved and restored, fitted to changed models, with state that is
missing, foreign or bad.
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
from flax import nnx
from flax.training.train_state import TrainState

import jaxfp8
from jaxfp8 import convert

from . import steps
from .libraries import HISTORY, OPERANDS, OWG
from .steps import in_two_octaves, same_bits, step_of, tally_products
from .verdict import Tally, refused, row

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


def start(library, tx=optax.sgd(0.05), **fields):  # noqa: B008
    model = Model(library, **fields)
    variables = model.init(jax.random.key(0), data(0)[0])
    cls = library.train_state if library else TrainState
    return cls.create(apply_fn=model.apply, params=variables, tx=tx).replace(
        step=jnp.int32(0)
    )


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
    """Ours also within an accumulation of three mini-steps, and in NNX: the amaxes of
    steps 3 and 4, which are the largest of theirs, are in the window at step 10 and not
    when it is saved."""
    tally = Tally()
    runs = [(start(library), advance)]
    if library.is_ours:
        runs += [(start(library, accumulation()), advance), nnx_model()]
    for i, (first, step) in enumerate(runs):

        def go(tree, numbers, step=step, is_accumulating=i > 0):
            for number in numbers:
                x, grad = data(number)
                tree = step(
                    tree, x * (100 if is_accumulating and number in (3, 4) else 1), grad
                )
            return tree

        at_five = go(first, range(5))
        at_ten = go(at_five, range(5, 10))
        if i:
            tally(
                largest(at_five) < 100 < largest(at_ten),
                f"run {i}: {largest(at_five)} and {largest(at_ten)} in windows",
            )
        for name, through in FORMATS.items():
            with tempfile.TemporaryDirectory() as folder:
                again = through(at_five, first, pathlib.Path(folder))
            tally(same_bits(again, at_five), f"run {i}, {name}: other bits")
            tally(
                same_bits(go(again, range(5, 10)), at_ten),
                f"run {i}, {name}: other bits at step 10",
            )
    return tally.verdict("the same bits")


def accumulation():
    return optax.MultiSteps(optax.adam(1e-2), 3)


def largest(tree) -> float:
    """Of the stored input histories, without what an optimizer accumulates."""
    leaves = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    return max(
        float(np.max(v))
        for path, v in leaves.items()
        if "input_amax_history" in path and "opt" not in path
    )


class NnxRun(nnx.Module):
    def __init__(self):
        product = jaxfp8.nnx.Fp8DotGeneral(
            jaxfp8.DelayedScaling(amax_history_len=HISTORY)
        )
        self.model = nnx.Linear(
            K, N, use_bias=False, dot_general=product, rngs=nnx.Rngs(0)
        )
        self.optimizer = jaxfp8.nnx.Optimizer(self.model, accumulation())


def nnx_model():
    """The tree is a dict from paths to arrays, of the model and its optimizer."""
    graphdef, state = nnx.split(NnxRun())
    structure = jax.tree.structure(state)

    def tree_of(state):
        return {
            jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree.leaves_with_path(state)
        }

    names = list(tree_of(state))

    @jax.jit
    def step(tree, x, grad):
        run = nnx.merge(
            graphdef, jax.tree.unflatten(structure, [tree[name] for name in names])
        )
        run.optimizer.update(
            run.model,
            jaxfp8.nnx.grad(lambda model: jnp.vdot(model(x), grad))(run.model),
        )
        return tree_of(nnx.state(run))

    return tree_of(state), step


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


def fresh(cls):
    """State as the layers of a class begin."""
    layer = nn.Dense(N, use_bias=False, dot_general_cls=cls)
    return layer.init(jax.random.key(0), np.ones((1, K), np.float32))[OWG]


def renamed(state):
    """The names of TransformerEngine's collection."""
    return {
        "DenseGeneral_0": {
            f"x_{name}": leaf for name, leaf in state["Fp8DotGeneral_0"].items()
        }
    }


FOREIGN = {
    "Flax's state": lambda: {OWG: fresh(nn.Fp8DotGeneral)},
    "TransformerEngine's names": lambda: {OWG: renamed(fresh(jaxfp8.Fp8DotGeneral))},
    "no state": lambda: {OWG: {}},
    "no collection": dict,
}


def foreign(tally, library):
    """State that nobody converted is never misread: Flax's own loader says which module
    it misses, `merge_state` what to call; applied as it is, products take their scales
    from the tensors at hand, and nothing is written into it."""
    operands = x, kernel, grad = steps.operands(M, K, N, 1e4, 1e-7)
    variables = library.variables(kernel)

    @jax.jit
    def step(variables):
        y, vjp = jax.vjp(library.dense(N).apply, variables, x)
        return y, *vjp(jnp.asarray(grad))

    for name, make in FOREIGN.items():
        saved = {"params": variables["params"], **make()}
        names = f"{OWG}|{library.module}"
        load = lambda saved=saved: flax.serialization.from_bytes(  # noqa: E731
            variables, flax.serialization.to_bytes(saved)
        )
        refused(load, tally, f"{name}, by Flax's loader", names)
        if jax.tree.leaves(saved.get(OWG)):
            names = (
                "merge_state: restored: .*(from_flax|TransformerEngine|no such state)"
            )
            refused(
                lambda saved=saved: convert.merge_state(variables, saved),
                tally,
                f"{name}, merged",
                names,
            )
        else:
            tally(
                same_bits(convert.merge_state(variables, saved), variables),
                f"{name}: merged",
            )
        state = jax.tree.map(lambda leaf: np.full_like(leaf, 1e-3), make())
        y, gradient, dx = step({"params": {"kernel": kernel}, **state})
        tally_products(
            tally, steps.Step(y, dx, gradient["params"]["kernel"], {}), operands, name
        )
        tally(
            not any(np.any(leaf) for leaf in jax.tree.leaves(gradient.get(OWG, {}))),
            f"{name}: written into",
        )


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
    if library.is_ours:
        foreign(tally, library)
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
