"""A training step as a program on disk."""

import another_process
import jax
import jax.numpy as jnp
import numpy as np
from equality import assert_same_bits

import jaxfp8
from programs import cases
from programs.known_amax import used_state


def loss_fn(kernel, state, x, grad):
    return jnp.sum(cases.product(x, kernel, state) * grad)


def train_step(kernel, state, x, grad):
    """(loss, next kernel, next state)."""
    loss, (dkernel, next_state) = jax.value_and_grad(loss_fn, argnums=(0, 1))(
        kernel, state, x, grad
    )
    return loss, kernel - 0.1 * dkernel, jaxfp8.update_state(state, next_state)


def arguments():
    x, kernel, grad = cases.operands()
    return kernel, cases.pack(used_state()), x, grad


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
    expected = jax.tree.leaves(jax.jit(train_step)(*arguments()))
    for is_warm in (False, True):
        done = another_process.python(
            "-c",
            COMPILE_AND_RUN,
            cwd=tmp_path,
            PYTHONPATH=another_process.PATH,
            **cache,
        )
        misses, hits = map(int, done.stdout.split())
        assert (misses == 0) == is_warm and (hits > 0 or not is_warm)
        with np.load(tmp_path / "out.npz") as file:
            results = [file[name] for name in file.files]
        assert_same_bits(results, expected, "in another process")
