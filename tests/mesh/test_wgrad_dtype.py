"""`wgrad_dtype` on eight devices: each rounds its part of a kernel's gradient, and the
sum is converted to the kernel's dtype.

The jnp reference rounds the sum alone. XLA's CPU compiler adds bfloat16 in float32;
`tests/aot/test_sharded.py` has what eight GPUs send.
"""

import re

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import BF16, F32

import jaxfp8
from jaxfp8.ops import _ffi
from mesh import cases

DEVICES, ROWS, WIDTH, FEATURES = 8, 256, 16, 8
RECIPE = jaxfp8.StaticScaling(448.0, 448.0, 57344.0, wgrad_dtype=BF16)
CUT = P("devices")

# Small integers, which FP8 holds: parts and their sum are exact in float32.
RNG = np.random.default_rng(0)
X, GRAD = (
    RNG.integers(0, 8, (ROWS, columns)).astype(BF16) for columns in (WIDTH, FEATURES)
)
KERNEL = RNG.integers(-8, 8, (WIDTH, FEATURES)).astype(F32)


def gradient(kernel, x, grad):
    def product(kernel):
        return jaxfp8.dot_general(
            x, kernel, cases.MATMUL, recipe=RECIPE, preferred_element_type=BF16
        )

    return jax.vjp(product, kernel)[1](grad)[0]


def expected():
    parts = [
        x.astype(F32).T @ grad.astype(F32)
        for x, grad in zip(np.split(X, DEVICES), np.split(GRAD, DEVICES), strict=True)
    ]
    rounded = [part.astype(BF16).astype(F32) for part in parts]
    return sum(rounded).astype(BF16).astype(F32)


def mesh(kind):
    return cases.mesh(kind, (DEVICES,), ("devices",))


@pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="needs the CPU library")
@pytest.mark.parametrize("spec", [P(), CUT], ids=["data parallel", "FSDP"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_jit(kind, spec):
    devices = mesh(kind)
    with jax.set_mesh(devices):
        arrays = [
            jax.device_put(array, NamedSharding(devices, spec))
            for array, spec in ((KERNEL, spec), (X, CUT), (GRAD, CUT))
        ]
        got = jax.jit(gradient, out_shardings=NamedSharding(devices, spec))(*arrays)
    oracle.assert_bitwise(got, expected(), kind)


def test_shard_map():
    """The sum over the devices of a replicated kernel's gradient."""
    step = jax.jit(
        jax.shard_map(
            gradient, mesh=mesh("auto"), in_specs=(P(), CUT, CUT), out_specs=P()
        )
    )
    text = step.lower(KERNEL, X, GRAD).as_text()
    sums = re.findall(r"all_reduce.*?\) -> tensor<([^>]*)>", text, re.DOTALL)
    assert sums == [f"{WIDTH}x{FEATURES}xbf16"]
    oracle.assert_bitwise(step(KERNEL, X, GRAD), expected(), "shard_map")
