"""Meshes: state is that of one device, on every device, whoever cuts the arrays."""

import pathlib
import socket
import subprocess
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from cpu_mesh import mesh_of
from jax.sharding import PartitionSpec as P

from .libraries import OWG
from .steps import amaxes, operands as given
from .verdict import Tally, row

M, K, N = 16, 24, 8


def cube():
    return mesh_of(data=2, fsdp=2, tp=2)


def data(i=0):
    """x, kernel and grad whose largest value one device alone has."""
    values = given(M, K, N, seed=3 * i)
    for value in values:
        value[-1, -1] = 8
    return values


def gradient_of(library):
    layer = library.dense(N)
    return lambda variables, x, grad: jax.grad(
        lambda v: jnp.vdot(layer.apply(v, x), grad)
    )(variables)


@row("`shard_map`, `check_vma` on and off: the amax of all devices", any_layer=True)
def with_shard_map(library):
    tally = Tally()
    operands = data()
    x, kernel, grad = operands
    axes = cube().axis_names
    gradient = gradient_of(library)

    def state_of_each(*arguments):
        state = gradient(*arguments)[OWG]
        return jax.tree.map(lambda leaf: leaf[None], state)

    for checked in (True, False):
        with warnings.catch_warnings(), tally.raising(f"check_vma={checked}"):
            # ours says that check_vma=False needs to be told about pipelines
            warnings.simplefilter("ignore")
            step = jax.shard_map(
                state_of_each,
                mesh=cube(),
                in_specs=(P(), P(axes), P(axes)),
                out_specs=P(axes),
                check_vma=checked,
            )
            state = jax.jit(step)(library.variables(kernel), x, grad)
            for name, true in amaxes(*operands).items():
                slots = np.asarray(state[library.module][f"{name}_amax_history"])[:, 0]
                what = (
                    f"check_vma={checked}, {name}: {slots.min() / true:.3g} to "
                    f"{slots.max() / true:.3g} of the amax"
                )
                tally(np.allclose(slots, true, rtol=1e-6), what)
    return tally.verdict()


@row("processes over Gloo: as one")
def processes(library):
    """Two processes with half of the batch each, a step with a NaN on the second: both
    have one device's state.
    """
    tally = Tally()
    root = pathlib.Path(__file__).parents[2]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{rank}.npz" for rank in range(2)]
        command = [sys.executable, "-m", "tests.bad_days.process", library.name]
        running = [
            subprocess.Popen([*command, str(rank), str(port), file], cwd=root)
            for rank, file in enumerate(files)
        ]
        try:
            statuses = [process.wait(timeout=90) for process in running]
        finally:
            for process in running:
                process.kill()
        tally(statuses == [0, 0], f"exit status {statuses}")
        states = [dict(np.load(file)) for file in files]
    for key, leaf in states[0].items():
        tally(
            leaf.tobytes() == states[1][key].tobytes(),
            f"{key} differs between the processes",
        )
        tally(np.isfinite(leaf).all(), f"{key} is {leaf.ravel()[:4]} after a NaN")
    x = data()[0]
    good = states[0]["good_input_amax_history"][0]
    tally(
        good == np.abs(x).max(),
        f"amax {good:g}, of the whole batch {np.abs(x).max():g}",
    )
    return tally.verdict("the same bits, finite")
