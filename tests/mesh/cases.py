"""A model whose arithmetic is exact in any order, so that training it on a mesh must
give one device's bits.

Every tensor that is quantized has an amax of 7 times a power of two. FP8_MAX is that
too, so all scales are powers of two, and all sums are of multiples of 2**-6 that stay
below 2**18: f32 holds each partial sum exactly. Only rounding to FP8 is left, which is
elementwise. `tests/mesh/test_jit_meshes.py` checks these properties.

In every tensor and step one small block is twice as large as the rest, and lies
elsewhere in the next step: a device that knew its own shards only would scale
differently.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from programs.cases import MATMUL as MATMUL, row as row, stacked as stacked

import jaxfp8

STEPS = 10
BATCH, LENGTH, WIDTH, HIDDEN = 8, 16, 32, 64
AXES = ("data", "fsdp", "tp")
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
ROWS_BY_COLUMNS = (((2,), (0,)), ((), ()))  # x [b, s, k], kernel [k, n]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays of `mlp` are cut: x and y `[b, s, d]`, h `[b, s, f]`, w1 `[d, f]`,
    w2 `[f, d]`.
    """

    x: P
    w1: P
    w2: P
    h: P
    y: P

    @property
    def weights(self) -> dict:
        return {"w1": self.w1, "w2": self.w2}

    @property
    def batch(self) -> "Batch":
        return Batch(x=self.x, target=self.y, size=P(self.h[0], None, *self.h[2:]))


_DP = Layout(x=P(AXES), w1=P(), w2=P(), h=P(AXES), y=P(AXES))
_TP = Layout(
    x=P("data"),
    w1=P(None, "tp"),
    w2=P("tp", None),
    h=P("data", None, "tp"),
    y=P("data"),
)
_BATCH = ("data", "fsdp")
_FSDP_TP = Layout(
    x=P(_BATCH),
    w1=P("fsdp", "tp"),
    w2=P("tp", "fsdp"),
    h=P(_BATCH, None, "tp"),
    y=P(_BATCH),
)


def _in_sequence(layout, batch) -> Layout:
    """Places of the sequence are cut between products (SP)."""
    return dataclasses.replace(layout, x=P(batch, "tp"), y=P(batch, "tp"))


LAYOUTS = {
    "dp": _DP,
    "fsdp": dataclasses.replace(_DP, w1=P(AXES, None), w2=P(AXES, None)),
    "tp": _TP,
    "fsdp+tp": _FSDP_TP,
    "sp": _in_sequence(_TP, "data"),
    "all": _in_sequence(_FSDP_TP, _BATCH),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    """x and target `[b, s, d]`, and the sizes `[b, 1, f]` of the hidden layer's values
    and gradients.
    """

    x: jax.Array
    target: jax.Array
    size: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Run:
    """The end of a training: weights and state after the last step, the losses of
    all.
    """

    weights: dict
    state: dict
    losses: list


def mesh(kind: str = "auto", shape=(2, 2, 2), axes=AXES):
    """A mesh with `auto` or `explicit` axes."""
    return jax.make_mesh(shape, axes, axis_types=(AxisType[kind.title()],) * len(axes))


def weights() -> dict:
    """Multiples of 1/4 up to 3/4, and one 7/4; f32."""
    rng = np.random.default_rng(0)
    values = {}
    for name, shape, largest in (
        ("w1", (WIDTH, HIDDEN), (0, 0)),
        ("w2", (HIDDEN, WIDTH), (-1, -1)),
    ):
        values[name] = rng.integers(-3, 4, shape).astype(np.float32) / 4
        values[name][largest] = 1.75
    return values


def state(recipe=RECIPE) -> dict:
    return {name: jaxfp8.init_state(recipe) for name in ("w1", "w2")}


def stateless() -> dict:
    return dict.fromkeys(("w1", "w2"), jaxfp8.DotGeneralState(None, None, None))


def tensor(rng, level):
    """f32 `[b, s, d]`: multiples of 1/8 up to 3.5, twice that in half of a row, one 7;
    times 2**level; and the row.
    """
    values = rng.integers(-28, 29, (BATCH, LENGTH, WIDTH)).astype(np.float32) / 8
    row = rng.integers(BATCH)
    half = rng.integers(2) * LENGTH // 2
    values[row, half : half + LENGTH // 2] *= 2
    values[row, half + rng.integers(LENGTH // 2), rng.integers(WIDTH)] = 7
    return values * np.float32(2.0**level), row


def hidden_sizes(rng, row):
    """f32 `[b, 1, f]`: 0.5, and 1 in one block of a row; and where that begins."""
    size = np.full((BATCH, 1, HIDDEN), 0.5, np.float32)
    column = rng.integers(HIDDEN // 8) * 8
    size[row, :, column : column + 8] = 1
    return size, column


@functools.cache
def batches(dtype=jnp.bfloat16) -> list:
    """The data of each step, in numpy; x in `dtype`, the rest in f32."""
    rng = np.random.default_rng(1)

    def batch(level):
        x, row = tensor(rng, level)
        target, _ = tensor(rng, -level)
        size, _ = hidden_sizes(rng, row)
        return Batch(x.astype(dtype), target, size * np.float32(2.0 ** min(level, 0)))

    return [batch(level) for level in (0, 1, 0, 0, -1, 0, 1, 1, 0, -1)[:STEPS]]


def dot(x, kernel, state, recipe=RECIPE, out_sharding=None):
    return jaxfp8.dot_general(
        x,
        kernel,
        ROWS_BY_COLUMNS,
        recipe=recipe,
        state=state,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )


@jax.custom_vjp
def activation(y, size):
    """Multiples of 1/4 between 0 and 7, times `size`; the gradient passes through and
    is treated alike.
    """
    return jnp.clip(jnp.round(y * 4) / 4, 0, 7) * size


activation.defvjp(
    lambda y, size: (activation(y, size), size),
    lambda size, ct: (jnp.clip(jnp.round(ct * 4) / 4, -7, 7) * size, None),
)


def mlp(
    weights,
    state,
    batch,
    recipe=RECIPE,
    place=lambda value, name: value,
    out=lambda name: None,
):
    """`activation(x @ w1) @ w2`, f32 `[b, s, d]`.

    Args:
        weights, state, batch, recipe: of the model.
        place: `(value, "h" or "y") -> value`, where a program constrains shardings.
        out: `"h" or "y" -> out_sharding` of the products.
    """
    h = dot(batch.x, weights["w1"], state["w1"], recipe, out("h"))
    h = place(activation(h, batch.size).astype(batch.x.dtype), "h")
    return place(dot(h, weights["w2"], state["w2"], recipe, out("y")), "y")


def loss(weights, state, batch, **options):
    return jnp.sum(mlp(weights, state, batch, **options) * batch.target)


def next_weights(weights, gradient):
    """A step of 1/4s; the largest weight goes from 7/4 to 7/2 and back. Where g is not
    finite w stays. Elementwise.
    """

    def step(w, g):
        new = jnp.where(
            jnp.abs(w) > 1, 5.25 - w, jnp.clip(w - jnp.round(g / 128) / 4, -0.75, 0.75)
        )
        return jnp.where(jnp.isfinite(g), new, w)

    return jax.tree.map(step, weights, gradient)


def make_step(loss=loss):
    """`(weights, state, batch) -> (weights, state, loss)`."""

    def step(weights, state, batch):
        value, (of_weights, of_state) = jax.value_and_grad(loss, argnums=(0, 1))(
            weights, state, batch
        )
        if jax.tree.leaves(state):
            state = jaxfp8.update_state(state, of_state)
        return next_weights(weights, of_weights), state, value

    return step


def train(step, weights, state, batches) -> Run:
    losses = []
    for batch in batches:
        weights, state, value = step(weights, state, batch)
        losses.append(value)
    return Run(weights, state, losses)


@functools.cache
def reference(recipe=RECIPE, with_state=True, dtype=jnp.bfloat16, steps=STEPS) -> Run:
    """The training on one device."""
    first = state(recipe) if with_state else stateless()
    step = jax.jit(make_step(functools.partial(loss, recipe=recipe)))
    return jax.device_get(train(step, weights(), first, batches(dtype)[:steps]))


def put(tree, mesh, specs):
    """`tree` on a mesh; `specs` is a tree of PartitionSpecs, or one for all leaves."""
    return jax.device_put(tree, shardings(mesh, specs))


def shardings(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def assert_same(got, wanted, what):
    """Bitwise, leaf by leaf; and what is replicated is the same on every device."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, leaf), value in pairs:
        name = f"{what}: {jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array):
            by_index = {}
            for shard in leaf.addressable_shards:
                first = by_index.setdefault(str(shard.index), shard)
                assert _bits(first.data) == _bits(shard.data), (
                    f"{name}: differs on {first.device} and {shard.device}"
                )
        assert leaf.dtype == value.dtype, f"{name}: {leaf.dtype}, not {value.dtype}"
        np.testing.assert_array_equal(leaf, value, err_msg=name)


def _bits(x) -> bytes:
    return np.asarray(x).tobytes()


def step_on(mesh, layout, recipe=RECIPE):
    """The step in a program whose arrays XLA cuts (auto axes) or types cut (explicit
    axes).
    """
    is_explicit = mesh.axis_types[0] == AxisType.Explicit

    def named(name):
        return NamedSharding(mesh, getattr(layout, name))

    def place(value, name):
        if is_explicit:
            return jax.sharding.reshard(value, named(name))
        return jax.lax.with_sharding_constraint(value, named(name))

    def out(name):
        return named(name) if is_explicit else None

    return make_step(functools.partial(loss, recipe=recipe, place=place, out=out))


def jitted(mesh, layout, recipe=RECIPE):
    """`step_on`, with results placed like the arguments."""
    return jax.jit(
        step_on(mesh, layout, recipe),
        out_shardings=shardings(mesh, (layout.weights, P(), P())),
    )


def arguments(mesh, layout, recipe=RECIPE, with_state=True, dtype=jnp.bfloat16):
    """`(weights, state, batches)` on the mesh."""
    first = state(recipe) if with_state else stateless()
    data = [put(batch, mesh, layout.batch) for batch in batches(dtype)]
    return put(weights(), mesh, layout.weights), put(first, mesh, P()), data
