"""Programs of NNX's transformations; without `cast` a program is right under NNX's own
gradient too.
"""

import functools

import jax
import jax.numpy as jnp
from draws import KEY
from flax import nnx

import jaxfp8
import jaxfp8.nnx

from .known_amax import OWN, USES, K, M, N, Program
from .linen import make_dense


def use(layer, x, grad):
    return jnp.vdot(layer(x), grad)


def plain(loss):
    """NNX's own gradient, of parameters and state."""
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, jaxfp8.nnx.trainable))


def max_grad(loss):
    """The context manager by itself, for a loss that is differentiated by other
    means.
    """

    def cast(layer, xs, grads):
        with jaxfp8.nnx.max_grad(layer):
            return loss(layer, xs, grads)

    return nnx.value_and_grad(cast, argnums=nnx.DiffState(0, ...))


def of_split_state(loss):
    """The gradient of a split model's `nnx.State` in place of that of the module."""

    def run(layer, xs, grads):
        graphdef, state = nnx.split(layer)
        merged = lambda state, xs, grads: loss(nnx.merge(graphdef, state), xs, grads)  # noqa: E731
        return jaxfp8.nnx.value_and_grad(merged)(state, xs, grads)

    return run


class NNX:
    """A layer is an `nnx.Linear`, or a stack of them; `product` is the name of what
    holds the state.
    """

    product = "dot_general"

    @staticmethod
    def make(recipe, key):
        dot_general = jaxfp8.nnx.Fp8DotGeneral(recipe)
        return nnx.Linear(
            K, N, use_bias=False, dot_general=dot_general, rngs=nnx.Rngs(key)
        )

    def __init__(
        self,
        program,
        recipe,
        kernel,
        state,
        differentiate=jaxfp8.nnx.value_and_grad,
        jit=True,
    ):
        make = functools.partial(self.make, recipe)
        keys = jax.random.split(KEY, USES)
        self.layer = nnx.vmap(make)(keys) if kernel.ndim == 3 else make(0)
        if state:
            variables = nnx.state(self.layer, jaxfp8.nnx.OverwriteWithGradient)
            nnx.replace_by_pure_dict(
                variables, {self.product: jax.tree.map(jnp.asarray, state)}
            )
            nnx.update(self.layer, variables)

        def step(layer, xs, grads):
            value, gradient = differentiate(functools.partial(program.run, use))(
                layer, xs, grads
            )
            jaxfp8.nnx.update_state(layer, gradient)
            return value, gradient.kernel.get_value()

        self.run = nnx.jit(step) if jit else step

    def step(self, kernel, xs, grads):
        self.layer.kernel.set_value(jnp.asarray(kernel))
        return *self.run(self.layer, xs, grads), None

    @property
    def state(self):
        leaves = nnx.to_pure_dict(
            nnx.state(self.layer, jaxfp8.nnx.OverwriteWithGradient)
        )
        return leaves[self.product] if leaves else {}


class Einsum(NNX):
    """A layer is an `nnx.Einsum`."""

    product = "einsum_op"

    @staticmethod
    def make(recipe, key):
        return nnx.Einsum(
            "mk,kn->mn",
            (K, N),
            einsum_op=jaxfp8.nnx.Fp8Einsum(recipe),
            rngs=nnx.Rngs(key),
        )


class LinenInNNX(NNX):
    """A layer is an `nn.Dense` in `nnx.bridge.ToNNX`."""

    product = "Fp8DotGeneral_0"

    @staticmethod
    def make(recipe, key):
        return nnx.bridge.ToNNX(make_dense(recipe), rngs=nnx.Rngs(key)).lazy_init(
            jnp.ones((M, K))
        )


def each(use, layer, xs, grads):
    return sum(use(layer, x, grad) for x, grad in zip(xs, grads, strict=True))


def each_under(transformation):
    return lambda use, layer, xs, grads: each(transformation(use), layer, xs, grads)


def all_under(transformation):
    return lambda use, layer, xs, grads: transformation(functools.partial(each, use))(
        layer, xs, grads
    )


def split_and_merge(use, layer, xs, grads):
    parts = nnx.split(layer)
    return each(
        lambda parts, x, grad: use(nnx.merge(*parts), x, grad), parts, xs, grads
    )


def scan_closed_over(use, layer, xs, grads):
    return jax.lax.scan(
        lambda total, xg: (total + use(layer, *xg), None), jnp.float32(0), (xs, grads)
    )[0]


def scan(use, layer, xs, grads):
    return nnx.scan(use, in_axes=(nnx.StateAxes({...: None}), 0, 0), out_axes=0)(
        layer, xs, grads
    ).sum()


def scan_carried(use, layer, xs, grads):
    def body(carry, x, grad):
        layer, total = carry
        return layer, total + use(layer, x, grad)

    return nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)(
        (layer, jnp.float32(0)), xs, grads
    )[1]


def cond(is_taken):
    def run(use, layer, xs, grads):
        nothing = lambda *_: jnp.float32(0)  # noqa: E731
        uses = enumerate(zip(xs, grads, strict=True))
        return sum(
            nnx.cond(is_taken(i, x), use, nothing, layer, x, grad)
            for i, (x, grad) in uses
        )

    return run


def switch(use, layer, x, grad):
    return nnx.switch(jnp.int32(1), [lambda *_: jnp.float32(0), use], layer, x, grad)


PROGRAMS = {
    "calls": Program(each),
    "split and merge": Program(split_and_merge),
    "lax.scan over a closure": Program(scan_closed_over),
    "vmap": Program(
        lambda use, *args: nnx.vmap(use, in_axes=(None, 0, 0))(*args).sum(),
        groups=(tuple(range(USES)),),
    ),
    "clones": Program(
        each_under(lambda use: lambda layer, x, grad: use(nnx.clone(layer), x, grad))
    ),
    "remat of all": Program(all_under(nnx.remat)),
    "jit of all": Program(all_under(nnx.jit)),
    "remat of each": Program(each_under(nnx.remat), cast=True),
    "jit of each": Program(each_under(nnx.jit), cast=True),
    "scan": Program(scan, cast=True),
    "scan, carried": Program(scan_carried, cast=True),
    "scan of remat of jit": Program(
        lambda use, *args: scan(nnx.remat(nnx.jit(use)), *args), cast=True
    ),
    "cond": Program(cond(lambda i, x: x.sum() > -jnp.inf), cast=True),
    "cond, some taken": Program(
        cond(lambda i, x: jnp.int32(i) % 2 == 1), used=(1, 3), cast=True
    ),
    "switch": Program(
        each_under(lambda use: functools.partial(switch, use)), cast=True
    ),
    "scan of layers": Program(
        lambda use, *args: nnx.scan(nnx.remat(use), in_axes=0, out_axes=0)(*args).sum(),
        own=OWN,
    ),
    "members": Program(
        lambda use, *args: nnx.vmap(use, in_axes=0)(*args).sum(), own=OWN
    ),
}
