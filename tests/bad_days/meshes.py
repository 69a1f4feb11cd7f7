"""Meshes: state is that of one device, on every device, whoever cuts the arrays."""

import concurrent.futures
import pathlib
import socket
import tempfile
import warnings

import another_process
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
        # ours says that check_vma=False needs to be told about pipelines
        with (
            warnings.catch_warnings(action="ignore"),
            tally.raising(f"check_vma={checked}"),
        ):
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
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def run(rank, file):
        module = "tests.bad_days.process"
        root = pathlib.Path(__file__).parents[2]
        another_process.python("-m", module, library.name, rank, port, file, cwd=root)

    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{rank}.npz" for rank in range(2)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2), files))
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
