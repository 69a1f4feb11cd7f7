"""Compiles the programs of cuda/first_launches.py for an H200; prints "recorded" where all of them become graphs."""

import os
import pathlib
import tempfile

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from cuda import first_launches
from jaxfp8 import ops

from .meshes import h200_mesh


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        sharding = SingleDeviceSharding(h200_mesh().devices.flat[0])

        def compile(op, options):
            run, inputs, _ = first_launches.CASES[op]
            arrays = inputs(np.random.default_rng(0))
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
            with ops.implementation("ffi"):
                jax.jit(run, compiler_options=options).lower(*types).compile()

        for op in first_launches.CASES:
            compile(op, first_launches.GRAPHS)
        first_launches.assert_recorded(pathlib.Path(folder))
        sequences = list(pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"))
        assert len(sequences) == len(first_launches.CASES), sequences
    print("recorded")


if __name__ == "__main__":
    main()
