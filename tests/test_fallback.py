"""Where JAX has no extended dtypes: one use of a state is right, more go through `jaxfp8.fork`, nothing is silent."""

import another_process
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8._jax import _compat

MATMUL = (((1,), (0,)), ((), ()))
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
KERNEL = np.full((8, 4), 0.5, np.float32)
XS = np.stack([np.full((2, 8), value, np.float32) for value in (1, 5, 3)])


@pytest.fixture
def no_max_dtype(monkeypatch, nothing_stays_traced):
    monkeypatch.setattr(_compat, "MAX_DTYPE", None)


def product(x, state):
    return jaxfp8.dot_general(x, KERNEL, MATMUL, recipe=RECIPE, state=state).sum()


def state_with_a_past():
    """Two steps: the history is not empty, so that sums show in its tail."""
    state = jax.grad(product, argnums=1)(XS[0] * 2, jaxfp8.init_state(RECIPE))
    return jax.grad(product, argnums=1)(XS[0] * 7, state)


def assert_max(next_state, old):
    np.testing.assert_array_equal(next_state.input.amax_history, np.float32([5, *old.input.amax_history[2:], 7]))
    oracle.assert_bitwise(next_state.input.scale, np.float32([7]) / np.float32(448), "scale")


def threaded(state):
    """The state in the carry of a scan."""

    def body(carry, x):
        state, total = carry
        state, used = jaxfp8.fork(state)
        return (state, total + product(x, used)), None

    return jax.lax.scan(body, (state, jnp.float32(0)), XS)[0][1]


@pytest.mark.parametrize("mode", ["fallback", "extended dtype"])
def test_fork_combines_by_max(mode, request):
    if mode == "fallback":
        request.getfixturevalue("no_max_dtype")
    old = state_with_a_past()
    assert_max(jax.grad(threaded)(old), old)
    assert_max(jax.jit(jax.grad(threaded))(old), old)

    def twice(state):
        first, second = jaxfp8.fork(state)
        return product(XS[1], first) + product(XS[2], second)

    assert_max(jax.grad(twice)(old), old)


def test_a_sum_is_noticed(no_max_dtype):
    old = state_with_a_past()
    summed = jax.grad(lambda state: product(XS[1], state) + product(XS[2], state))(old)
    assert summed.input.amax_history[0] == 8
    with pytest.raises(ValueError, match="update_state: .*max_grad"):
        jaxfp8.update_state(old, summed)


def test_the_cast_says_what_to_do_instead(no_max_dtype):
    state = jaxfp8.init_state(RECIPE)
    with pytest.raises(NotImplementedError, match="jaxfp8.fork"):
        jaxfp8.max_grad(state)
    with pytest.raises(NotImplementedError, match="jaxfp8.fork"):
        jaxfp8.grad(lambda state: product(XS[0], state))(state)


def test_import_without_the_private_names():
    """A JAX that moved what `_compat` wants: the package imports and a training step runs."""
    script = """
import jax, sys
import jax.numpy as jnp
from jax._src import earray
import flax
sys.modules["jax._src.earray"] = None
del jax._src.earray
import jaxfp8
from jaxfp8._jax import _compat
assert _compat.MAX_DTYPE is None
recipe = jaxfp8.DelayedScaling(amax_history_len=4)
step = jax.jit(jax.grad(lambda state: jaxfp8.dot_general(
    jnp.full((2, 3), 6.0), jnp.ones((3, 4)), (((1,), (0,)), ((), ())), recipe=recipe, state=state).sum()))
print(step(jaxfp8.init_state(recipe)).input.amax_history.tolist())
"""
    assert another_process.python("-c", script).stdout == "[6.0, 0.0, 0.0, 0.0]\n"
