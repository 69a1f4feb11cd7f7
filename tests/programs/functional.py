"""Programs of `jaxfp8.dot_general` in JAX's own transformations."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxfp8

from . import cases
from .known_amax import OWN, USES, Program, named, packed


def max_grad(loss, **options):
    """`jax.value_and_grad` with one cast at the top of the loss."""
    return jax.value_and_grad(
        lambda layer, *args: loss(jaxfp8.max_grad(layer), *args), **options
    )


def accumulated(loss, argnums):
    """The gradient of each use by itself; gradients add, and states combine."""

    def run(layer, xs, grads):
        total, values, dxs = None, [], []
        for i in range(len(xs)):
            value, (gradient, dx) = jax.value_and_grad(loss, argnums)(
                layer, xs[i : i + 1], grads[i : i + 1]
            )
            total = jaxfp8.accumulate_gradients(total, gradient)
            values, dxs = [*values, value], [*dxs, dx]
        return sum(values), (total, jnp.concatenate(dxs))

    return run


class Functional:
    """A layer is `(kernel, state)`."""

    product = staticmethod(cases.product)

    def __init__(
        self,
        program,
        recipe,
        kernel,
        state,
        differentiate=jaxfp8.value_and_grad,
        jit=True,
    ):
        self.packed = jaxfp8.DotGeneralState(None, None, None)
        if state:
            self.packed = packed(state)

        def use(layer, x, grad):
            y = self.product(x, *layer, recipe)
            return jnp.sum(y.astype(jnp.float32) * grad.astype(jnp.float32))

        def loss(layer, xs, grads):
            return program.run(use, layer, xs, grads)

        self.run = differentiate(loss, argnums=(0, 1))
        self.run = jax.jit(self.run) if jit else self.run

    def step(self, kernel, xs, grads):
        value, ((dkernel, state), dx) = self.run((kernel, self.packed), xs, grads)
        if self.state:
            self.packed = jaxfp8.update_state(self.packed, state)
        return value, dkernel, dx

    @property
    def state(self):
        return named(self.packed) if jax.tree.leaves(self.packed) else {}


class Ragged(Functional):
    """The same by `jaxfp8.ragged_dot`, with one kernel for two groups of rows."""

    @staticmethod
    def product(x, kernel, state, recipe):
        sizes = jnp.array([1, len(x) - 1], jnp.int32)
        return jaxfp8.ragged_dot(
            x, jnp.stack([kernel, kernel]), sizes, recipe=recipe, state=state
        )


def loop(use, layer, xs, grads):
    return sum(use(layer, x, grad) for x, grad in zip(xs, grads, strict=True))


def scan(use, layer, xs, grads, **options):
    return lax.scan(
        lambda total, xg: (total + use(layer, *xg), None),
        jnp.float32(0),
        (xs, grads),
        **options,
    )[0]


def vmap(use, layer, xs, grads):
    return jnp.sum(jax.vmap(lambda x, grad: use(layer, x, grad))(xs, grads))


def vmap_of_columns(use, layer, xs, grads):
    each = jax.vmap(lambda x, grad: use(layer, x, grad), (1, 2))
    return jnp.sum(each(jnp.moveaxis(xs, 0, 1), jnp.moveaxis(grads, 0, 2)))


def pairs(array):
    return array.reshape(2, -1, *array.shape[1:])


def nested(outer, inner):
    """One program around another, each over half of the uses."""

    def run(use, layer, xs, grads):
        half = functools.partial(inner, use)
        return outer(half, layer, pairs(xs), pairs(grads))

    return run


def around(transformation, program):
    """A program of a use that is transformed, where the use closes over its layer."""

    def run(use, layer, xs, grads):
        transformed = transformation(lambda x, grad: use(layer, x, grad))
        return program(lambda _, x, grad: transformed(x, grad), layer, xs, grads)

    return run


def with_arguments(transformation):
    """A program of uses that are transformed with the layer as an argument."""
    return lambda use, layer, xs, grads: loop(transformation(use), layer, xs, grads)


def of_scan(transformation):
    return lambda use, layer, xs, grads: transformation(
        lambda xs, grads: scan(use, layer, xs, grads)
    )(xs, grads)


def map_in_batches(use, layer, xs, grads):
    # one of the four is left over
    return jnp.sum(lax.map(lambda xg: use(layer, *xg), (xs, grads), batch_size=3))


def fori_loop(use, layer, xs, grads):
    xs, grads = jnp.asarray(xs), jnp.asarray(grads)
    return lax.fori_loop(
        0, len(xs), lambda i, total: total + use(layer, xs[i], grads[i]), jnp.float32(0)
    )


def numbered(use, layer, xs, grads):
    """A scan of uses that know their number."""

    def body(total, at):
        return total + use(layer, *at), None

    return lax.scan(body, jnp.float32(0), (jnp.arange(len(xs)), xs, grads))[0]


def branches(use, *arguments):
    """Both branches use the state, each in every other iteration."""

    def one(layer, index, x, grad):
        return lax.cond(
            index % 2 == 0, lambda: use(layer, x, grad), lambda: use(layer, -x, -grad)
        )

    return numbered(one, *arguments)


def switch(use, layer, xs, grads):
    both = [
        lambda x, grad, sign=sign: use(layer, x * sign, grad * sign)
        for sign in (1.0, -1.0)
    ]
    return sum(
        lax.switch(jnp.int32(i % 2), both, x, grad)
        for i, (x, grad) in enumerate(zip(xs, grads, strict=True))
    )


def vectors(use, layer, xs, grads):
    """Equinox's way: the layer sees one example."""
    rows = jax.vmap(lambda x, grad: use(layer, x, grad))
    return jnp.sum(jax.vmap(rows)(xs, grads))


def carried(use, layer, xs, grads):
    def body(carry, xg):
        layer, total = carry
        return (layer, total + use(layer, *xg)), None

    return lax.scan(body, (layer, jnp.float32(0)), (xs, grads))[0][1]


def stacked_copies(use, layer, xs, grads):
    """Copies of the layer as the xs of a scan: their cotangents meet in the
    broadcast.
    """
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(xs)), layer)
    return lax.scan(
        lambda total, at: (total + use(*at), None), jnp.float32(0), (copies, xs, grads)
    )[0]


def cond_with_arguments(use):
    return lambda layer, x, grad: lax.cond(
        x[0, 0] > 0, use, lambda *args: use(*args), layer, x, grad
    )


def some_iterations(use, *arguments):
    def one(layer, index, x, grad):
        return lax.cond(
            index % 2 == 1, lambda: use(layer, x, grad), lambda: jnp.float32(0)
        )

    return numbered(one, *arguments)


def not_taken(use, layer, xs, grads):
    return lax.cond(
        xs[0, 0, 0] == jnp.inf,
        lambda: use(layer, xs[0], grads[0]),
        lambda: jnp.float32(0),
    )


def layers_in_a_scan(use, layer, xs, grads):
    def body(total, at):
        return total + use(*at), None

    return lax.scan(body, jnp.float32(0), (layer, xs, grads))[0]


def shard_map(use, layer, xs, grads):
    """Each device runs a part of the uses; what is replicated gets the gradients of
    all.
    """
    mesh = jax.make_mesh((2,), ("uses",), axis_types=(AxisType.Auto,))

    def local(layer, xs, grads):
        return lax.psum(loop(use, layer, xs, grads), "uses")

    specs = (P(), P("uses"), P("uses"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(
        layer, xs, grads
    )


def members(kernel, state):
    """vmap over the layers too, those leaves that each use has for itself."""
    return lambda use, layer, xs, grads: jnp.sum(
        jax.vmap(use, ((kernel, state), 0, 0))(layer, xs, grads)
    )


POLICIES = {
    name: functools.partial(
        jax.checkpoint, policy=getattr(jaxfp8.checkpoint_policies, name)
    )
    for name in (
        "save_fp8_residuals",
        "save_gemm_outputs",
        "save_fp8_residuals_and_gemm_outputs",
    )
} | {
    "dots_saveable": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
    )
}
ALL, HALVES = (tuple(range(USES)),), ((0, 1), (2, 3))
PROGRAMS = {
    "loop": Program(loop),
    "scan": Program(scan),
    "scan of scan": Program(nested(scan, scan)),
    "scan, reversed and unrolled": Program(
        functools.partial(scan, unroll=2, reverse=True)
    ),
    "map in batches": Program(map_in_batches, groups=((0, 1, 2), (3,))),
    "fori_loop": Program(fori_loop),
    "remat in scan": Program(around(jax.checkpoint, scan)),
    "scan in remat": Program(of_scan(jax.checkpoint)),
    "jit in scan": Program(around(jax.jit, scan)),
    "branches in scan": Program(branches),
    "switch": Program(switch),
    "vmap": Program(vmap, groups=ALL),
    "vmap of vmap": Program(nested(vmap, vmap), groups=ALL),
    "vmap of vectors": Program(vectors, groups=ALL),
    "vmap in scan": Program(nested(scan, vmap), groups=HALVES),
    "scan in vmap": Program(nested(vmap, scan), groups=((0, 2), (1, 3))),
    "vmap with arguments": Program(members(None, None), groups=ALL),
    "remat with arguments": Program(with_arguments(jax.checkpoint), cast=True),
    **{
        f"remat, {name}": Program(with_arguments(remat), cast=True)
        for name, remat in POLICIES.items()
    },
    "jit with arguments": Program(with_arguments(jax.jit), cast=True),
    "cond with arguments": Program(with_arguments(cond_with_arguments), cast=True),
    "carry": Program(carried, cast=True),
    "stacked copies": Program(stacked_copies, cast=True),
    "shard_map": Program(shard_map, across=((0, 2), (1, 3))),
    "some iterations": Program(some_iterations, used=(1, 3)),
    "not taken": Program(not_taken, used=()),
    "layers in a scan": Program(layers_in_a_scan, own=OWN),
    "members": Program(members(0, 0), own=OWN),
    "members of one kernel": Program(members(None, 0), own=("state",), groups=ALL),
    "experts of one state": Program(members(0, None), own=("kernel",)),
    "vmap of columns": Program(vmap_of_columns, groups=ALL),
}
RAGGED = {
    name: PROGRAMS[name]
    for name in (
        "loop",
        "scan",
        "vmap",
        "scan in vmap",
        "carry",
        "remat with arguments",
        "shard_map",
        "layers in a scan",
        "members",
    )
}
