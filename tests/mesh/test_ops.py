"""The ops by themselves on a mesh: any dimension may be cut, results are those of one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxfp8 import ops
from mesh import cases

FORMAT = oracle.E4M3
SPECS = [P(*axes) for axes in itertools.product((None, "data"), ("fsdp", None), (None, "tp"))]


def put(x, spec):
    return jax.device_put(x, NamedSharding(cases.mesh(), spec))


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def codes(*shape, seed=0):
    return oracle.quantize(values(*shape, seed=seed), np.float32(FORMAT.max / 8), FORMAT)[0]


def assert_all_bitwise(got, expected, what):
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        oracle.assert_bitwise(np.asarray(g), e, f"{what}: result {i}")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_tensor(spec):
    x, scale = values(4, 6, 10), np.float32(3)
    data, top = oracle.quantize(x, scale, FORMAT)
    cut = put(x, spec)
    oracle.assert_bitwise(np.asarray(jax.jit(ops.amax)(cut)), top, "amax")
    assert_all_bitwise(jax.jit(lambda x: ops.quantize(x, scale, FORMAT.dtype))(cut), (data, top), "quantize")
    both = jax.jit(lambda x: ops.quantize_transpose(x, scale, FORMAT.dtype))(cut)
    assert_all_bitwise(both, (data, data.swapaxes(1, 2), top), "quantize_transpose")
    out = jax.jit(lambda q: ops.dequantize(q, scale, np.float32))(put(data, spec))
    oracle.assert_bitwise(np.asarray(out), oracle.dequantize(data, scale, np.dtype(np.float32)), "dequantize")


@pytest.mark.parametrize("extra", ["", "bias", "accumulator", "bias accumulator"])
@pytest.mark.parametrize("spec", [P("data", "tp"), P("tp", "data"), P(None, ("data", "tp")), P(("data", "fsdp"), None)])
def test_product(spec, extra):
    """A bias and an accumulator are added once, whatever is cut: also where each device has a part of the sum."""
    m, n, k = 8, 4, 16
    a, b = codes(m, k, seed=1), codes(n, k, seed=2)
    scales = np.float32(2.0**-7), np.float32(0.3)
    options = {
        name: values(*shape, seed=3) for name, shape in (("bias", (n,)), ("accumulator", (m, n))) if name in extra
    }

    @jax.jit
    def product(a, b, options):
        return ops.scaled_matmul(a, b, *scales, out_dtype=jnp.float32, precise=True, **options)

    expected = oracle.scaled_matmul(a, b, *scales, **options)
    expected.check(product(put(a, spec), put(b, P(None, spec[1])), options), f"a {spec}")
    expected.check(product(put(a, spec), put(b, P("fsdp")), options), f"a {spec}, b by rows")


def test_members_with_scales_of_their_own():
    x, scales = values(4, 6, 10), np.float32([1, 2, 4, 0.5])
    quantize = jax.jit(jax.vmap(lambda x, scale: ops.quantize(x, scale, FORMAT.dtype)))
    data, tops = quantize(put(x, P("data", "tp")), put(scales, P("data")))
    for i in range(4):
        assert_all_bitwise((data[i], tops[i]), oracle.quantize(x[i], scales[i], FORMAT), f"member {i}")
