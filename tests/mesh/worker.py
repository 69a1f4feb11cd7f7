"""One of several processes that train together: its part of the exact model of cases.py, written to a file.

    python -m mesh.worker RANK PROCESSES PORT DEVICES FILE

It has `DEVICES` CPU devices of its own. The file (npz) gets, for every run of `RUNS`, what this process holds of the
losses, weights and state: of each leaf the shard of each of its devices, and where that lies in the whole.
"""

import dataclasses
import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from mesh import cases

STEPS = 5
LAYOUTS = {
    "dp": cases.Layout(x=P("all"), w1=P(), w2=P(), h=P("all"), y=P("all")),
    "fsdp": cases.Layout(x=P("all"), w1=P("all"), w2=P(None, "all"), h=P("all"), y=P("all")),
}
NAN_STEP = 2


def data(with_nan: bool) -> list:
    """The batches of all processes; with a NaN in the last example, which the last process holds."""
    batches = cases.batches()[:STEPS]
    if with_nan:
        x = batches[NAN_STEP].x.copy()
        x[-1, -1, -1] = np.nan
        batches[NAN_STEP] = dataclasses.replace(batches[NAN_STEP], x=x)
    return batches


def make_step(loss):
    """A step that leaves the weights alone where the loss is not finite, as trainers do."""
    step = cases.make_step(loss)

    def guarded(weights, state, batch):
        updated, state, value = step(weights, state, batch)
        weights = jax.tree.map(lambda new, old: jax.numpy.where(jax.numpy.isfinite(value), new, old), updated, weights)
        return weights, state, value

    return guarded


def train(mesh, layout, with_nan=False) -> cases.Run:
    """The training on a mesh that may span processes; each brings its part of the data."""

    def put(tree, specs):
        def local_part(x, sharding):
            return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])

        shardings = cases.shardings(mesh, specs)
        if isinstance(specs, P):
            shardings = jax.tree.map(lambda _: shardings, tree)
        return jax.tree.map(local_part, tree, shardings)

    results = cases.shardings(mesh, (layout.weights, P(), P()))
    step = jax.jit(cases.step_on(mesh, layout, make_step=make_step), out_shardings=results)
    batches = [put(batch, layout.batch) for batch in data(with_nan)]
    return cases.train(step, put(cases.weights(), layout.weights), put(cases.state(), P()), batches)


RUNS = {
    "dp": (LAYOUTS["dp"], False),
    "fsdp": (LAYOUTS["fsdp"], False),
    "fsdp with a NaN": (LAYOUTS["fsdp"], True),
}


def shards_of(run) -> dict:
    """`{"path|index|device": values}` of what this process holds."""
    shards = {}
    for path, leaf in jax.tree.leaves_with_path(dataclasses.asdict(run)):
        for shard in leaf.addressable_shards:
            index = ",".join(
                f"{s.start or 0}:{s.stop or size}" for s, size in zip(shard.index, leaf.shape, strict=True)
            )
            shards[f"{jax.tree_util.keystr(path)}|{index}|{shard.device.id}"] = np.asarray(shard.data)
    return shards


def main(rank, processes, port, devices, file):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(rank), initialization_timeout=60)
    assert jax.process_count() == int(processes) and len(jax.local_devices()) == int(devices)
    mesh = cases.mesh(shape=(jax.device_count(),), axes=("all",))
    shards = {}
    for name, (layout, with_nan) in RUNS.items():
        run = train(mesh, layout, with_nan)
        shards |= {f"{name}|{key}": values for key, values in shards_of(run).items()}
    np.savez(file, **shards)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
