"""A training step as a program: cached on disk, run without jit, checked for leaks."""

import another_process
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_same_bits

import jaxfp8
from programs import cases, functional
from programs.known_amax import check, used_state


def loss_fn(kernel, state, x, grad):
    return jnp.sum(cases.product(x, kernel, state) * grad)


def gradient_step(kernel, state, x, grad):
    """(loss, next kernel, next state); the gradient of the state is the next state."""
    loss, (dkernel, next_state) = jax.value_and_grad(loss_fn, argnums=(0, 1))(
        kernel, state, x, grad
    )
    return loss, kernel - 0.1 * dkernel, next_state


def train_step(kernel, state, x, grad):
    """The same with the checks of `update_state`."""
    loss, kernel, next_state = gradient_step(kernel, state, x, grad)
    return loss, kernel, jaxfp8.update_state(state, next_state)


def arguments():
    x, kernel, grad = cases.operands()
    return kernel, cases.pack(used_state()), x, grad


# -------------------------------------------------------------------- compilation cache

COMPILE_AND_RUN = """
from collections import Counter
import jax, numpy as np
events = Counter()
jax.monitoring.register_event_listener(
    lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
from programs import test_compiled_step
out = jax.jit(test_compiled_step.train_step)(*test_compiled_step.arguments())
np.savez("out.npz", *jax.tree.leaves(out))
print(events["cache_misses"], events["cache_hits"])
"""


def test_persistent_compilation_cache(tmp_path):
    """A second process compiles nothing and gets the same bits: programs with our
    custom calls come back from disk.
    """
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    counts, results = [], []
    for _ in range(2):
        done = another_process.python(
            "-c",
            COMPILE_AND_RUN,
            cwd=tmp_path,
            PYTHONPATH=another_process.PATH,
            **cache,
        )
        counts.append([int(n) for n in done.stdout.split()])
        with np.load(tmp_path / "out.npz") as file:
            results.append([file[name] for name in file.files])
    (cold_misses, cold_hits), (warm_misses, warm_hits) = counts
    assert cold_misses > 0 and warm_misses == 0 and warm_hits == cold_misses + cold_hits
    assert_same_bits(results[1], results[0], "from the cache")
    assert_same_bits(
        results[1],
        jax.tree.leaves(jax.jit(train_step)(*arguments())),
        "in this process",
    )


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["branches in scan", "remat with arguments"])
def test_checking_leaks(name, jit):
    """The memo that lets all uses of a state meet holds no tracer alive, and no NaN is
    on the way of good data.
    """
    with jax.checking_leaks(), jax.debug_nans(True):
        check(functional.Functional, functional.PROGRAMS[name], jit=jit)


@pytest.mark.parametrize("name", ["branches in scan", "remat with arguments"])
def test_disable_jit(name):
    """Every loop and every branch in Python, every operation by itself."""
    with jax.disable_jit():
        check(functional.Functional, functional.PROGRAMS[name])
