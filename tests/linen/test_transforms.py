"""State in `nn.switch` and `nn.while_loop`; programs of other transformations are in `programs/linen.py`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from programs.known_amax import HISTORY, N, operands

from .probes import FP8, OWG, assert_state


class Switch(nn.Module):
    """One of two layers; an index beyond them runs neither."""

    @nn.compact
    def __call__(self, index, x):
        layers = [nn.Dense(N, use_bias=False, dot_general_cls=FP8, name=f"dense_{i}") for i in range(2)]
        if self.is_initializing():
            return sum(layer(x) for layer in layers)

        def run(i):
            return lambda module, x: layers[i](x)

        return nn.switch(index, [run(0), run(1), lambda module, x: jnp.zeros((len(x), N))], self, x)


def test_switch_touches_what_runs():
    (x, *_), _, (grad, *_) = operands(0)
    module = Switch()
    variables = module.init(jax.random.key(0), 0, x)

    @jax.jit
    def gradients(index):
        return jax.grad(lambda variables: jnp.vdot(module.apply(variables, index, x), grad))(variables)[OWG]

    for index in range(3):
        got = gradients(index)
        for i in range(2):
            kernel = np.asarray(variables["params"][f"dense_{i}"]["kernel"])
            state = got[f"dense_{i}"]["Fp8DotGeneral_0"]
            if i == index:
                first = oracle.LayerState.init(HISTORY)
                assert_state(state, oracle.dense_step(x, kernel, grad, first).state, f"branch {i}")
            else:
                assert not any(np.any(leaf) for leaf in jax.tree.leaves(state)), "zero: untouched"
