"""Prints, as JSON, the custom calls of block-scaled products on eight H200s: shapes of shards, and what is gathered."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxfp8 import ops

from .meshes import h200_mesh
from .products import LAYOUTS, K, M, N

SCALINGS = {
    "blocks": ({"block": (1, 128)}, {"block": (128, 128)}),
    "rows": ({"block": (1, None)}, {"block": (1, None)}),
    "MX": ({"block": (1, 32), "scale": "e8m0"},) * 2,
}


def product(scalings):
    def run(x, kernel):
        quantized = [
            ops.quantize_blocks(of, jnp.float8_e4m3fn, **options)
            for of, options in zip((x, kernel), scalings, strict=True)
        ]
        (a, a_scale), (b, b_scale) = quantized
        blocks = {"a_block": scalings[0]["block"], "b_block": scalings[1]["block"]}
        return ops.block_scaled_matmul(a, b, a_scale, b_scale, **blocks)

    return run


def main():
    mesh, found = h200_mesh(), {}
    warnings.simplefilter("ignore")
    for scaling, options in SCALINGS.items():
        for layout, specs in LAYOUTS.items():
            operands = [
                jax.ShapeDtypeStruct((rows, K), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
                for rows, spec in zip((M, N), specs, strict=True)
            ]
            text = jax.jit(product(options)).lower(*operands).compile().as_text()
            calls = [line for line in text.splitlines() if '"jaxfp8_block_scaled_matmul_v1"' in line]
            constraints = [re.search(r"operand_layout_constraints=\{(.*?\})\}", line).group(1) for line in calls]
            found[f"{scaling} {layout}"] = {
                "operands": [re.findall(r"(\w+)\[([\d,]*)\]", constraint) for constraint in constraints],
                "gathers": len(re.findall(r" all-gather(?:-start)?\(", text)),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
