"""Fp8DotGeneral inside Flax's own layers: every product of a layer, its state bitwise the oracle's."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8

from .probes import FP8, OWG, RECIPE, assert_state

DENSE_GENERAL = {
    "last axis": ((4, 3, 6), {"features": 5}, lambda x: x.reshape(12, 6)),
    "several features": ((4, 3, 6), {"features": (2, 5)}, lambda x: x.reshape(12, 6)),
    "several axes": ((4, 3, 6), {"features": 5, "axis": (-2, -1)}, lambda x: x.reshape(4, 18)),
    "axes not last": ((4, 3, 6), {"features": 5, "axis": (0, 1)}, lambda x: x.reshape(12, 6).T),
}


@pytest.mark.parametrize("shape, options, to_matrix", DENSE_GENERAL.values(), ids=DENSE_GENERAL)
def test_dense_general(shape, options, to_matrix):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    layer = nn.DenseGeneral(use_bias=False, dot_general_cls=FP8, **options)
    y, variables = layer.init_with_output(jax.random.key(0), x)
    grad = rng.standard_normal(y.shape).astype(np.float32)
    gradient, dx = jax.jit(jax.grad(lambda v, x: jnp.vdot(layer.apply(v, x), grad), (0, 1)))(variables, x)

    matrix = to_matrix(x)
    kernel = np.asarray(variables["params"]["kernel"])
    first = oracle.LayerState.init(RECIPE.amax_history_len)
    expected = oracle.dense_step(matrix, kernel.reshape(matrix.shape[1], -1), grad.reshape(len(matrix), -1), first)
    expected.y.check(np.asarray(y).reshape(expected.y.exact.shape), "y")
    expected.wgrad.check(np.asarray(gradient["params"]["kernel"]).reshape(expected.wgrad.exact.shape), "wgrad")
    expected.dgrad.check(to_matrix(np.asarray(dx)), "dgrad")
    assert_state(gradient[OWG]["Fp8DotGeneral_0"], expected.state, "state")


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


def codes_of(value):
    return oracle.quantize(value, 1, oracle.E4M3)[0].astype(np.float64)


def attention_in_f64(params, x):
    """Self-attention of heads with FP8 projections at scale 1 and an exact softmax; the last projection's input too."""
    kernels = {name: codes_of(np.asarray(part["kernel"])) for name, part in params.items()}
    query, key, value = (np.einsum("btd,dhk->bthk", codes_of(x), kernels[name]) for name in ("query", "key", "value"))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=-1, keepdims=True), value)
    return mixed, kernels["out"]


def test_attention():
    """Four projections, a state each. The last one's input is known but for rounding: its amax within 1e-5."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 3, 8)).astype(np.float32)
    layer = nn.MultiHeadDotProductAttention(
        num_heads=2, use_bias=False, qkv_dot_general_cls=FP8, out_dot_general_cls=FP8
    )
    variables = layer.init(jax.random.key(0), x)
    grad = rng.standard_normal(x.shape).astype(np.float32)

    @jax.jit
    def step(variables):
        return jax.value_and_grad(lambda v: (lambda y: (jnp.vdot(y, grad), y))(layer.apply(v, x)), has_aux=True)(
            variables
        )

    (_, y), gradient = step(variables)
    states = gradient[OWG]
    assert set(states) == {"query", "key", "value", "out"}
    params = variables["params"]
    first = oracle.State.init(RECIPE.amax_history_len)
    for name in ("query", "key", "value"):
        state = states[name]["Fp8DotGeneral_0"]
        for operand, value in (("input", x), ("kernel", np.asarray(params[name]["kernel"]))):
            wanted = oracle.step(value, first, oracle.E4M3)[2]
            oracle.assert_bitwise(state[f"{operand}_amax_history"], wanted.amax_history, f"{name} {operand}")
        assert state["output_grad_amax_history"][0] > 0
    out = states["out"]["Fp8DotGeneral_0"]
    oracle.assert_bitwise(
        out["kernel_amax_history"],
        oracle.step(np.asarray(params["out"]["kernel"]), first, oracle.E4M3)[2].amax_history,
        "out kernel",
    )
    oracle.assert_bitwise(
        out["output_grad_amax_history"], oracle.step(grad, first, oracle.E5M2)[2].amax_history, "out output_grad"
    )
    mixed, out_kernel = attention_in_f64(params, x)
    np.testing.assert_allclose(out["input_amax_history"][0], np.abs(mixed).max(), rtol=1e-5)
    # `mixed` is known to `delta`: an element that near to a rounding boundary may have either neighbour's code.
    delta = 1e-5 * np.abs(mixed).max()
    low, high = (codes_of((mixed + shift).astype(np.float32)) for shift in (-delta, delta))
    projection = functools.partial(np.einsum, "bqhk,hkd->bqd")
    exact = projection(low, out_kernel)
    # The sums of 8 products in f32 round by less than 8 * 2**-24 of their magnitude.
    bound = projection(high - low, np.abs(out_kernel)) + 2.0**-20 * projection(np.abs(low), np.abs(out_kernel))
    assert (np.abs(np.asarray(y) - exact) <= bound).all()
    assert not (np.abs(projection(mixed, out_kernel) - exact) <= bound).all(), "an unquantized input would be seen"


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


def test_recipes_by_partial_and_by_function():
    x = np.ones((2, 3), np.float32)
    wanted = {"by partial": FP8, "by function": lambda **more: jaxfp8.Fp8DotGeneral(recipe=RECIPE, **more)}
    for name, cls in wanted.items():
        variables = nn.Dense(4, dot_general_cls=cls).init(jax.random.key(0), x)
        assert variables[OWG]["Fp8DotGeneral_0"]["input_amax_history"].shape == (RECIPE.amax_history_len,), name
    shared = functools.partial(FP8, name="fp8")
    assert "fp8" in nn.Dense(4, dot_general_cls=shared).init(jax.random.key(0), x)[OWG]
