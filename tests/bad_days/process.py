"""One of two processes that train a layer together:
`python -m tests.bad_days.process LIBRARY RANK PORT FILE`.

The file (npz) gets this process's state after a good step and after one with a NaN in
the second half of the batch.
"""

import os
import sys


def main(name, rank, port, file):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=2, process_id=int(rank)
    )
    from tests import conftest as conftest

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    from . import libraries, meshes

    library = libraries.OURS if name == libraries.OURS.name else libraries.FLAX
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def put(value, spec):
        return jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, spec), lambda index: value[index]
        )

    x, kernel, grad = meshes.data()
    variables = jax.tree.map(
        lambda leaf: put(np.asarray(leaf), P()), library.variables(kernel)
    )
    step = jax.jit(meshes.gradient_of(library), out_shardings=NamedSharding(mesh, P()))
    bad = x.copy()
    found = {}
    bad[-1, 0] = np.nan
    for what, batch in (("good", x), ("bad", bad)):
        after = step(variables, put(batch, P("data")), put(grad, P("data")))
        variables = {**variables, libraries.OWG: after[libraries.OWG]}
        state = variables[libraries.OWG][library.module]
        found |= {
            f"{what}_{key}": np.asarray(leaf.addressable_data(0))
            for key, leaf in state.items()
        }
    np.savez(file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
