"""What each op puts on the stream, by the emulated handlers: kernels, memsets,
copies.
"""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops
from jaxfp8._jax import _compat
from jaxfp8.inspect import _machine, _op_calls
from jaxfp8.ops import _ffi

from . import emulated

ONE_KERNEL = dict.fromkeys(_op_calls.OPS, (1, 0, 0))
# An amax is a maximum into zeros, where none is raised in place; row-wise blocks are in
# the last test.
LAUNCHES = ONE_KERNEL | dict.fromkeys(
    (
        "amax",
        "quantize",
        "quantize_transpose",
        "quantize_activation",
        "quantize_activation_grad",
        "quantize_norm",
        "quantize_pair",
    ),
    (1, 1, 0),
)
# the amaxes of a reading, which few products take, are a call of their own
LAUNCHES["read_rows"] = (2, 0, 0)


@pytest.mark.parametrize(
    "op",
    [
        op
        for op in LAUNCHES
        if op not in ("scaled_matmul", "block_scaled_matmul", *_ffi._CPU_ONLY)
    ],
)
def test_launches(op, handlers, over_handlers):
    function, arguments = _op_calls.call(op, _machine.EXAMPLE)
    arguments = [np.ones(x.shape, x.dtype) for x in arguments]
    compiled = jax.jit(function).lower(*arguments).compile()
    emulated.launches(handlers)
    jax.block_until_ready(compiled(*arguments))
    assert emulated.launches(handlers) == LAUNCHES[op]


@pytest.mark.parametrize("op", [ops.quantize, ops.quantize_transpose])
def test_an_amax_is_raised_in_place(op, handlers, over_handlers):
    """One that another op made, as delayed_scales makes zeros: nothing but two
    kernels.
    """
    x, one = np.ones((3, 5), oracle.BF16), np.ones(1, np.float32)

    @jax.jit
    def step(x, scale):
        ((*_, zero),) = ops.delayed_scales([scale], [scale], fp8_max=[448.0])
        return op(x, scale, oracle.E4M3.dtype, amax=zero)

    jax.block_until_ready(step(x, one))
    emulated.launches(handlers)
    jax.block_until_ready(step(x, one))
    assert emulated.launches(handlers) == (2, 0, 0)


@pytest.mark.parametrize("m, launches", [(40, (2, 1, 0)), (0, (0, 0, 0))])
def test_blocks_of_whole_rows(m, launches, handlers, over_handlers):
    """Two kernels, after a memset; nothing without elements."""
    run = jax.jit(
        lambda x: ops.quantize_blocks_transpose(x, oracle.E4M3.dtype, block=(1, None))
    )
    x = np.ones((m, 50), oracle.BF16)
    jax.block_until_ready(run(x))
    emulated.launches(handlers)
    jax.block_until_ready(run(x))
    assert emulated.launches(handlers) == launches


def test_halves_that_are_read_apart(over_handlers, monkeypatch):
    """A product each, as from JAX 0.12 on."""
    monkeypatch.setattr(_compat, "gives_parts_in_place", True)
    rng, one = np.random.default_rng(0), np.ones(1, np.float32)
    a, b = (
        rng.integers(-8, 9, shape).astype(oracle.E4M3.dtype)
        for shape in ((16, 48), (2, 32, 48))
    )

    @jax.jit
    def multiply(a, b):
        return ops.scaled_matmul(
            a, b, one, one, out_dtype=np.float32, batch=0, by_halves=True
        )

    compiled = multiply.lower(a, b).compile()
    assert compiled.as_text().count('"emulated_cuda_scaled_matmul"') == 2
    exact = np.einsum("mk,pnk->mpn", *(x.astype(np.float32) for x in (a, b)))
    np.testing.assert_array_equal(compiled(a, b), exact)
