"""The elementwise ops under jit, vmap, remat and donation: the same bytes as the plain call."""

import concurrent.futures
import contextvars

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.layout import Format, Layout

from jaxfp8 import ops

from . import cases

FORMATS = pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
X = cases.random_values((3, 6, 10), oracle.BF16, 1)
S = np.float32([0.5, 3.3, 2.0**-8])


def forms(fmt):
    """op -> (function of (x, scale), what the oracle gives for one member), both returning tuples of outputs."""
    dtype = cases.dtype_of(fmt)

    def dequantize(x, scale):  # reads the low bytes of x as codes
        codes = jax.lax.bitcast_convert_type(x, jnp.uint8)[..., 0].view(dtype)
        return (ops.dequantize(codes, scale, jnp.float32),)

    return {
        "amax": (lambda x, s: (ops.amax(x),), lambda x, s: (oracle.amax(x),)),
        "quantize": (lambda x, s: ops.quantize(x, s, dtype), lambda x, s: oracle.quantize(x, s, fmt)),
        "quantize_transpose": (
            lambda x, s: ops.quantize_transpose(x, s, dtype),
            lambda x, s: oracle.quantize_transpose(x, s, fmt),
        ),
        "dequantize": (
            dequantize,
            lambda x, s: (oracle.dequantize(oracle.bits(x).astype(np.uint8).view(fmt.dtype), s, np.float32),),
        ),
    }


OPS = pytest.mark.parametrize("op", ["quantize", "quantize_transpose", "dequantize", "amax"])


def assert_members(got, members, expected, what):
    """`got[j][i]` is output j of member i."""
    for i, (x, scale) in enumerate(members):
        for j, value in enumerate(expected(x, scale)):
            cases.assert_bitwise(np.asarray(got[j])[i], value, f"{what}: member {i}, output {j}")


@pytest.mark.varied
@OPS
@FORMATS
def test_eager_equals_jit_equals_donated(implementation, op, fmt):
    function, expected = forms(fmt)[op]
    x, scale = X[0], S[1]
    runs = {"eager": function, "jit": jax.jit(function), "remat": jax.checkpoint(function)}
    for name, run in runs.items():
        assert_members([jnp.asarray(out)[None] for out in run(x, scale)], [(x, scale)], expected, f"{op} {name}")
    donated = jax.jit(lambda x, s: (function(x, s), x + jnp.ones_like(x)), donate_argnums=0)
    out, _ = donated(jnp.asarray(x), scale)
    assert_members([value[None] for value in out], [(x, scale)], expected, f"{op} donated")


@pytest.mark.varied
@OPS
@FORMATS
def test_vmap(implementation, op, fmt):
    function, expected = forms(fmt)[op]
    every = range(3)
    table = {
        "x": ((0, None), (X, S[1]), [(X[i], S[1]) for i in every]),
        "scale": ((None, 0), (X[0], S), [(X[0], S[i]) for i in every]),
        "both": ((0, 0), (X, S), [(X[i], S[i]) for i in every]),
        "axis 1": ((1, 0), (np.moveaxis(X, 0, 1).copy(), S), [(X[i], S[i]) for i in every]),
        "axis -1": ((-1, None), (np.moveaxis(X, 0, -1).copy(), S[2]), [(X[i], S[2]) for i in every]),
        "scale f32[1]": ((0, 0), (X, S[:, None]), [(X[i], S[i]) for i in every]),
    }
    for name, (axes, arguments, members) in table.items():
        if op == "amax" and name == "scale":
            continue  # nothing of it is batched
        for run in (jax.vmap(function, axes), jax.jit(jax.vmap(function, axes))):
            assert_members(run(*arguments), members, expected, f"{op} vmap {name}")


@pytest.mark.varied
@OPS
@FORMATS
def test_nested_vmap(implementation, op, fmt):
    """Outer and inner batches over x, over scale, over one each; groups must not mix."""
    function, expected = forms(fmt)[op]
    x = cases.random_values((2, 3, 6, 10), oracle.BF16, 2)
    scale = np.float32([[1, 0.1, 7], [2.0**-7, 3, 90]])
    pairs = [(i, j) for i in range(2) for j in range(3)]
    table = {
        "both, both": (((0, 0), (0, 0)), (x, scale), [(x[i, j], scale[i, j]) for i, j in pairs]),
        "x, scale": (((0, None), (None, 0)), (x[:, 0], scale[0]), [(x[i, 0], scale[0, j]) for i, j in pairs]),
        "scale, x": (((None, 0), (0, None)), (x[0], scale[:, 0]), [(x[0, j], scale[i, 0]) for i, j in pairs]),
        "x and scale, x": (((0, 0), (0, None)), (x, scale[:, 0]), [(x[i, j], scale[i, 0]) for i, j in pairs]),
        "x, x and scale": (((0, None), (0, 0)), (x, scale[0]), [(x[i, j], scale[0, j]) for i, j in pairs]),
    }
    for name, ((outer, inner), arguments, members) in table.items():
        got = jax.vmap(jax.vmap(function, inner), outer)(*arguments)
        flat = [np.asarray(out).reshape(6, *out.shape[2:]) for out in got]
        assert_members(flat, members, expected, f"{op} nested vmap {name}")


@FORMATS
def test_handlers_that_run_at_once(implementation, fmt):
    """Independent calls in one program, and that program in four threads: right, and nobody waits for ever.

    A handler that waits for the pool it runs in can deadlock as soon as two of them run; 60 s are a thousand times what
    this needs.
    """
    x = cases.random_values((6, 256, 520), oracle.BF16, 7)

    @jax.jit
    def program(x):
        return [ops.quantize_transpose(x[i], S[i % 3], cases.dtype_of(fmt)) for i in range(len(x))]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        context = contextvars.copy_context
        futures = [pool.submit(context().run, lambda: jax.block_until_ready(program(x))) for _ in range(8)]
        for future in futures:
            for i, got in enumerate(future.result(timeout=60)):
                cases.assert_codes("quantize_transpose", got, x[i], S[i % 3], fmt, "in a thread")


@pytest.mark.varied
@OPS
@FORMATS
def test_column_major_operands(implementation, op, fmt):
    """An argument that lies transposed in memory: the canonical form is row-major, XLA has to copy."""
    function, expected = forms(fmt)[op]
    device = jax.devices("gpu" if implementation == "cuda" else "cpu")[0]
    form = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(device))
    x = jax.device_put(X[0], form)
    assert x.format.layout.major_to_minor == (1, 0)
    got = jax.jit(function, in_shardings=(form, None))(x, S[1])
    assert_members([out[None] for out in got], [(X[0], S[1])], expected, f"{op} column-major")


@FORMATS
def test_one_traced_function_under_each_implementation(fmt):
    """A jitted function is traced again when the implementation changes: no stale program."""
    quantize = jax.jit(lambda x, s: ops.quantize(x, s, cases.dtype_of(fmt)))
    for name in ("reference", "ffi", "reference", "xla"):
        with ops.implementation(name):
            has_call = "jaxfp8_quantize" in quantize.lower(X[0], S[1]).as_text()
            cases.assert_quantized(quantize(X[0], S[1]), X[0], S[1], fmt, name)
        assert has_call == (name == "ffi")


def test_implementation_rejects_unknown_names_and_restores():
    with pytest.raises(ValueError, match="implementation"):
        with ops.implementation("cuda"):
            pass
    lower = jax.jit(lambda x: ops.amax(x)).lower
    with ops.implementation("reference"):
        with ops.implementation("ffi"):
            assert "jaxfp8_amax" in lower(X).as_text()
        assert "jaxfp8_amax" not in lower(X).as_text()
    assert "jaxfp8_amax" in lower(X).as_text(), "outside of the context the custom call is the default"
