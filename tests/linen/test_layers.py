"""Fp8DotGeneral inside Flax's own layers: every product of a layer, its state bitwise the oracle's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle

from .probes import FP8, OWG, RECIPE, assert_state


def test_dense_general_with_batch_dims():
    """A kernel for each member of a batch dimension: one state, over all of them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 4, 6)).astype(np.float32)
    layer = nn.DenseGeneral(5, axis=-1, batch_dims=0, use_bias=False, dot_general_cls=FP8)
    y, variables = layer.init_with_output(jax.random.key(0), x)
    assert variables["params"]["kernel"].shape == (3, 6, 5)
    grad = rng.standard_normal(y.shape).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad)))(variables)
    kernel = np.asarray(variables["params"]["kernel"])
    first = oracle.State.init(RECIPE.amax_history_len)
    steps = [
        oracle.step(value, first, fmt) for value, fmt in ((x, oracle.E4M3), (kernel, oracle.E4M3), (grad, oracle.E5M2))
    ]
    assert_state(gradient[OWG]["Fp8DotGeneral_0"], oracle.LayerState(*(s[2] for s in steps)), "state")
    for i in range(3):
        oracle.scaled_matmul(steps[0][0][i], steps[1][0][i].T, 1, 1).check(y[i], f"y {i}")
        wanted = oracle.scaled_matmul(steps[0][0][i].T, steps[2][0][i].T, 1, 1)
        wanted.check(gradient["params"]["kernel"][i], f"wgrad {i}")


def test_attention_under_scan_and_remat():
    """A stack of blocks by nn.scan of nn.remat: row i of the state is of block i, also through plain jax.grad."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            attention = nn.MultiHeadDotProductAttention(
                num_heads=2, qkv_dot_general_cls=FP8, out_dot_general_cls=FP8, name="attention"
            )
            return x + attention(x), None

    stack = nn.scan(
        nn.remat(Block, prevent_cse=False), variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True}, length=2
    )()
    x = np.random.default_rng(3).standard_normal((2, 3, 8)).astype(np.float32)
    variables = jax.jit(stack.init)(jax.random.key(0), x, None)
    got = jax.jit(jax.grad(lambda v: jnp.sum(stack.apply(v, x, None)[0] ** 2)))(variables)[OWG]["attention"]
    assert set(got) == {"query", "key", "value", "out"}
    for name, state in got.items():
        state = state["Fp8DotGeneral_0"]
        kernels = np.asarray(variables["params"]["attention"][name]["kernel"])
        for row in range(2):
            wanted = np.float32([oracle.amax(kernels[row]), 0, 0, 0])
            oracle.assert_bitwise(state["kernel_amax_history"][row], wanted, f"{name} kernel of block {row}")
        for operand in ("input", "output_grad"):
            history = np.asarray(state[f"{operand}_amax_history"])
            assert (history[:, 0] > 0).all() and history[0, 0] != history[1, 0] and not history[:, 1:].any()
        if name != "out":
            assert state["input_amax_history"][0, 0] == oracle.amax(x)
