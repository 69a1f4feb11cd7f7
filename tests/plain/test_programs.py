"""A training step as a program: exported and loaded elsewhere, cached on disk, run without jit, checked for leaks."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_same_bits
from jax import lax
from programs.known_amax import used_state
from transforms import cases

import jaxfp8

CUSTOM_CALLS = list(map(jax.export.DisabledSafetyCheck.custom_call, jaxfp8.ops.custom_call_targets()))


def loss_fn(kernel, state, x, grad):
    return jnp.sum(cases.product(x, kernel, state) * grad)


def gradient_step(kernel, state, x, grad):
    """(loss, next kernel, next state); the gradient of the state is the next state."""
    loss, (dkernel, next_state) = jax.value_and_grad(loss_fn, argnums=(0, 1))(kernel, state, x, grad)
    return loss, kernel - 0.1 * dkernel, next_state


def train_step(kernel, state, x, grad):
    """The same with the checks of `update_state`."""
    loss, kernel, next_state = gradient_step(kernel, state, x, grad)
    return loss, kernel, jaxfp8.update_state(state, next_state)


def arguments():
    x, kernel, grad = cases.operands()
    return kernel, cases.pack(used_state()), x, grad


def python(program, folder, **environment):
    """Runs a program in a fresh process; tests/ is importable there as it is here."""
    paths = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -------------------------------------------------------------------------------------------------------------- export

LOAD_AND_RUN = """
import jax, numpy as np, jaxfp8
step = jax.export.deserialize(bytearray(open("step.bin", "rb").read()))
with np.load("in.npz") as file:
    kernel, *leaves, x, grad = (file[name] for name in file.files)
state = jax.tree.unflatten(jax.tree.structure(jaxfp8.init_state(jaxfp8.DelayedScaling())), leaves)
STATE_IS_LEAVES
for _ in range(2):
    loss, kernel, state = step.call(kernel, state, x, grad)
np.savez("out.npz", *jax.tree.leaves((loss, kernel, state)))
"""


def of_leaves(step):
    """A step whose state is a list of arrays."""
    treedef = jax.tree.structure(jaxfp8.init_state(cases.RECIPE))

    def step_of_leaves(kernel, leaves, x, grad):
        loss, kernel, state = step(kernel, jax.tree.unflatten(treedef, leaves), x, grad)
        return loss, kernel, jax.tree.leaves(state)

    return step_of_leaves


EXPORTED = {
    "leaves": (of_leaves(gradient_step), "leaves"),
    "DotGeneralState": (gradient_step, "state"),
}


@pytest.mark.parametrize("implementation", ["ffi", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EXPORTED)
def test_export(name, implementation, tmp_path):
    """Saved as bytes, loaded where nothing but jaxfp8 is imported, two steps: the bits of two steps here."""
    if implementation == "ffi" and not jaxfp8.ops._ffi.has_cpu_kernels:
        pytest.skip("jaxfp8 was built without its CPU library")
    kernel, state, x, grad = arguments()
    function, which = EXPORTED[name]
    step, state = jax.jit(function), state if which == "state" else jax.tree.leaves(state)
    with jaxfp8.ops.implementation(implementation):
        exported = jax.export.export(step, disabled_checks=CUSTOM_CALLS)(kernel, state, x, grad)
        expected = step(*step(kernel, state, x, grad)[1:], x, grad)
    assert ("@jaxfp8_" in exported.mlir_module()) == (implementation == "ffi")
    (tmp_path / "step.bin").write_bytes(exported.serialize())
    np.savez(tmp_path / "in.npz", *jax.tree.leaves((kernel, state, x, grad)))
    python(LOAD_AND_RUN.replace("STATE_IS_LEAVES", "" if which == "state" else "state = leaves"), tmp_path)
    with np.load(tmp_path / "out.npz") as file:
        assert_same_bits([file[name] for name in file.files], jax.tree.leaves(expected), "exported")


def test_export_of_the_check():
    """The check in `update_state` is an effect, which JAX does not serialize: export the gradient, update outside."""
    exported = jax.export.export(jax.jit(train_step), disabled_checks=CUSTOM_CALLS)(*arguments())
    with pytest.raises((ValueError, NotImplementedError)):
        exported.serialize()


# --------------------------------------------------------------------------------------------------- compilation cache

COMPILE_AND_RUN = """
from collections import Counter
import jax, numpy as np
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
from plain import test_programs
out = jax.jit(test_programs.train_step)(*test_programs.arguments())
np.savez("out.npz", *jax.tree.leaves(out))
print(events["cache_misses"], events["cache_hits"])
"""


def test_persistent_compilation_cache(tmp_path):
    """A second process compiles nothing and gets the same bits: programs with our custom calls come back from disk."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    counts, results = [], []
    for _ in range(2):
        counts.append([int(n) for n in python(COMPILE_AND_RUN, tmp_path, **cache).split()])
        with np.load(tmp_path / "out.npz") as file:
            results.append([file[name] for name in file.files])
    (cold_misses, cold_hits), (warm_misses, warm_hits) = counts
    assert cold_misses > 0 and warm_misses == 0 and warm_hits == cold_misses + cold_hits
    assert_same_bits(results[1], results[0], "from the cache")
    assert_same_bits(results[1], jax.tree.leaves(jax.jit(train_step)(*arguments())), "in this process")


# ------------------------------------------------------------------------------------------------------------ debugging


def uses_of_one_state(kernel, state, x, grad):
    """A loss in which state goes through a scan, a branch, a rematerialized function and a batch."""

    def body(total, scale):
        return total + loss_fn(kernel, state, scale * x, grad), None

    total, _ = lax.scan(body, jnp.float32(0), jnp.float32([1, 2]))
    total += jax.checkpoint(loss_fn)(kernel, state, 3 * x, grad)
    total += lax.cond(x[0, 0] > -100, lambda: loss_fn(kernel, state, 4 * x, grad), lambda: jnp.float32(0))
    return total + jnp.sum(jax.vmap(lambda x, grad: loss_fn(kernel, state, x[None], grad[None]))(5 * x, grad))


SCALES = np.float32([1, 2, 3, 4, 5])
GRADIENT = jaxfp8.value_and_grad(uses_of_one_state, argnums=(0, 1))


def assert_gradient(got, what):
    kernel, _, x, grad = arguments()
    stacked = SCALES[:, None, None] * x
    expected = cases.one_product(stacked, kernel, np.stack([grad] * len(SCALES)), used_state())
    dkernel, state = got[1]
    cases.assert_state(state, expected.state, what)
    expected.wgrad.check(dkernel, what)


def test_disable_jit():
    """Every loop and every branch in Python, every operation by itself."""
    with jax.disable_jit():
        got = GRADIENT(*arguments())
    assert_gradient(got, "disable_jit")


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_checking_leaks(jit):
    """The memo that lets all uses of a state meet holds no tracer alive."""
    with jax.checking_leaks():
        got = (jax.jit(GRADIENT) if jit else GRADIENT)(*arguments())
    assert_gradient(got, "checking_leaks")


def test_debug_nans():
    """No NaN on the way of good data."""
    with jax.debug_nans(True), jax.debug_infs(True):
        got = jax.jit(GRADIENT)(*arguments())
    assert_gradient(got, "debug_nans")


@pytest.mark.parametrize("bad", [False, True], ids=["good data", "bad data"])
def test_debug_nans_eagerly(bad):
    """Good data is silent; bad data raises JAX's error, under jit as well, where JAX then goes step by step."""
    kernel, state, x, grad = arguments()
    x[0, 0] = np.nan if bad else 1
    with jax.debug_nans(True):
        if not bad:
            GRADIENT(kernel, state, x, grad)
            return
        with pytest.raises(FloatingPointError):
            jax.jit(GRADIENT)(kernel, state, x, grad)


def test_ahead_of_time():
    """Lowered and compiled from shapes alone."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments())
    compiled = jax.jit(GRADIENT).lower(*shapes).compile()
    assert_gradient(compiled(*arguments()), "compiled")
