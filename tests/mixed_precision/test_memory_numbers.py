"""The memory figures of the literature, from arrays and compiled programs rather than from multiplication."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import count

import jaxfp8

MIB = 2**20


def output_bytes(function, *args) -> int:
    """What the compiled program puts out; nothing is allocated."""
    return jax.jit(function).lower(*args).compile().memory_analysis().output_size_in_bytes


@pytest.mark.parametrize("dtype, mib", [("float32", 48), ("float16", 24)])
def test_activations(dtype, mib):
    """32 x 512 x 768: 48 MiB in float32, 24 in float16."""
    x = jax.ShapeDtypeStruct((32, 512, 768), jnp.float32)
    policy = jaxfp8.mixed_precision.Policy.parse(f"p=f32,c={dtype}")
    assert output_bytes(policy.cast_to_compute, x) == mib * MIB


def test_activations_in_fp8():
    """32 x 2048 x 4096: 512 MiB in bfloat16, 256 as codes; 1024 in float32."""
    x = jax.ShapeDtypeStruct((32 * 2048, 4096), jnp.bfloat16)
    codes = jax.eval_shape(lambda x: jaxfp8.ops.quantize(x, jnp.float32(1), jnp.float8_e4m3fn)[0], x)
    assert x.size * x.dtype.itemsize == 512 * MIB and codes.size * codes.dtype.itemsize == 256 * MIB


def test_activations_kept_for_the_backward():
    """The same, of what a Dense layer keeps: x in one byte, not two; kernel, histories and scales are small."""
    kept = {}
    for name, cls in (("bfloat16", None), ("fp8", jaxfp8.Fp8DotGeneral)):
        model = nn.Dense(16, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=cls)
        x = jax.ShapeDtypeStruct((32 * 2048, 4096), jnp.bfloat16)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        kept[name] = count.residual_bytes(model.apply, variables, x)
    assert 0 <= kept["bfloat16"] - 512 * MIB < MIB / 4
    assert 0 <= kept["fp8"] - 256 * MIB < MIB / 4


def test_scales_of_a_hundred_tensors():
    """One f32 each: 400 bytes."""
    scales = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 100

    def scale_of(x):
        return jaxfp8.ops.amax_to_scale(jaxfp8.ops.amax(x), jnp.float32(1), fp8_max=448)[1]

    assert sum(s.size * s.dtype.itemsize for s in jax.eval_shape(lambda xs: [scale_of(x) for x in xs], scales)) == 400


def test_scales_of_blocks():
    """One byte for each 32 elements of 32 x 2048 x 4096: 8 MiB, 3 % of the codes."""
    codes = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (32 * 2048, 4096), (0, 0))
    scales = codes.reshape(-1, 4096 // 32, 32)[..., 0].astype(jnp.float8_e8m0fnu)
    assert scales.nbytes == 8 * MIB and scales.nbytes / codes.size == 0.03125


def test_parameters():
    """A float16 copy of the parameters beside the f32 ones: one and a half times f32, not half of it."""
    params = {
        "kernel": jax.ShapeDtypeStruct((1024, 256), jnp.float32),
        "bias": jax.ShapeDtypeStruct((256,), jnp.float32),
    }
    f32 = output_bytes(lambda p: jax.tree.map(jnp.negative, p), params)
    policy = jaxfp8.mixed_precision.Policy.parse("p=f32,c=f16")
    # The table of a tuple's pointers is part of its size: 8 bytes an array.
    both = output_bytes(lambda p: (jax.tree.map(jnp.negative, p), policy.cast_to_compute(p)), params)
    assert abs(both / f32 - 1.5) < 1e-3
