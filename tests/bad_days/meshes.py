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
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from .libraries import LIBRARIES, OPERANDS, OWG
from .steps import amaxes, normal, operands as given, tally_amaxes
from .verdict import Tally, row

M, K, N = 16, 24, 8
LAYOUTS = {  # of x, the kernel and the gradient
    "dp": (P(("data", "fsdp", "tp")), P(), P(("data", "fsdp", "tp"))),
    "fsdp": (P(("data", "fsdp", "tp")), P(("data", "fsdp", "tp")), P(("data", "fsdp", "tp"))),
    "tp, columns": (P("data"), P(None, "tp"), P("data", "tp")),
    "tp, rows": (P("data", "tp"), P("tp"), P("data")),
    "fsdp+tp": (P(("data", "fsdp")), P("fsdp", "tp"), P(("data", "fsdp"), "tp")),
}


def cube():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


def data(i=0):
    """x, kernel and grad whose largest value one device alone has."""
    values = given(M, K, N, seed=3 * i)
    for value in values:
        value[-1, -1] = 8
    return values


def gradient_of(library):
    layer = library.dense(N)
    return lambda variables, x, grad: jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad))(variables)


def tally_state(tally, library, variables, operands, what):
    """Slot 0 is the amax of the whole tensor, and all devices have the same state."""
    tally_amaxes(tally, library, variables, operands, f"{what}, ")
    for leaf in jax.tree.leaves(variables[OWG]):
        shards = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
        tally(len(shards) == 1, f"{what}: {len(shards)} versions of the state")


@row(
    "DP, FSDP, TP, SP and combinations on 2x2x2: state identical on all devices and equal to one device's",
    any_layer=True,
)
def under_jit(library):
    mesh, tally, operands = cube(), Tally(), data()
    x, kernel, grad = operands
    for name, specs in LAYOUTS.items():
        put = {key: NamedSharding(mesh, spec) for key, spec in zip(("x", "kernel", "grad"), specs, strict=True)}
        variables = jax.device_put(library.variables(kernel), NamedSharding(mesh, P()))
        variables["params"]["kernel"] = jax.device_put(kernel, put["kernel"])
        with jax.set_mesh(mesh):
            after = jax.jit(gradient_of(library))(
                variables, jax.device_put(x, put["x"]), jax.device_put(grad, put["grad"])
            )
        tally_state(tally, library, after, operands, name)
    return tally.verdict()


def in_shard_map(library, gradient, checked):
    """The gradient of a step over eight devices; the state of each, stacked."""
    mesh = cube()
    axes = mesh.axis_names

    def step(variables, x, grad):
        state = gradient(variables, x, grad)[OWG]
        return jax.tree.map(lambda leaf: leaf[None], state)

    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P(axes), P(axes)), out_specs=P(axes), check_vma=checked)
    )


@row("the same in `shard_map`, `check_vma` on and off, gradients inside and outside, some axes manual", any_layer=True)
def with_shard_map(library):
    tally, operands = Tally(), data()
    x, kernel, grad = operands
    for checked in (True, False):
        with warnings.catch_warnings(), tally.raising(f"check_vma={checked}"):
            warnings.simplefilter("ignore")  # ours says that check_vma=False needs to be told about pipelines
            step = in_shard_map(library, gradient_of(library), checked)
            state = step(library.variables(kernel), x, grad)
            for name, true in amaxes(*operands).items():
                slots = np.asarray(state[library.module][f"{name}_amax_history"])[:, 0]
                what = f"check_vma={checked}, {name}: {slots.min() / true:.3g} to {slots.max() / true:.3g} of the amax"
                tally(np.allclose(slots, true, rtol=1e-6), what)
    return tally.verdict()


@row("pipeline: never reduced across stages, no hang", any_layer=True)
def pipeline(library):
    """Eight stages, each with its kernel and state: the state of a stage is that of its own data."""
    mesh, tally = jax.make_mesh((8,), ("stage",), axis_types=(AxisType.Auto,)), Tally()
    stages = [data(i) for i in range(8)]
    x, kernel, grad = (np.stack([2.0**i * s[j] for i, s in enumerate(stages)]).astype(np.float32) for j in range(3))
    variables = jax.tree.map(lambda leaf: np.stack([leaf] * 8), library.variables(kernel[0]))
    variables["params"]["kernel"] = kernel
    layer = library.dense(N)
    if library.is_ours:
        layer = library.dense(N, cls=library.dot_general_cls(pipeline_axes=("stage",)))

    def step(variables, x, grad):
        own = jax.tree.map(lambda leaf: leaf[0], variables)
        state = jax.grad(lambda v: jnp.vdot(layer.apply(v, x[0]), grad[0]))(own)[OWG]
        return jax.tree.map(lambda leaf: leaf[None], state)

    specs = {"in_specs": P("stage"), "out_specs": P("stage"), "check_vma": False}
    state = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(variables, x, grad)
    for name, values in zip(OPERANDS, (x, kernel, grad), strict=True):
        slots = np.asarray(state[library.module][f"{name}_amax_history"])[:, 0]
        tally(np.array_equal(slots, np.abs(values).max((1, 2))), f"{name}: {slots}")
    return tally.verdict("each stage has its own")


@row("uneven shards: padding never enters an amax", any_layer=True)
def uneven(library):
    """13 rows on eight devices, cut inside the program, of values that padding cannot hide behind."""
    mesh, tally = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), Tally()
    x, kernel, grad = operands = normal(0, (13, K)), normal(1, (K, N)), normal(2, (13, N), 1e-3)

    def step(variables, x, grad):
        cut = NamedSharding(mesh, P("data"))
        x, grad = (jax.lax.with_sharding_constraint(v, cut) for v in (x, grad))
        return gradient_of(library)(variables, x, grad)

    with jax.set_mesh(mesh):
        after = jax.jit(step, out_shardings=NamedSharding(mesh, P()))(library.variables(kernel), x, grad)
    tally_state(tally, library, after, operands, "13 rows on 8 devices")
    return tally.verdict()


@row("TP partial sums: amax of the reduced value", any_layer=True)
def partial_sums(library):
    """Two layers, the first cut along its contraction: the second's input is the sum of partial products.

    Every partial product is ten times the sum, so its amax would show. All values are exact in FP8 at scale 1.
    """
    mesh, tally = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,)), Tally()
    x = np.ones((4, 16), np.float32)
    first = np.ones((16, N), np.float32) * np.where(np.arange(16) % 4 < 2, 20, -20)[:, None].astype(np.float32)
    first[0] = 22  # the sum is 2; the partial product of each device is 40 or -40
    layers, grad = (library.dense(N), library.dense(3)), np.ones((4, 3), np.float32)
    variables = [library.variables(first), library.variables(np.ones((N, 3), np.float32))]

    def step(variables, x):
        def loss(variables):
            return jnp.vdot(layers[1].apply(variables[1], layers[0].apply(variables[0], x)), grad)

        return jax.grad(loss)(variables)

    variables[0]["params"]["kernel"] = jax.device_put(first, NamedSharding(mesh, P("tp")))
    with jax.set_mesh(mesh):
        after = jax.jit(step)(variables, jax.device_put(x, NamedSharding(mesh, P(None, "tp"))))
    exact = np.abs(x @ first).max()
    slot = library.history(after[1], "input")[0]
    tally(slot == exact, f"amax {slot:g}, of the sum {exact:g}")
    return tally.verdict(f"amax {slot:g} of the sum, 40 of its parts")


def run_together(commands, seconds, **options):
    """Run commands at the same time; when one fails, or time is up, kill all of them."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options) for command in commands]
    try:
        for process in running:
            _, errors = process.communicate(timeout=seconds)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in running:
            process.kill()


@row("processes over Gloo: as one")
def processes(library):
    """Two processes with half of the batch each, a step with a NaN on the second: both have one device's state."""
    tally, root = Tally(), pathlib.Path(__file__).parents[2]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    name = next(key for key, value in LIBRARIES.items() if value.name == library.name)
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{rank}.npz" for rank in range(2)]
        module = "tests.bad_days.process"
        run_together(
            [[sys.executable, "-m", module, name, str(rank), str(port), files[rank]] for rank in range(2)],
            90,
            cwd=root,
        )
        states = [dict(np.load(file)) for file in files]
    for key, leaf in states[0].items():
        tally(leaf.tobytes() == states[1][key].tobytes(), f"{key} differs between the processes")
        tally(np.isfinite(leaf).all(), f"{key} is {leaf.ravel()[:4]} after a NaN")
    x = data()[0]
    good = states[0]["good_input_amax_history"][0]
    tally(good == np.abs(x).max(), f"amax {good:g}, of the whole batch {np.abs(x).max():g}")
    return tally.verdict("the same bits, finite")
