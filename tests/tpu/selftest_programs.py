"""Programs of the selftest compiled for a TPU; prints as JSON, for each op, "compiled"
or why it is refused.

python -m tpu.selftest_programs
"""

import json

import jax
from jax.experimental import topologies

from jaxfp8 import ops
from jaxfp8.inspect import _op_calls
from jaxfp8.selftest import _cases

ODD = 2  # the position of an odd shape among those of an op


def outcome(op, sharding) -> str:
    *_, case = (case for case, _ in zip(_cases.cases(op), range(ODD + 1), strict=False))
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x in case.arguments
    ]
    try:
        with ops.implementation("tpu"):
            jax.jit(case.function).lower(*arguments).compile()
    except NotImplementedError as error:
        return str(error)
    return "compiled"


def main():
    device, *_ = topologies.get_topology_desc(
        platform="tpu", topology_name="tpu7x:2x2x1"
    ).devices
    sharding = jax.sharding.SingleDeviceSharding(device)
    print(json.dumps({op: outcome(op, sharding) for op in _op_calls.OPS}))


if __name__ == "__main__":
    main()
