"""Updates of AdamW compiled for one TPU, with float32 and FP8 moments; prints as JSON
what `count` finds.

    python -m tpu.optimizers [--size 4096] CANDIDATE...

The parameter is a kernel in float32; it and the state are updated in place.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxfp8 import ops, optim

from . import count

TRANSFORMATIONS = {
    "float32": optax.adamw(1e-3),
    "quantized": optim.quantized(optax.adamw(1e-3)),
    "update": optim.adamw(1e-3),
    "apply": optim.adamw(1e-3),
}


def report(candidate: str, size: int, topology: str) -> dict:
    """What is in the program of one update of a `[size, size]` parameter, and its
    temporary memory.
    """
    tx = TRANSFORMATIONS[candidate]
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    mesh = jax.sharding.Mesh(devices[:1], ("data",))

    def placed(leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P())
        )

    def update(params, opt_state, grads):
        if candidate == "apply":
            return tx.apply(grads, opt_state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = placed(jax.ShapeDtypeStruct((size, size), jnp.float32))
    opt_state = jax.tree.map(placed, jax.eval_shape(tx.init, params))
    with ops.implementation("tpu"):
        compiled = (
            jax.jit(update, donate_argnums=(0, 1))
            .lower(params, opt_state, params)
            .compile()
        )
    temporary = compiled.memory_analysis().temp_size_in_bytes / size**2
    return count.count(compiled.as_text()) | {
        "temporary_bytes_per_parameter": temporary
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("candidates", nargs="+", choices=TRANSFORMATIONS)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--topology", default="tpu7x:2x2x1")
    args = parser.parse_args()
    print(
        json.dumps(
            {name: report(name, args.size, args.topology) for name in args.candidates}
        )
    )


if __name__ == "__main__":
    main()
