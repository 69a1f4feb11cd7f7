"""The run in JAX, with donated buffers, on meshes and through checkpoints; compared
with numpy after every step.
"""

import collections
import functools
import pathlib
import tempfile

import flax.serialization
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P
from mesh import cases
from programs.cases import pack

import jaxfp8
from jaxfp8 import mixed_precision

from . import program, simulation

RECIPE = jaxfp8.DelayedScaling(amax_history_len=simulation.HISTORY)
SHAPES = {"dp": (2, 2, 2), "fsdp 2x4": (2, 4, 1), "fsdp+tp 2x2x2": (2, 2, 2)}
LAYOUTS = {"dp": "dp", "fsdp 2x4": "fsdp+tp", "fsdp+tp 2x2x2": "fsdp+tp"}


def _bounded(y, size, pin, low):
    return jnp.where(pin, 7, jnp.clip(jnp.round(y * 4) / 4, low, 7)) * size


@jax.custom_vjp
def activation(y, size, pin):
    """Multiples of 1/4 from 0 to 7, times `size`; the gradient passes through and is
    treated alike, from -7 on.
    """
    return _bounded(y, size, pin, 0)


activation.defvjp(
    lambda y, size, pin: (activation(y, size, pin), (size, pin)),
    lambda of, ct: (_bounded(ct, *of, -7), None, None),
)


def loss(weights, state, batch, place):
    x, target, size, pin = batch
    h = place(cases.dot(x, weights["w1"], state["w1"], RECIPE), "h")
    h = place(activation(h, size, pin).astype(x.dtype), "h")
    return jnp.sum(
        place(cases.dot(h, weights["w2"], state["w2"], RECIPE), "y") * target
    )


def train_step(trainer, place, tree, batches):
    """The next `{"weights", "state"}`."""

    def gradient(batch):
        of_weights, of_state = jax.grad(loss, argnums=(0, 1))(
            tree["weights"], tree["state"], batch, place
        )
        return {"weights": of_weights, "state": of_state}

    total = functools.reduce(jaxfp8.accumulate_gradients, map(gradient, batches), None)
    after = {
        "weights": cases.next_weights(tree["weights"], total["weights"]),
        "state": jaxfp8.update_state(tree["state"], total["state"]),
    }
    if trainer == "skipping":
        return mixed_precision.select(
            mixed_precision.all_finite(total["weights"]), after, tree
        )
    return after


class Place:
    """A mesh, or one device: how the tree lies there, and the compiled steps."""

    def __init__(self, name):
        self.mesh = None
        if name != "one device":
            self.mesh = cases.mesh(shape=SHAPES[name])
            self.layout = cases.LAYOUTS[LAYOUTS[name]]
        self.steps = {}

    def put(self, tree):
        if self.mesh is None:
            return jax.device_put(tree, jax.devices()[0])
        return jax.device_put(tree, self.shardings())

    def shardings(self):
        return cases.shardings(
            self.mesh, {"weights": self.layout.weights, "state": P()}
        )

    def constrained(self, value, name):
        if self.mesh is None:
            return value
        return jax.lax.with_sharding_constraint(
            value, NamedSharding(self.mesh, getattr(self.layout, name))
        )

    def step(self, trainer):
        """`(tree, batches) -> tree`; the tree is donated."""
        if trainer not in self.steps:
            options = {} if self.mesh is None else {"out_shardings": self.shardings()}
            step = functools.partial(train_step, trainer, self.constrained)
            self.steps[trainer] = jax.jit(step, donate_argnums=0, **options)
        return self.steps[trainer]

    def put_batch(self, batch):
        if self.mesh is None:
            return batch
        rows = NamedSharding(self.mesh, self.layout.x)
        return tuple(jax.device_put(value, rows) for value in batch)


class Checkpoints:
    """The last checkpoint, in msgpack and orbax by turns, and the simulation at that
    time.
    """

    def __init__(self, folder):
        self.folder, self.count, self.last = folder, 0, None

    def save(self, tree, simulated):
        self.count += 1
        path = self.folder / str(self.count)
        if self.count % 2:
            path.write_bytes(flax.serialization.to_bytes(tree))
        else:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(path, tree)
        self.last = path, simulated

    def restore(self, like):
        """`(tree, simulation)`; the tree lies as `like` does."""
        path, simulated = self.last
        if path.is_file():
            restored = flax.serialization.from_bytes(
                jax.device_get(like), path.read_bytes()
            )
            return jax.device_put(
                restored, jax.tree.map(lambda leaf: leaf.sharding, like)
            ), simulated
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(
                path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            ), simulated


def expected(simulated: simulation.Run) -> dict:
    """The simulation as the tree of the run."""

    return {
        "weights": simulated.weights,
        "state": {name: pack(layer) for name, layer in simulated.state.items()},
    }


def soak(events, said=lambda step, counts: None) -> collections.Counter:
    """Runs the events of `program` and compares; how often everything happened.

    Raises:
        AssertionError: at the first bit that differs, with the step, its event and the
            leaf.
    """
    places = {}
    counts = collections.Counter()
    simulated = simulation.Run.start(cases.weights())
    mesh = program.MESHES[0]
    tree = None
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(pathlib.Path(folder))
        for i, event in enumerate(events):
            if event.mesh not in places:
                places[event.mesh] = Place(event.mesh)
            place = places[event.mesh]
            if tree is None or event.mesh != mesh:
                counts["mesh changes"] += tree is not None
                tree = place.put(
                    expected(simulated) if tree is None else jax.device_get(tree)
                )
                mesh = event.mesh
            if event.before in ("save", "restart"):
                checkpoints.save(tree, simulated)
                counts["saved"] += 1
            if event.before in ("restore", "restart") and checkpoints.last:
                tree, simulated = checkpoints.restore(tree)
                counts["restored"] += 1
            given = tree
            tree = place.step(event.trainer)(
                tree, [place.put_batch(batch) for batch in event.batches]
            )
            before = simulated
            simulated = simulation.step(simulated, event)
            where = f"step {i} ({event})"
            cases.assert_same(tree, expected(simulated), where)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), (
                f"{where}: buffers were not donated"
            )
            counts.update([event.what, event.trainer, event.mesh])
            counts["skipped"] += simulated is before
            counts["steps"] += 1
            said(i, counts)
    return counts
