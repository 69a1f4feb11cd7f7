"""The programs in which the selftest launches each op first, compiled for an H200; prints whether it is in a graph."""

import pathlib

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxfp8.inspect import _op_cases as _cases
from jaxfp8.selftest import _checks


def main() -> None:
    description = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("device",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def recorded(op):
        function, arguments, _ = _cases.call(op, _checks._kind(op, 256, 0))
        return _checks.record(function, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments])

    for op in _cases.OPS:
        print(op, recorded(op)[1])
    _checks._GRAPHS["xla_gpu_enable_command_buffer"] = ""
    print("without", recorded("amax")[1])


if __name__ == "__main__":
    main()
