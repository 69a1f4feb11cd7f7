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


def test_while_loop_runs_forward():
    """A while_loop has no reverse mode; its forward reads the state it is given."""

    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(x.shape[-1], use_bias=False, dot_general_cls=FP8, name="dense")
            if self.is_initializing():
                return layer(x)

            def more(module, carry):
                return carry[0] < 3

            def body(module, carry):
                return carry[0] + 1, layer(carry[1])

            return nn.while_loop(more, body, self, (0, x), broadcast_variables=True)[1]

    (x, *_), _, _ = operands(0)
    module = Loop()
    variables = module.init(jax.random.key(0), x)
    variables[OWG]["dense"]["Fp8DotGeneral_0"]["input_amax_history"] = jnp.float32([50, 0, 0, 0])
    layer = nn.Dense(x.shape[-1], use_bias=False, dot_general_cls=FP8)
    alone = {key: value["dense"] for key, value in variables.items()}
    expected = x
    for _ in range(3):
        expected = layer.apply(alone, expected)
    oracle.assert_bitwise(module.apply(variables, x), expected, "three iterations")
