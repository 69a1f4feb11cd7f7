"""TransformerEngine's state: its quantizer replayed in numpy, converted at every step and run on, both ways."""

import dataclasses
import functools

import jax
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8 import convert

from .cases import OPERANDS, OWG, assert_same_tree, state_leaves

MATMUL = (((1,), (0,)), ((), ()))
STATE = state_leaves(5)


@dataclasses.dataclass
class Replay:
    """One DelayedScaleQuantizer of TransformerEngine, from its text: fill slot 0, scale, roll, clear slot 0."""

    history: np.ndarray
    scale: np.float32
    largest: float
    margin: int = 0
    algo: str = "max"

    def step(self, amax) -> np.float32:
        """The scale that this step quantizes with."""
        used, history = self.scale, self.history.copy()
        history[0] = amax
        top = history.max() if self.algo == "max" else history[0]
        if top > 0 and np.isfinite(top):
            self.scale = np.float32(np.float32(np.float32(self.largest) / top) / np.float32(2.0**self.margin))
        self.history = np.roll(history, -1)
        self.history[0] = 0
        return used


LARGEST = {"input": 448.0, "kernel": 448.0, "output_grad": 57344.0}
TE_NAMES = {"input": "x", "kernel": "kernel", "output_grad": "grad"}


def replays(length, margin=0, algo="max"):
    return {
        name: Replay(np.zeros(length, np.float32), np.float32(1), largest, margin, algo)
        for name, largest in LARGEST.items()
    }


def te_leaves(run: dict, postfix="") -> dict:
    leaves = {}
    for operand, name in TE_NAMES.items():
        leaves[f"{name}{postfix}_amax_history"] = run[operand].history.copy()
        leaves[f"{name}{postfix}_scale"] = run[operand].scale.reshape(1)
    return leaves


@functools.cache
def our_steps(recipe):
    """`step(state leaves, amaxes) -> state leaves` with real products of 1x1 operands, whose amax is their value."""

    @jax.jit
    def step(leaves, amaxes):
        def quantizer(operand):
            return type(empty.input)(leaves[f"{operand}_amax_history"], leaves[f"{operand}_scale"])

        x, kernel, grad = (a.reshape(1, 1) for a in amaxes)
        state = jaxfp8.DotGeneralState(*map(quantizer, OPERANDS))
        _, vjp = jax.vjp(lambda s: jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=s), state)
        (after,) = vjp(grad)
        return {f"{o}_{leaf}": getattr(getattr(after, o), leaf) for o in OPERANDS for leaf in ("amax_history", "scale")}

    empty = jaxfp8.init_state(recipe)
    return step


def stream(kind, seed, steps=9):
    """Amaxes `[steps, 3]`. "exact" has zeros, after which the last scale stays: we keep its inverse, which is exact for
    powers of two only, hence 7 * 2**k. "random" has any floats and no zeros."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return rng.lognormal(sigma=3, size=(steps, 3)).astype(np.float32)
    amaxes = 7 * 2.0 ** rng.integers(-8, 9, size=(steps, 3))
    return np.where(rng.random((steps, 3)) < 0.4, 0, amaxes).astype(np.float32)


TE_CASES = [
    (length, algo, margin, kind)
    for length, algo, margin in [(1, "max", 0), (2, "max", 0), (4, "max", 0), (4, "max", 2), (3, "most_recent", 0)]
    for kind in ("random", "exact")
]


@pytest.mark.parametrize("length, algo, margin, kind", TE_CASES)
def test_both_ways_replayed(length, algo, margin, kind):
    """At every step of a run: converted, we go on with the scales of the replay; converted back, bitwise its state;
    and the replay goes on from our state with our scales."""
    recipe = jaxfp8.DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algo)
    step = our_steps(recipe)
    amaxes = stream(kind, seed=length + 10 * margin)
    run = replays(length, margin, algo)
    ours_from_start = {k: np.asarray(v) for k, v in as_leaves(jaxfp8.init_state(recipe)).items()}

    for now in range(len(amaxes) - 2):
        theirs = {"fp8_metas": {"Dense_0": te_leaves(run)}}
        converted = convert.from_transformer_engine(theirs, recipe)
        assert_same_tree(convert.to_transformer_engine(converted, recipe), theirs, f"step {now}, back")

        # Their state, our steps; our state, their steps.
        ours = converted[OWG]["Dense_0"]["Fp8DotGeneral_0"]
        ahead = {operand: dataclasses.replace(quantizer) for operand, quantizer in run.items()}
        lent = convert.to_transformer_engine({"Dense_0": {"Fp8DotGeneral_0": ours_from_start}}, recipe)["Dense_0"]
        borrowed = {
            operand: dataclasses.replace(
                run[operand],
                history=np.asarray(lent[f"{name}_amax_history"]),
                scale=np.asarray(lent[f"{name}_scale"])[0],
            )
            for operand, name in TE_NAMES.items()
        }
        own = ours_from_start
        for later in range(now, min(now + length + 2, len(amaxes))):
            ours, own = step(ours, amaxes[later]), step(own, amaxes[later])
            for operand, amax in zip(OPERANDS, amaxes[later], strict=True):
                what = f"{operand}, converted at step {now}, step {later}"
                used = np.float32(1) / ahead[operand].step(amax)
                oracle.assert_bitwise(np.asarray(ours[f"{operand}_scale"])[0], used, f"their state, {what}")
                used = np.float32(1) / borrowed[operand].step(amax)
                oracle.assert_bitwise(np.asarray(own[f"{operand}_scale"])[0], used, f"our state, {what}")

        for operand, amax in zip(OPERANDS, amaxes[now], strict=True):
            run[operand].step(amax)
        ours_from_start = step(ours_from_start, amaxes[now])


def as_leaves(state) -> dict:
    return {f"{o}_{leaf}": getattr(getattr(state, o), leaf) for o in OPERANDS for leaf in ("amax_history", "scale")}


@pytest.mark.parametrize("margin", [0, 1.3])
def test_every_dropped_amax_is_found_again(margin):
    """H = 1 keeps nothing but the scale. All 2**23 significands, so all amaxes, give a scale that survives the way here
    and back: with f(a) = FP8_MAX / a / 2**margin in f32, f(f(f(a))) = f(a). Of them, 2**14 go through the converter."""
    amaxes = (np.arange(1 << 23, dtype=np.int32) + 0x3F800000).view(np.float32)  # [1, 2)
    for largest in (448, 57344):
        numerator = np.float32(largest * 2.0**-margin)
        scale = numerator / amaxes
        assert np.array_equal(numerator / (numerator / scale), scale)

    amaxes = amaxes[:: 1 << 9] * np.float32(2.0) ** np.arange(-100, 100)[np.arange(1 << 14) % 200].astype(np.float32)
    theirs = {f"{name}_amax_history": np.zeros((1 << 14, 1), np.float32) for name in TE_NAMES.values()}
    for operand, name in TE_NAMES.items():
        theirs[f"{name}_scale"] = (np.float32(LARGEST[operand] * 2.0**-margin) / amaxes)[:, None]
    recipe = jaxfp8.DelayedScaling(margin=margin, amax_history_len=1)
    ours = convert.from_transformer_engine({"layers": theirs}, recipe)
    found = np.asarray(ours["layers"]["Fp8DotGeneral_0"]["input_amax_history"])[:, 0]
    np.testing.assert_allclose(found, amaxes, rtol=2.0**-22)
    assert_same_tree(convert.to_transformer_engine(ours, recipe), {"layers": theirs}, "back")


@pytest.mark.parametrize("frozen", [100, 0.01])
def test_a_scale_frozen_by_inf(frozen):
    """Its Inf counts as 0: of 3, 2 and the frozen scale, the smaller scale holds for a step, then 3 and 2 decide."""
    run = replays(4)
    for amax in (frozen, np.inf, 3, 2):
        for quantizer in run.values():
            quantizer.step(np.float32(amax))
    assert np.isinf(run["input"].history).any() and run["input"].scale == np.float32(448) / np.float32(frozen)
    ours = convert.from_transformer_engine({"layer": te_leaves(run)})["layer"]["Fp8DotGeneral_0"]
    step = our_steps(jaxfp8.DelayedScaling(amax_history_len=4))
    for amax in (max(frozen, 3), 3):
        ours = step(ours, np.float32([1, 1, 1]))
        used = np.float32(1) / (np.float32(448) / np.float32(amax))
        oracle.assert_bitwise(np.asarray(ours["input_scale"])[0], used, f"scale of {amax}")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ours))


@pytest.mark.parametrize("scale", [0, -1, np.nan, np.inf])
def test_a_broken_scale_is_ignored(scale):
    run = replays(3)
    for quantizer in run.values():
        quantizer.step(np.float32(7))
        quantizer.scale = np.float32(scale)
    ours = convert.from_transformer_engine({"layer": te_leaves(run)})["layer"]["Fp8DotGeneral_0"]
    assert ours["input_amax_history"].tolist() == [7, 0, 0] and ours["input_scale"].tolist() == [1]


def test_names_of_both_collections():
    run = replays(3)
    single, first, second = te_leaves(run), te_leaves(run, "_0"), te_leaves(run, "_1")
    modules = {
        "params": {"kernel": np.ones(2)},
        "fp8_metas": {"attention": {"qkv": single}, "mlp": {**first, **second}},
    }
    ours = convert.from_transformer_engine(modules)
    assert set(ours) == {"params", OWG}
    assert set(ours[OWG]["attention"]["qkv"]) == {"Fp8DotGeneral_0"}
    assert set(ours[OWG]["mlp"]) == {"Fp8DotGeneral_0", "Fp8DotGeneral_1"}
    assert set(ours[OWG]["mlp"]["Fp8DotGeneral_1"]) == set(STATE)
    assert_same_tree(convert.to_transformer_engine(ours), modules, "TransformerEngine's modules")

    wrapped = {"params": {}, OWG: {"Dense_0": {"TEWrapper_dot_general_0": single, "TEWrapper_dot_general_1": single}}}
    ours = convert.from_transformer_engine(wrapped)
    assert set(ours[OWG]["Dense_0"]) == {"Fp8DotGeneral_0", "Fp8DotGeneral_1"}
    back = convert.to_transformer_engine(ours, collection=OWG)
    assert_same_tree(back, wrapped, "make_dot_general_cls")
    assert_same_tree(convert.from_transformer_engine(wrapped[OWG]), ours[OWG], "the bare collection")
    assert_same_tree(
        convert.from_transformer_engine(single),
        {"Fp8DotGeneral_0": ours[OWG]["Dense_0"]["Fp8DotGeneral_0"]},
        "one layer",
    )
