"""Frozen models that leave the process: checkpoints, exported programs."""

import re

import another_process
import flax.serialization
import jax
import jax.numpy as jnp
import oracle
import pytest
from draws import KEY
from equality import assert_same_bits

import jaxfp8
from inference import models
from inference.models import X


def target(name):
    """The abstract variables that a checkpoint is restored into."""
    model = models.LINEN[name]()
    return jax.eval_shape(lambda: jaxfp8.freeze(model, model.init(KEY, X), X))


@pytest.mark.parametrize(
    "name", ["Dense, bf16", pytest.param("scan", marks=pytest.mark.slow)]
)
def test_msgpack(name):
    model, variables, frozen = models.linen(name)
    data = flax.serialization.to_bytes(frozen)
    assert len(data) < 0.34 * len(flax.serialization.to_bytes(variables))
    restored = flax.serialization.from_bytes(target(name), data)
    assert_same_bits(models.run(model, restored), models.run(model, variables), name)


def test_export_with_weights_inside():
    """A program of x alone; the process imports jaxfp8, which has its custom calls."""
    model, variables, frozen = models.linen("own Dense")
    program = another_process.export(lambda x: model.apply(frozen, x), X)
    assert "custom_call @jaxfp8_quantize" in program.mlir_module()
    (y,) = another_process.call_exported(program, ((X,), {}), JAX_PLATFORMS="cpu")
    oracle.assert_bitwise(y, models.run(model, variables), "y")


def test_what_is_in_a_program():
    """One FP8 product and one quantization, of x; nothing of a kernel but its codes,
    and those as they lie.
    """
    model, _, frozen = models.linen("Dense, bf16")
    with jaxfp8.ops.implementation("ffi"):
        text = jax.jit(model.apply).lower(frozen, X).compile().as_text()
    assert len(re.findall(r'custom_call_target="jaxfp8_quantize', text)) == 1
    assert "f32[32,48]" not in text and "f8e4m3fn[32,48]" not in text
    assert jnp.dtype(jnp.float8_e4m3fn) in {
        leaf.dtype for leaf in jax.tree.leaves(frozen)
    }
