"""Ops on blocks as on a GPU, over the emulated handlers: padding, layouts of scales,
groups, meshes.
"""

import math

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
from parametrize import each_row

from jaxfp8 import ops
from jaxfp8.ops import _block_scaled_matmul

from . import emulated

F32 = np.dtype(np.float32)

pytestmark = pytest.mark.usefixtures("over_handlers")

BLOCK_KINDS = {
    "row-wise": {"block": (1, None)},
    "1x128": {"block": (1, 128), "power_2_scale": True},
    "128x128": {"block": (128, 128)},
    "MX": {"block": (1, 32), "scale": "e8m0"},
}


@each_row("options", BLOCK_KINDS)
@pytest.mark.parametrize(
    "spec", [P("x"), P(None, "x"), P("y", "x"), P(("x", "y"))], ids=str
)
def test_quantized_blocks_on_a_mesh(options, spec):
    """Each device quantizes its blocks; where a block is on several, fewer devices cut,
    or the reference runs.
    """
    rng = np.random.default_rng(0)
    x = F32.type(
        rng.standard_normal((512, 256)) * 2.0 ** rng.uniform(-9, 9, (512, 256))
    )
    put = jax.device_put(x, NamedSharding(jax.make_mesh((4, 2), ("x", "y")), spec))
    compiled = (
        jax.jit(
            lambda x: ops.quantize_blocks_transpose(x, oracle.E4M3.dtype, **options)
        )
        .lower(put)
        .compile()
    )
    expected = [
        part
        for of in (x, x.T)
        for part in oracle_blocks.quantize(of, oracle.E4M3, **options)
    ]
    for i, (value, wanted) in enumerate(zip(compiled(put), expected, strict=True)):
        oracle.assert_bitwise(np.asarray(value), wanted, f"{options}, result {i}")
    of_lines, text = None in options["block"], compiled.as_text()
    assert ("emulated_cuda_quantize_blocks_transpose" in text) == (not of_lines)
    # Cut over the most devices that have whole blocks: 512 rows on 8 devices are 4
    # blocks of 128, on every other one.
    size = 128 if 128 in options["block"] else 32
    shards = zip(x.shape, put.sharding.shard_shape(x.shape), strict=True)
    cut = [whole // math.gcd(whole // here, whole // size) for whole, here in shards]
    if not of_lines:
        assert f"f8e4m3fn[1,{cut[0]},{cut[1]}]" in text


@pytest.mark.parametrize("pair", ON_HOPPER, ids=" by ".join)
@pytest.mark.parametrize("m, n, k", [(16, 32, 256), (130, 140, 1158)])
def test_powers_of_two_as_mx(monkeypatch, pair, m, n, k):
    """float32 scales as on a GPU that multiplies E8M0: the product's oracle is that of
    float32.
    """

    class OnBlackwell(_block_scaled_matmul._BlockScaledMatmul):
        def cpu(self, *operands):
            return self.for_gpus({(10, 0)}, *operands).cuda(*operands)

    monkeypatch.setattr(_block_scaled_matmul, "_BlockScaledMatmul", OnBlackwell)
    args = operands(m, n, k, pair, power_2_scale=True)
    options = blocks_of(pair)
    run_it = jax.jit(
        lambda *x: ops.block_scaled_matmul(
            *x, **options, power_2_scale=True, out_dtype=F32
        )
    )
    with ops.implementation("ffi"):
        assert run_it.lower(*args).as_text().count('"1x32"') == 2
        oracle_blocks.matmul(*args, **options).check(run_it(*args))


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


def ragged_operands(kind, m=512, k=136, n=24):
    """a, b, their scales, sizes of groups that begin inside of blocks, and options."""
    rng, sizes = np.random.default_rng(0), np.int32([100, 0, 200, 130])
    shapes = ((m, k), (4, n, k)) if kind == "rows" else ((k, m), (n, m))
    sides = []
    for shape, block in zip(shapes, RAGGED[kind], strict=True):
        x = F32.type(rng.standard_normal(shape) * 2.0 ** rng.uniform(-9, 9, shape))
        matrices = [
            oracle_blocks.quantize(matrix, oracle.E4M3, block)
            for matrix in x.reshape(-1, *shape[-2:])
        ]
        codes, scales = (np.stack(part) for part in zip(*matrices, strict=True))
        sides.append((codes, scales) if len(shape) == 3 else (codes[0], scales[0]))
    (a, a_scales), (b, b_scales) = sides
    options = dict(zip(("a_block", "b_block"), RAGGED[kind], strict=True))
    return (a, b, a_scales, b_scales, sizes), options


@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_blocks(kind, handlers):
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
def test_ragged_blocks_on_a_mesh(kind, specs, handlers):
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
