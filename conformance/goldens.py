"""Write what later versions must load: `python conformance/goldens.py`, once a release;
a folder that is there stays.

A Dense layer whose numbers are small integers and whose scales are powers of two: every
sum is exact, in any order, so its answers are the same bits on every machine.
"""

import pathlib
import tomllib

import flax.linen as nn
import jax
import numpy as np
from flax import serialization

import jaxfp8

HERE = pathlib.Path(__file__).parent / "goldens"
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
MODEL = nn.Dense(
    16,
    dot_general_cls=jaxfp8.make_dot_general_cls(
        jaxfp8.DelayedScaling(amax_history_len=4)
    ),
)


def inputs() -> tuple:
    """`(variables, x, grad)`; the histories give the scales 256 and 8192."""
    rng = np.random.default_rng(0)
    kernel, x, grad = (
        rng.integers(-3, 4, size).astype(np.float32) / 4
        for size in ((32, 16), (8, 32), (8, 16))
    )
    state = {}
    for name, amax in (("input", 1.75), ("kernel", 1.75), ("output_grad", 7.0)):
        state[f"{name}_amax_history"] = np.array([0.5, amax, 0.25, 0], np.float32)
        state[f"{name}_scale"] = np.ones(1, np.float32)
    params = {"kernel": kernel, "bias": np.arange(16, dtype=np.float32)}
    return {"params": params, OWG: {"Fp8DotGeneral_0": state}}, x, grad


def train_step(variables, x, grad):
    """Return the output and the gradients of the variables, of which those of the state
    are its next value.
    """
    y, backward = jax.vjp(lambda variables: MODEL.apply(variables, x), variables)
    return y, backward(grad)[0]


def exported(function, *arguments, implementation: str) -> bytes:
    """Serialize a program for CPUs; "reference" needs nothing of jaxfp8 where it runs,
    "ffi" its custom calls.
    """
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in jaxfp8.ops.custom_call_targets()
    ]
    with jaxfp8.ops.implementation(implementation):
        program = jax.export.export(
            jax.jit(function), platforms=["cpu"], disabled_checks=checks
        )(*arguments)
    return program.serialize(vjp_order=0)


def files() -> dict[str, bytes]:
    """Return the content of each file of this version."""
    variables, x, grad = inputs()
    frozen = jaxfp8.freeze(MODEL, variables, x)
    content = {
        "variables.msgpack": serialization.to_bytes(variables),
        "frozen.msgpack": serialization.to_bytes(frozen),
    }
    for implementation in ("reference", "ffi"):
        content[f"train_step_{implementation}"] = exported(
            train_step, variables, x, grad, implementation=implementation
        )
        content[f"frozen_{implementation}"] = exported(
            MODEL.apply, frozen, x, implementation=implementation
        )
    answer = {
        "frozen_y": MODEL.apply(frozen, x),
        "y": train_step(variables, x, grad)[0],
    }
    content["gradients.msgpack"] = serialization.to_bytes(
        train_step(variables, x, grad)[1]
    )
    content["outputs.msgpack"] = serialization.to_bytes(
        jax.tree.map(np.asarray, answer)
    )
    return content


if __name__ == "__main__":
    # Programs say where each operation was written: the file, without the folders of
    # this machine.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
    folder = HERE / project["project"]["version"]
    folder.mkdir(parents=True)
    for name, data in files().items():
        (folder / name).write_bytes(data)
