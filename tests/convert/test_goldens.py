"""What earlier versions wrote, a folder each in conformance/goldens: checkpoints and
exported programs, to the bit.
"""

import another_process
import jax
import pytest
from equality import assert_same_bits
from flax import serialization
from oracle.conformance import FOLDER, load

import jaxfp8

VERSIONS = sorted(path.name for path in (FOLDER / "goldens").iterdir())
# Versions whose training step makes a custom call that is gone, as the changelog says.
GONE = {"0.2.0": "jaxfp8_delayed_scales_v2"}
goldens = load("goldens")


@pytest.fixture(params=VERSIONS)
def read(request):
    """A function of a file's name, which gives its content."""
    folder = FOLDER / "goldens" / request.param
    return lambda name: bytearray((folder / name).read_bytes())


def answers(read):
    variables, x, _ = goldens.inputs()
    outputs = serialization.msgpack_restore(bytes(read("outputs.msgpack")))
    return (
        outputs["y"],
        outputs["frozen_y"],
        serialization.from_bytes(variables, bytes(read("gradients.msgpack"))),
    )


def test_checkpoints(read):
    """Of variables and of frozen ones; and what the model of today makes of them."""
    variables, x, grad = goldens.inputs()
    y, frozen_y, gradients = answers(read)
    stored = serialization.from_bytes(variables, bytes(read("variables.msgpack")))
    assert_same_bits(stored, variables)
    assert_same_bits(jax.jit(goldens.train_step)(stored, x, grad), (y, gradients))
    target = jax.eval_shape(lambda: jaxfp8.freeze(goldens.MODEL, variables, x))
    frozen = serialization.from_bytes(target, bytes(read("frozen.msgpack")))
    assert_same_bits(frozen, jaxfp8.freeze(goldens.MODEL, variables, x))
    assert_same_bits(goldens.MODEL.apply(frozen, x), frozen_y)


@pytest.mark.parametrize("implementation", ["reference", "ffi"])
def test_programs(request, read, implementation):
    variables, x, grad = goldens.inputs()
    y, frozen_y, gradients = answers(read)
    step = jax.export.deserialize(read(f"train_step_{implementation}"))
    assert ("custom_call @jaxfp8" in step.mlir_module()) == (implementation == "ffi")
    if implementation == "ffi" and (
        call := GONE.get(request.node.callspec.params["read"])
    ):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f"No FFI handler registered for {call}"
        ):
            step.call(variables, x, grad)
    else:
        assert_same_bits(step.call(variables, x, grad), (y, gradients))
    frozen = jaxfp8.freeze(goldens.MODEL, variables, x)
    assert_same_bits(
        jax.export.deserialize(read(f"frozen_{implementation}")).call(frozen, x),
        frozen_y,
    )


def test_a_process_without_jaxfp8(read):
    """The reference program is plain StableHLO."""
    y, _, gradients = answers(read)
    program = jax.export.deserialize(read("train_step_reference"))
    got = another_process.call_exported(
        program, (goldens.inputs(), {}), imports="", JAX_PLATFORMS="cpu"
    )
    assert_same_bits(got, jax.tree.leaves((y, gradients)))
