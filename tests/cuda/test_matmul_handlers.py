"""scaled_matmul as on a GPU, over the emulated handler: padding, terms that are added, groups and their scales."""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops
from jaxfp8.ops import _ffi, _scaled_matmul
from jaxfp8.ops._primitive import tensor_op

F32 = np.dtype(np.float32)
SCALE = np.float32(0.3)

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture(autouse=True)
def over_handlers(monkeypatch):
    monkeypatch.setattr(_ffi, "target_name", "emulated_cuda_{}".format)
    run = _scaled_matmul._grouped(_scaled_matmul._cublaslt)
    op = tensor_op("scaled_matmul", cpu=run, cuda=run, **_scaled_matmul._RULES)
    monkeypatch.setattr(_scaled_matmul, "_scaled_matmul", op)


def codes(*shape, fmt=oracle.E4M3):
    return oracle.quantize(np.random.default_rng(len(shape)).standard_normal(shape), np.float32(8), fmt)[0]


def product(*operands, **options):
    return ops.scaled_matmul(*operands, out_dtype=F32, **options)


@pytest.mark.parametrize("m, n, k", [(16, 32, 48), (5, 7, 33)])
@pytest.mark.parametrize("bias_dtype", [None, oracle.BF16, F32], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_products(m, n, k, bias_dtype, accumulate):
    """Sizes that are padded; terms that cuBLASLt adds, and others."""
    a, b = codes(m, k), codes(n, k, fmt=oracle.E5M2)
    extras = {"bias": np.arange(n).astype(bias_dtype)} if bias_dtype else {}
    extras |= {"accumulator": np.arange(m * n, dtype=F32).reshape(m, n)} if accumulate else {}
    got = jax.jit(product)(a, b, SCALE, np.float32(2), **extras)
    oracle.scaled_matmul(a, b, SCALE, 2, **extras).check(got)


# By name: the axes of vmap, how many dimensions of a batch each product has, and the scales of the custom call.
GROUPS = {
    "shared": ((0, 0, None, None), 0, ["1xf32", "1xf32"]),
    "shared, batches": ((0, 0, None, None), 1, ["1xf32", "1xf32"]),
    "own": ((0, 0, 0, 0), 0, ["3x4xf32", "3x4xf32"]),
    "of a alone": ((0, 0, 0, None), 0, ["3x4xf32", "3x4xf32"]),
    "own, batches": ((0, 0, 0, 0), 1, ["3x4xf32", "3x4xf32"]),
}


@pytest.mark.parametrize("fmt", [oracle.E4M3, oracle.E5M2], ids=["cuBLASLt", "two e5m2"])
@pytest.mark.parametrize("axes, batch, scales", GROUPS.values(), ids=GROUPS)
def test_groups(axes, batch, scales, fmt):
    """One custom call, whose scales lie 16 bytes apart where there are several, for as many groups as share them."""
    a, b = (codes(3, *[2] * batch, rows, 33, fmt=fmt) for rows in (5, 7))
    a_scale, b_scale = (np.float32([0.5, 2, 3]) * x if d == 0 else SCALE for x, d in zip((1, 7), axes[2:], strict=True))
    run = jax.jit(jax.vmap(lambda *operands: product(*operands, batch=batch), axes))
    got = np.asarray(run(a, b, a_scale, b_scale))
    calls = [line for line in run.lower(a, b, a_scale, b_scale).as_text().splitlines() if "@emulated_cuda" in line]
    if fmt is oracle.E4M3:
        (call,) = calls
        operands = call[call.rindex(": (") :].split(" -> ")[0]
        assert [part.split(">")[0] for part in operands.split("tensor<")[3:]] == scales
    for i in np.ndindex(got.shape[:-2]):
        own = (x[i[0]] if np.ndim(x) else x for x in (a_scale, b_scale))
        oracle.scaled_matmul(a[i], b[i], *own).check(got[i], f"group {i}")


def test_groups_of_groups():
    """Scales of an inner vmap that an outer one shares: a call of cuBLASLt for each of them."""
    a, b, scale = codes(2, 3, 16, 32), codes(2, 3, 48, 32), np.float32([0.5, 2, 3])
    inner = jax.vmap(product, (0, 0, 0, None))
    got = np.asarray(jax.vmap(inner, (0, 0, None, None))(a, b, scale, SCALE))
    for i in np.ndindex(2, 3):
        oracle.scaled_matmul(a[i], b[i], scale[i[1]], SCALE).check(got[i], f"group {i}")
