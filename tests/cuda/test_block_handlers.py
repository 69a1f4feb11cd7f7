"""Ops on blocks as on a GPU, over the emulated handlers: padding, layouts of scales,
groups, meshes.
"""

import math

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import blocks as oracle_blocks
from parametrize import each_row

from jaxfp8 import ops
from jaxfp8.ops import _block_scaled_matmul

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


SCALED_PAIRS = {
    "rows by rows": ((1, None), (1, None)),
    "MX": ((1, 32), (1, 32)),
    "1x128 by 128x128": ((1, 128), (128, 128)),
    "128x128 by 1x128": ((128, 128), (1, 128)),
    "1x128 by 1x128": ((1, 128), (1, 128)),
}
PAIRS = each_row("blocks", SCALED_PAIRS)


def scaled_operands(m, n, k, blocks, seed=0, power_2_scale=False):
    """(a, b, their scales), as the oracle quantizes."""
    rng, sides = np.random.default_rng(seed), []
    for rows, block in zip((m, n), blocks, strict=True):
        x = F32.type(
            rng.standard_normal((rows, k))
            * 2.0 ** (np.arange(rows)[:, None] % 5 + np.arange(k) // 32 % 7)
        )
        scaling = (
            {"scale": "e8m0"} if block == (1, 32) else {"power_2_scale": power_2_scale}
        )
        sides.append(oracle_blocks.quantize(x, oracle.E4M3, block, **scaling))
    return *(side[0] for side in sides), *(side[1] for side in sides)


@pytest.mark.parametrize(
    "pair", ["1x128 by 128x128", "128x128 by 1x128", "1x128 by 1x128", "rows by rows"]
)
@pytest.mark.parametrize("m, n, k", [(16, 32, 256), (130, 140, 1158)])
def test_powers_of_two_as_mx(monkeypatch, pair, m, n, k):
    """float32 scales as on a GPU that multiplies E8M0: the product's oracle is that of
    float32.
    """

    class OnBlackwell(_block_scaled_matmul._BlockScaledMatmul):
        def cpu(self, *operands, vmap_dims, spec):
            return self.cuda(
                *operands,
                vmap_dims=vmap_dims,
                spec=self.for_gpus({(10, 0)}, *operands, spec=spec),
            )

    monkeypatch.setattr(_block_scaled_matmul, "_block_scaled_matmul", OnBlackwell())
    blocks = SCALED_PAIRS[pair]
    args = scaled_operands(m, n, k, blocks, power_2_scale=True)
    options = {"a_block": blocks[0], "b_block": blocks[1]}
    run_it = jax.jit(
        lambda *x: ops.block_scaled_matmul(
            *x, **options, power_2_scale=True, out_dtype=F32
        )
    )
    with ops.implementation("ffi"):
        assert run_it.lower(*args).as_text().count('"1x32"') == 2
        oracle_blocks.matmul(*args, **options).check(run_it(*args), pair)


MESH_SPECS = (
    (P("x"), P()),
    (P(None, "x"), P(None, "x")),  # blocks of 32 and 128 of k on each device
    (P("y", "x"), P("x", "y")),
    (P(("x", "y")), P(None, ("x", "y"))),  # too fine for blocks of 128
    (P(None, "x"), P("y")),
)


@PAIRS
@pytest.mark.parametrize("specs", MESH_SPECS, ids=str)
def test_block_scaled_products_on_a_mesh(blocks, specs):
    """Each device multiplies its shards, with the scales of their blocks; the bias is
    added once.
    """
    args = scaled_operands(32, 256, 512, blocks)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    options = {"a_block": blocks[0], "b_block": blocks[1]}
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
    oracle_blocks.matmul(*args, **options, bias=bias).check(
        compiled(*put, bias), f"{blocks}, {specs}"
    )
