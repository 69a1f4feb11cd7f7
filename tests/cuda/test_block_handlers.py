"""Ops on blocks as on a GPU, over the emulated handlers: padding, layouts of scales,
groups, meshes.
"""

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mesh import hlo
from ops.test_block_scaled_matmul import (
    ON_BLACKWELL,
    ON_HOPPER,
    blocks_of,
    operands,
)
from oracle import blocks as oracle_blocks

from jaxfp8 import ops

from . import emulated, test_ragged_blocks

F32 = np.dtype(np.float32)

pytestmark = pytest.mark.usefixtures("over_handlers")


MESH_SPECS = (
    (P("x"), P()),
    (P(None, "x"), P(None, "x")),  # blocks of 32 and 128 of k on each device
    (P("y", "x"), P("x", "y")),
    (P(("x", "y")), P(None, ("x", "y"))),  # too fine for blocks of 128
    (P(None, "x"), P("y")),
)


@pytest.mark.parametrize("pair", ON_HOPPER + ON_BLACKWELL, ids=" by ".join)
@pytest.mark.parametrize("specs", MESH_SPECS, ids=str)
def test_block_scaled_products_on_a_mesh(pair, specs):
    """Each device multiplies its shards, with the scales of their blocks; the bias is
    added once.
    """
    args = operands(32, 256, 512, pair)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    options = blocks_of(pair)
    bias = np.float32(np.arange(256))
    put = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, (*specs, P(), P()), strict=True)
    ]
    run = jax.jit(
        lambda *x: ops.block_scaled_matmul(*x[:4], bias=x[4], **options, out_dtype=F32)
    )
    compiled = run.lower(*put, bias).compile()
    assert "emulated_cuda_block_scaled_matmul" in compiled.as_text()
    oracle_blocks.matmul(*args, **options, bias=bias).check(compiled(*put, bias))


RAGGED = {
    "rows": ((1, 128), (128, 128)),
    "contraction": ((1, 128), (1, 128)),
}


def ragged_operands(kind):
    """a, b, their scales, sizes of groups that begin inside of blocks, and options."""
    is_contraction = kind == "contraction"
    arrays = test_ragged_blocks.operands(is_contraction, 512, 136, 24, groups=4)
    sizes = np.int32([100, 0, 200, 130])
    options = dict(zip(("a_block", "b_block"), RAGGED[kind], strict=True))
    return (*(x[0] for x in arrays), sizes), options


@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_products(kind, handlers):
    """Layouts of scales, of two products under `vmap` too."""
    args, options = ragged_operands(kind)

    def product(*args):
        return ops.ragged_matmul(*args, **options, ragged=kind, out_dtype=F32)

    with emulated.hopper(handlers):
        got = jax.jit(jax.vmap(product))(*(np.stack([x, x[::-1]]) for x in args))
        got.block_until_ready()
    for i, step in enumerate((1, -1)):
        expected = oracle_blocks.hopper_ragged_matmul(*(x[::step] for x in args))
        oracle.assert_bitwise(np.asarray(got[i]), expected, kind)


@pytest.mark.parametrize(
    "kind, specs",
    [
        ("rows", (P("x"), P("y"), P("x"))),
        ("contraction", (P(None, "x"), P(None, "x"), P())),
        # On a device the first group begins inside of a block.
        ("contraction", (P(None, "x"), P(None, "x"), P("y"))),
    ],
)
def test_ragged_products_on_a_mesh(kind, specs, handlers):
    """Each device multiplies its rows by its groups, with the scales of its blocks."""
    args, options = ragged_operands(kind)
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    places = [NamedSharding(mesh, spec) for spec in specs]

    def product(a, b):
        return ops.ragged_matmul(a, b, *args[2:], **options, ragged=kind, out_dtype=F32)

    jitted = jax.jit(product, in_shardings=places[:2], out_shardings=places[2])
    compiled = jitted.lower(*args[:2]).compile()
    text = compiled.as_text()
    assert "emulated_cuda_ragged_matmul" in text
    assert not [c for c in hlo.collectives(text) if c.kind == "all-gather"]
    with emulated.hopper(handlers):
        got = compiled(*map(jax.device_put, args[:2], places)).block_until_ready()
    oracle_blocks.ragged_matmul_on_hopper(*args, **options).check(got, kind)
