"""Mutants of how uses combine: each must make the comparison with the simulation fail; the package must not."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxfp8
from jaxfp8._jax import _compat
from jaxfp8.dot import _gemms
from transforms import interpret, programs as p

pytestmark = pytest.mark.slow

CALL = p.Call(0)
BODIES = {
    "one use": CALL,
    "called twice": p.Sequence((CALL, CALL)),
    "scan": p.Scan(CALL, 3, members=False, closed=True),
    "carry": p.Scan(CALL, 3, members=False, closed=False),
    "vmap": p.Vmap(p.Scan(CALL, 2, members=False, closed=True), members=False, closed=True),
    "not taken": p.Cond(False, CALL, p.Call(1), closed=True),
    "some iterations": p.Scan(p.Cond("odd", CALL, p.Sequence(), closed=True), 2, members=False, closed=True),
}


def compare(*names):
    for name in names:
        entry = "grad" if p.is_closed(BODIES[name]) else "max_grad"
        interpret.check(p.Program(BODIES[name], entry, "max", "float32", seed=1), steps=2)


@pytest.fixture(autouse=True)
def nothing_stays_traced():
    """A mutant is not to be hidden by a program traced before it, nor to live on in one traced during it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def addition(function):
    """The addition of the max dtype replaced by a function of f32 arrays."""

    def install(monkeypatch):
        def add(dtype, x, y):
            del dtype
            return _compat.to_max(function(_compat.from_max(x), _compat.from_max(y)))

        monkeypatch.setattr(_compat._MaxRules, "add", staticmethod(add))

    return install


def neutral_element(value):
    def install(monkeypatch):
        def zero(dtype):
            return _compat._MaxRules.full((), value, dtype)

        monkeypatch.setattr(_compat._MaxRules, "zero", staticmethod(zero))

    return install


def rolled_again(x, y):
    """A use pushes its amax onto the history that the last use left: a history entry for each microbatch."""
    if x.shape[-1] == 1:
        return jnp.maximum(x, y)
    return jnp.roll(x, -1, axis=-1).at[..., 0].set(y[..., 0])


def cast_at_every_use(monkeypatch):
    """The casts of two uses are two values, so that autodiff adds their cotangents in f32."""
    monkeypatch.setattr(_compat._MemoizedCast, "bind_with_trace", _compat._Cast.bind_with_trace)


def max_grad_forgotten(monkeypatch):
    monkeypatch.setattr(jaxfp8, "max_grad", lambda tree: tree)


def scale_from(choose):
    """The package takes its scale from other slots than the simulation."""
    return lambda monkeypatch: monkeypatch.setitem(interpret.ALGORITHMS, "max", choose)


def newest_amax_unrolled(monkeypatch):
    """The newest amax overwrites slot 0 of a history that keeps its oldest entry."""

    def mutant(quantizers, states, original=_gemms.read_states):
        runs = zip(original(quantizers, states), states, strict=True)
        return [run and dataclasses.replace(run, history=state.amax_history.at[0].set(0)) for run, state in runs]

    monkeypatch.setattr(_gemms, "read_states", mutant)


# Each with bodies one of which must show it.
MUTANTS = {
    "sum for max, called twice": (addition(jnp.add), ["called twice"]),
    "sum for max, scan": (addition(jnp.add), ["scan"]),
    "sum for max, carry": (addition(jnp.add), ["carry"]),
    "sum for max, scan in vmap": (addition(jnp.add), ["vmap"]),
    "the last use for max": (addition(lambda x, y: x), ["scan", "called twice"]),
    "the first use for max": (addition(lambda x, y: y), ["scan", "called twice"]),
    "roll per microbatch, called twice": (addition(rolled_again), ["called twice"]),
    "roll per microbatch, scan": (addition(rolled_again), ["scan"]),
    "neutral element -inf": (neutral_element(-jnp.inf), ["not taken", "some iterations"]),
    "neutral element 1": (neutral_element(1.0), ["not taken", "some iterations", "scan"]),
    "cast at every use": (cast_at_every_use, ["called twice"]),
    "max_grad forgotten": (max_grad_forgotten, ["carry"]),
    "scale from the newest slot": (scale_from(lambda history: history[0]), ["one use"]),
    "scale from the oldest slot": (scale_from(lambda history: history[1]), ["one use"]),
    "scale without the oldest slot": (scale_from(lambda history: jnp.delete(history, 1).max()), ["one use"]),
    "history not rolled": (newest_amax_unrolled, ["one use"]),
}


def test_the_package_itself_passes():
    compare(*BODIES)


@pytest.mark.parametrize("install, bodies", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_caught(install, bodies, monkeypatch):
    install(monkeypatch)
    with pytest.raises(AssertionError):
        compare(*bodies)
