"""Frozen models that leave the process: checkpoints, exported programs."""

import re

import another_process
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits

import jaxfp8
from inference import models
from inference.models import X


def target(name):
    """The abstract variables that a checkpoint is restored into."""
    model = models.LINEN[name]()
    return jax.eval_shape(lambda: jaxfp8.freeze(model, model.init(jax.random.key(0), X), X))


@pytest.mark.parametrize("name", ["Dense, bf16", pytest.param("scan", marks=pytest.mark.slow)])
def test_msgpack(name):
    model, variables, frozen = models.linen(name)
    data = flax.serialization.to_bytes(frozen)
    assert len(data) < 0.34 * len(flax.serialization.to_bytes(variables))
    restored = flax.serialization.from_bytes(target(name), data)
    assert_same_bits(models.run(model, restored), models.run(model, variables), name)


LOAD = """
import sys
import jax
import numpy as np
{imports}
folder = sys.argv[1]
program = jax.export.deserialize(bytearray(open(f"{{folder}}/program", "rb").read()))
arguments = [np.load(f"{{folder}}/{{i}}.npy") for i in range({count})]
{prepare}
np.save(f"{{folder}}/y.npy", np.asarray(program.call(*arguments)).view(np.uint16))
assert "jaxfp8" not in sys.modules or {with_jaxfp8}
"""


def in_a_fresh_process(folder, program, arguments, imports="", prepare=""):
    """What an exported program gives in a process that knows nothing else; bfloat16."""
    (folder / "program").write_bytes(program.serialize())
    for i, argument in enumerate(arguments):
        np.save(folder / f"{i}.npy", argument)
    script = LOAD.format(imports=imports, prepare=prepare, count=len(arguments), with_jaxfp8="jaxfp8" in imports)
    another_process.python("-c", script, folder, JAX_PLATFORMS="cpu", PYTHONPATH=another_process.PATH)
    return np.load(folder / "y.npy").view(oracle.BF16)


def exported(function, *arguments):
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jaxfp8.ops.custom_call_targets()]
    return jax.export.export(jax.jit(function), disabled_checks=checks)(*arguments)


def test_export_with_weights_inside(tmp_path):
    """A program of x alone; the process imports jaxfp8, which has its custom calls."""
    model, variables, frozen = models.linen("own Dense")
    program = exported(lambda x: model.apply(frozen, x), X)
    assert "custom_call @jaxfp8_quantize" in program.mlir_module()
    y = in_a_fresh_process(tmp_path, program, [X], imports="import jaxfp8")
    oracle.assert_bitwise(y, np.asarray(models.run(model, variables)), "y")


@pytest.mark.slow
def test_export_without_jaxfp8(tmp_path):
    """The reference is plain StableHLO: a process with JAX alone runs it, to the same bits."""
    model, variables, frozen = models.linen("own Dense")
    with jaxfp8.ops.implementation("reference"):
        program = exported(lambda x: model.apply(frozen, x), X)
        wanted = np.asarray(models.run(model, variables))
    assert "custom_call @jaxfp8" not in program.mlir_module()
    oracle.assert_bitwise(in_a_fresh_process(tmp_path, program, [X]), wanted, "y")


def test_what_is_in_a_program():
    """One FP8 product and one quantization, of x; nothing of a kernel but its codes, and those as they lie."""
    model, _, frozen = models.linen("Dense, bf16")
    with jaxfp8.ops.implementation("ffi"):
        text = jax.jit(model.apply).lower(frozen, X).compile().as_text()
    assert len(re.findall(r'custom_call_target="jaxfp8_quantize', text)) == 1
    assert "f32[32,48]" not in text and "f8e4m3fn[32,48]" not in text
    assert jnp.dtype(jnp.float8_e4m3fn) in {leaf.dtype for leaf in jax.tree.leaves(frozen)}
