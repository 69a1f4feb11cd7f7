"""Prints, as JSON, the FP8 products that autotune finds in programs for eight H200s, and the devices ops ask about."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxfp8 import ops
from jaxfp8._jax import _compat
from jaxfp8.autotune._autotune import gemms_of
from jaxfp8.ops import _support

from .meshes import DEVICES, h200_mesh

M, N, K = 4096, 2048, 1024
# a [m, k], b [n, k]
LAYOUTS = {
    "rows": (P(DEVICES), P()),
    "columns": (P(), P(DEVICES)),
    "both": (P("fsdp"), P("tp")),
    "contracted": (P(None, DEVICES), P(None, DEVICES)),
}


def product(a, b):
    one = jnp.ones(1)

    def body(total, _):
        return total + ops.scaled_matmul(a, b, one, one, out_dtype=jnp.float32), None

    return jax.lax.scan(body, jnp.zeros((a.shape[0], b.shape[0])), None, length=2)[0]


def main():
    mesh, asked, missing = h200_mesh(), [], _support.missing

    def record(ctx, *, cublaslt):
        asked.extend([gpu.device_kind, gpu.compute_capability] for gpu in _compat.gpus_of(ctx))
        return missing(ctx, cublaslt=cublaslt)

    _support.missing = record
    found = {}
    for name, specs in LAYOUTS.items():
        operands = [
            jax.ShapeDtypeStruct((rows, K), jnp.float8_e4m3fn, sharding=NamedSharding(mesh, spec))
            for rows, spec in zip((M, N), specs, strict=True)
        ]
        found[name] = gemms_of(product, *operands)
    in_shards = jax.shard_map(product, mesh=mesh, in_specs=(P(DEVICES), P()), out_specs=P(DEVICES), check_vma=False)
    found["shard_map"] = gemms_of(in_shards, *(jax.ShapeDtypeStruct((rows, K), jnp.float8_e4m3fn) for rows in (M, N)))
    print(json.dumps({"found": found, "asked": asked}))


if __name__ == "__main__":
    main()
