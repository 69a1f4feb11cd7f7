"""Prints, as JSON, what eight H200s multiply: the custom calls of FP8 products and of
block-scaled products.

Of each device's shards; and the devices that ops ask about.
"""

import json
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from mesh.hlo import collectives, custom_calls as operands_of

from jaxfp8 import ops
from jaxfp8._jax import _compat
from jaxfp8.ops import _support

from .programs import AXES, gpus

M, N, K = 4096, 2048, 1024
FEW_K = 12 * 128  # as many blocks as 4 of 8 devices divide
# a [m, k], b [n, k]
LAYOUTS = {
    "rows": (P(AXES), P()),
    "columns": (P(), P(AXES)),
    "both": (P("fsdp"), P("tp")),
    "contracted": (P(None, AXES), P(None, AXES)),
}
SCALINGS = {
    "blocks": ({"block": (1, 128)}, {"block": (128, 128)}),
    "rows": ({"block": (1, None)}, {"block": (1, None)}),
}


def product(a, b):
    one = jnp.ones(1)

    def body(total, _):
        return total + ops.scaled_matmul(a, b, one, one, out_dtype=jnp.float32), None

    return jax.lax.scan(body, jnp.zeros((a.shape[0], b.shape[0])), None, length=2)[0]


def block_scaled(scalings):
    def run(x, kernel):
        (a, a_scale), (b, b_scale) = (
            ops.quantize_blocks(of, jnp.float8_e4m3fn, **options)
            for of, options in zip((x, kernel), scalings, strict=True)
        )
        blocks = {"a_block": scalings[0]["block"], "b_block": scalings[1]["block"]}
        return ops.block_scaled_matmul(a, b, a_scale, b_scale, **blocks)

    return run


def compiled(product, *operands):
    return jax.jit(product).lower(*operands).compile().as_text()


def custom_calls(text):
    """Operands of the products, and how many tensors are gathered."""
    gathers = [c for c in collectives(text) if c.kind == "all-gather"]
    return {
        "operands": operands_of(text, "jaxfp8_block_scaled_matmul"),
        "gathers": len(gathers),
    }


def main():
    mesh = gpus("h200", (4, 2))
    asked = []
    gpus_of = _support.gpus
    warnings.simplefilter("ignore")

    def record(ctx):
        asked.extend(
            [gpu.device_kind, gpu.compute_capability] for gpu in _compat.gpus_of(ctx)
        )
        return gpus_of(ctx)

    def operands(specs, dtype, k=K):
        return [
            jax.ShapeDtypeStruct((rows, k), dtype, sharding=NamedSharding(mesh, spec))
            for rows, spec in zip((M, N), specs, strict=True)
        ]

    _support.gpus = record
    found = {
        name: operands_of(
            compiled(product, *operands(specs, jnp.float8_e4m3fn)),
            "jaxfp8_scaled_matmul",
        )
        for name, specs in LAYOUTS.items()
    }
    in_shards = jax.shard_map(
        product, mesh=mesh, in_specs=(P(AXES), P()), out_specs=P(AXES), check_vma=False
    )
    whole = (jax.ShapeDtypeStruct((rows, K), jnp.float8_e4m3fn) for rows in (M, N))
    found["shard_map"] = operands_of(
        compiled(in_shards, *whole), "jaxfp8_scaled_matmul"
    )
    blocks = {
        f"{scaling} {layout}": custom_calls(
            compiled(block_scaled(options), *operands(specs, jnp.bfloat16))
        )
        for scaling, options in SCALINGS.items()
        for layout, specs in LAYOUTS.items()
    }
    few = custom_calls(
        compiled(
            block_scaled(SCALINGS["blocks"]),
            *operands(LAYOUTS["contracted"], jnp.bfloat16, FEW_K),
        )
    )
    print(json.dumps({"found": found, "blocks": blocks, "few": few, "asked": asked}))


if __name__ == "__main__":
    main()
