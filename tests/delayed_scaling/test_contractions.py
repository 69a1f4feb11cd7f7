"""Contractions other than that of matrices, and operands of different dtypes."""

import jax
import numpy as np
import oracle
import pytest

import jaxfp8

from .cases import MATMUL, assert_state, assert_step, random_run, to_package, values

CONTRACTIONS = {
    "dense": ((5, 7), (7, 3), (((1,), (0,)), ((), ()))),
    "rank 3 x": ((7, 5, 3), (3, 41), (((2,), (0,)), ((), ()))),
    "rank 1 x": ((9,), (9, 4), (((0,), (0,)), ((), ()))),
    "vectors": ((217,), (217,), (((0,), (0,)), ((), ()))),
    "outer product": ((5,), (7,), (((), ()), ((), ()))),
    "kernel transposed": ((5, 7), (3, 7), (((1,), (1,)), ((), ()))),
    "x transposed": ((7, 5), (7, 3), (((0,), (0,)), ((), ()))),
    "two contracting dims": ((4, 3, 5), (3, 5, 6), (((1, 2), (0, 1)), ((), ()))),
    "contracting dims swapped": ((4, 3, 5), (5, 3, 6), (((1, 2), (1, 0)), ((), ()))),
    "batch": ((4, 5, 7), (4, 7, 3), (((2,), (1,)), ((0,), (0,)))),
    "two batch dims": ((2, 3, 5, 7), (2, 3, 7, 4), (((3,), (2,)), ((0, 1), (0, 1)))),
    "batch not first": ((5, 4, 7), (7, 3, 4), (((2,), (0,)), ((1,), (2,)))),
    "rank 5": ((2, 1, 3, 2, 5), (5, 2, 4), (((4, 3), (0, 1)), ((), ()))),
    "size 1": ((1, 1), (1, 1), (((1,), (0,)), ((), ()))),
}


def to_batched_matrix(value, batch, contract):
    """`[batch..., free..., contract...]` as `[g, rows, k]`."""
    free = [d for d in range(value.ndim) if d not in batch and d not in contract]
    moved = np.transpose(value, [*batch, *free, *contract])
    sizes = [int(np.prod([value.shape[d] for d in dims])) for dims in (batch, free, contract)]
    return moved.reshape(sizes)


def batched_product(a, b, a_inv, b_inv) -> oracle.Product:
    parts = [oracle.scaled_matmul(a[i], b[i], a_inv, b_inv) for i in range(len(a))]
    return oracle.Product(np.stack([p.exact for p in parts]), np.stack([p.bound for p in parts]))


@pytest.mark.parametrize("x_shape, kernel_shape, dims", CONTRACTIONS.values(), ids=CONTRACTIONS)
def test_any_contraction(x_shape, kernel_shape, dims):
    rng = np.random.default_rng(9)
    (x_contract, kernel_contract), (x_batch, kernel_batch) = dims
    x, kernel = values(rng, x_shape, 1.0, np.float32), values(rng, kernel_shape, 0.2, np.float32)
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)
    state = oracle.LayerState(*(oracle.State(np.float32([a, 0]), np.float32(1)) for a in (2.5, 0.4, 1e-3)))

    def run(x, kernel, state):
        return jaxfp8.dot_general(x, kernel, dims, recipe=recipe, state=state)

    y, vjp = jax.vjp(run, x, kernel, to_package(state))
    assert y.shape == jax.eval_shape(lambda *xs: jax.lax.dot_general(*xs, dims), x, kernel).shape
    grad = values(rng, y.shape, 1e-3, np.float32)
    dx, dkernel, got = vjp(grad)

    steps = [
        oracle.step(value, part, fmt)
        for value, part, fmt in (
            (x, state.input, oracle.E4M3),
            (kernel, state.kernel, oracle.E4M3),
            (grad, state.output_grad, oracle.E5M2),
        )
    ]
    assert_state(got, oracle.LayerState(*(s[2] for s in steps)), "next state")
    (x_codes, _, x_next), (kernel_codes, _, kernel_next), (grad_codes, _, grad_next) = steps
    x3 = to_batched_matrix(x_codes, x_batch, x_contract)
    kernel3 = to_batched_matrix(kernel_codes, kernel_batch, kernel_contract)
    grad3 = grad_codes.reshape(x3.shape[0], x3.shape[1], kernel3.shape[1])
    batched_product(x3, kernel3, x_next.scale, kernel_next.scale).check(np.asarray(y).reshape(grad3.shape), "y")
    dgrad = batched_product(grad3, kernel3.swapaxes(1, 2), grad_next.scale, kernel_next.scale)
    dgrad.check(to_batched_matrix(np.asarray(dx), x_batch, x_contract), "dgrad")
    wgrad = batched_product(grad3.swapaxes(1, 2), x3.swapaxes(1, 2), grad_next.scale, x_next.scale)
    wgrad.check(to_batched_matrix(np.asarray(dkernel), kernel_batch, kernel_contract), "wgrad")


def test_mixed_operand_dtypes():
    """x bf16 with an f32 kernel: no bf16 copy of the kernel, an f32 kernel gradient; result dtype by result_type."""
    x, kernel, grad = next(random_run(10, 1, np.float32))
    x = x.astype(oracle.BF16)
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)
    state = oracle.LayerState.init(2)
    for out_dtype in (None, oracle.BF16, oracle.F16):

        def run(x, kernel, state, out_dtype=out_dtype):
            return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state, preferred_element_type=out_dtype)

        y, vjp = jax.vjp(run, x, kernel, to_package(state))
        assert y.dtype == (out_dtype or np.float32)
        cotangent = grad.astype(y.dtype)
        got = (y, *vjp(cotangent))
        assert got[1].dtype == oracle.BF16 and got[2].dtype == np.float32
        expected = oracle.dense_step(x, kernel, cotangent, state, out_dtype=y.dtype, dgrad_dtype=oracle.BF16)
        assert_step(got, expected, f"{y.dtype}")
