"""Optimizers with moments in FP8 on TPUs: bits of odd shapes and on meshes, and cycles
beside float32's.

`tests/ops` runs the ops as TPUs compute them for the other shapes, along all axes,
under vmap and in one call.
"""

import json
import re

import jax
import numpy as np
import pytest
from ops import test_adam as adam

from jaxfp8 import ops as jaxfp8_ops
from jaxfp8.numerics import _tpu
from jaxfp8.ops import _adam_update

from . import compiler


def step(leaf, axis):
    with jaxfp8_ops.implementation("tpu"):
        return jax.jit(lambda x: _adam_update.adam_update([x], [axis])[0])(leaf)


@pytest.mark.parametrize("n", [300, 128 * 1024 + 300])
def test_a_leaf_of_one_dimension(n):
    row = adam.make_leaf(np.random.default_rng(0), (1, n), True)
    flat = jax.tree.map(lambda x: x.reshape(-1), row)._replace(keys=row.keys[:, 0])
    got = step(flat, 0)
    adam.assert_same(jax.tree.map(lambda x: x[None], got), adam.expected(row))


@pytest.mark.parametrize("shape", [(2**17,), (2, 1500), (64, 1024)], ids=str)
def test_no_array_is_much_larger_than_a_leaf(shape):
    """One matrix of ones and zeros for all blocks of 16 million elements would be
    terabytes.
    """
    text = (
        jax.jit(lambda x: _tpu.each(x))
        .lower(jax.ShapeDtypeStruct(shape, np.float32))
        .as_text()
    )
    sizes = [
        np.prod([int(n) for n in found.split("x")])
        for found in re.findall(r"tensor<([\dx]+)x[a-z]", text)
    ]
    assert max(sizes) <= max(128 * np.prod(shape), 3 * 128 * 1024**2)


def test_cycles():
    """XLA's estimates, beside those of float32's update, which waits for memory."""
    if reason := compiler.missing():
        pytest.skip(reason)
    rows = json.loads(
        compiler.run("optimizers", "float32", "quantized", "apply", "--size", "2048")
    )
    float32, quantized, apply = (
        rows[name]["cycles"] for name in ("float32", "quantized", "apply")
    )
    assert 0 < apply <= 7.5 * float32
    assert 0 < quantized <= 10 * float32
    assert all(row["without_estimate"] == 0 for row in rows.values())
    # Averages in float32, and numbers of blocks for each element. The sum is smaller,
    # as memory is used again.
    assert rows["apply"]["temporary_bytes_per_parameter"] <= 28
