"""Products whose tensors are all known, their counters by the oracle, and the state that holds counters.

The products are of x `(uses, M, K)`, kernel and grad: `use` is `vdot(layer(x), grad)`, so that grad is, to the bit,
what arrives at the output. Sizes are powers of two, so fractions are exact; of others XLA multiplies by a rounded
1 / size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from programs.known_amax import OPERANDS, merged

import jaxfp8
from jaxfp8.inspect import with_counters

M, K, N, H = 16, 32, 8, 3
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def tensors(seed=0, uses=1, sizes=1.0):
    """x, kernel and grad: in each some elements saturate at scale 1 or become zero, in other numbers in every use."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-30, 18, shape)).astype(np.float32)

    return draw(uses, M, K) * np.float32(sizes), draw(K, N), draw(uses, M, N)


class Expected:
    """The counters of one product over its steps."""

    def __init__(self):
        self.state = oracle.LayerState.init(H)
        self.counters = dict.fromkeys(OPERANDS, np.zeros(3, np.float32))

    def step(self, uses):
        """A step in which the product ran on each `(x, kernel, grad)` of `uses`."""
        steps = [oracle.dense_step(*of, self.state) for of in uses]
        for i, name in enumerate(OPERANDS):
            fmt = oracle.E5M2 if name == "output_grad" else oracle.E4M3
            fractions = [oracle.counts(of[i], steps[0].scales[name], fmt) / np.float32(of[i].size) for of in uses]
            after = getattr(steps[0].state, name).scale
            is_same = np.float32(after).tobytes() == np.float32(getattr(self.state, name).scale).tobytes()
            unchanged = self.counters[name][2] + 1 if is_same else 0
            self.counters[name] = np.float32([*np.max(fractions, axis=0), unchanged])
        self.state = merged([step.state for step in steps])
        return self.counters


def assert_counters(got, expected, what, row=()):
    """`got(operand)` is the counters of that operand."""
    for name in OPERANDS:
        oracle.assert_bitwise(np.asarray(got(name))[row], expected[name], f"{what}: {name}")


def use(kernel, state, x, grad):
    return jnp.vdot(jaxfp8.dot_general(x, kernel, ROWS_BY_COLUMNS, recipe=RECIPE, state=state), grad)


def of_state(state):
    return lambda name: getattr(state, name).counters


def counted_state():
    return with_counters(jaxfp8.init_state(RECIPE))


def flat(tree):
    return {tuple(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def structure(tree):
    return jax.tree.structure(tree)
