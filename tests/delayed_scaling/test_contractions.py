"""Contractions other than that of matrices, and operands of different dtypes."""

import jax
import numpy as np
import oracle

import jaxfp8

from .cases import MATMUL, assert_step, random_run, to_package


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
