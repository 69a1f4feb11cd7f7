"""Programs of Linen's lifted transformations.

`run(use, total, uses)` is called in a module. `use` is a class of modules,
`(total, (x, grad)) -> (total, None)`: the body of a scan. Without `cast` a program is
right under `jax.grad` too.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from draws import KEY
from flax import nnx
from jax import lax

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

from .cases import row
from .known_amax import OWN, USES, K, M, N, Program

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
SHARED = {"variable_broadcast": ("params", OWG), "split_rngs": {"params": False}}
STACKED = {"variable_axes": {"params": 0, OWG: 0}, "split_rngs": {"params": True}}
VMAP = {"in_axes": (None, 0), "out_axes": 0}
VMAP_SHARED = VMAP | {
    "variable_axes": {"params": None, OWG: None},
    "split_rngs": {"params": False},
}


class Stack(nn.Module):
    """A scan over layers in bfloat16; `make` takes their name."""

    make: object
    length: int = 2

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            lambda layer, x, _: (layer(x), None), **STACKED, length=self.length
        )
        return scanned(self.make(name="layer"), x.astype(jnp.bfloat16), None)[0]


def make_dense(recipe, **options):
    cls = functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)
    return nn.Dense(N, use_bias=False, dot_general_cls=cls, **options)


def make_use(make, recipe):
    """The class of modules of one use of a layer."""

    class Use(nn.Module):
        @nn.compact
        def __call__(self, total, use):
            x, grad = use
            return total + jnp.vdot(make(recipe, name="dense")(x), grad), None

    return Use


class Run(nn.Module):
    """A program of a class of uses."""

    run: object
    use: type

    @nn.compact
    def __call__(self, total, uses):
        return self.run(self.use, total, uses)


class Linen:
    """A layer is a module's variables."""

    make = staticmethod(make_dense)

    def __init__(
        self, program, recipe, kernel, state, differentiate=jaxfp8.value_and_grad
    ):
        module = Run(program.run, make_use(self.make, recipe))

        def loss(variables, xs, grads):
            return jnp.sum(module.apply(variables, jnp.float32(0), (xs, grads))[0])

        uses = jnp.zeros((USES, M, K)), jnp.zeros((USES, M, N))
        shapes = jax.eval_shape(module.init, KEY, jnp.float32(0), uses)
        self.variables = _fill(shapes, {"kernel": kernel} | state)
        self.run = jax.jit(differentiate(loss, argnums=(0, 1)))

    def step(self, kernel, xs, grads):
        self.variables |= {
            "params": _fill(self.variables["params"], {"kernel": kernel})
        }
        value, (gradient, dx) = self.run(self.variables, xs, grads)
        self.variables = jaxfp8.update_state(self.variables, gradient)
        return value, jax.tree.leaves(gradient["params"])[0], dx

    @property
    def state(self):
        return {
            path[-1].key: leaf
            for path, leaf in jax.tree.leaves_with_path(self.variables.get(OWG, {}))
        }


class Einsum(Linen):
    """A layer is an `Fp8Einsum` of a kernel."""

    @staticmethod
    def make(recipe, name):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x):
                kernel = self.param("kernel", nn.initializers.zeros, (K, N))
                return jaxfp8.linen.Fp8Einsum(recipe=recipe)("mk,kn->mn", x, kernel)

        return Layer(name=name)


class NNXInLinen(Linen):
    """A layer is an `nnx.Linear` in `nnx.bridge.ToLinen`, which makes its module anew
    in every call.
    """

    @staticmethod
    def make(recipe, name):
        def linear(rngs):
            product = jaxfp8.nnx.Fp8DotGeneral(recipe)
            return nnx.Linear(K, N, use_bias=False, dot_general=product, rngs=rngs)

        return nnx.bridge.ToLinen(linear, name=name)


def _fill(tree, values):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(values[path[-1].key]), tree
    )


# ------------------------------------------------------------------------- the programs


def each(call, total, uses):
    for i in range(len(uses[0])):
        total, _ = call(total, row(uses, i))
    return total, None


def pairs(uses):
    return jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), uses)


def lifted(*transformations, split=False):
    """Transformations of the class, the innermost first; with `split` the outermost
    runs over pairs of uses.
    """

    def run(use, total, uses):
        for transformation in transformations:
            use = transformation(use)
        return use()(total, pairs(uses) if split else uses)

    return run


def called(transformation, wrap=lambda use: use):
    """One module, called for each use; as a class of its own, so that it can be
    transformed again.
    """

    def make(use):
        class Called(nn.Module):
            @nn.compact
            def __call__(self, total, uses):
                return each(wrap(use)(), total, uses)

        return Called

    return lambda use, total, uses: transformation(make(use))()(total, uses)


def scan(use, **options):
    return nn.scan(use, **(SHARED | options))


def remat(use):
    return nn.remat(use, prevent_cse=False)


def cond(is_taken):
    """A branch in the body of a scan."""

    def run(use, total, uses):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, total, numbered):
                index, xg = numbered
                layer = use()
                if self.is_initializing():
                    return layer(total, xg)
                return nn.cond(
                    is_taken(index),
                    lambda m, t: m(t, xg)[0],
                    lambda m, t: t,
                    layer,
                    total,
                ), None

        return scan(Body)()(total, (jnp.arange(USES), uses))

    return run


def shared_scope(use, total, uses):
    class Wrapper(nn.Module):
        inner: nn.Module

        def setup(self):
            nn.share_scope(self, self.inner)

        def __call__(self, total, use):
            return self.inner(total, use)

    return each(Wrapper(use()), total, uses)


def applied(program):
    """JAX's own transformations of `apply`, which closes over the variables: right
    under plain `jax.grad`.
    """

    def run(use, total, uses):
        layer = use(name="use")
        if layer.is_initializing():
            return layer(total, row(uses, 0))
        unbound, variables = layer.unbind()
        return total + program(
            lambda x, grad: unbound.apply(variables, jnp.float32(0), (x, grad))[0],
            *uses,
        ), None

    return run


def microbatches(apply, xs, grads):
    return lax.scan(
        lambda total, xg: (total + apply(*xg), None), jnp.float32(0), (xs, grads)
    )[0]


ALL = (tuple(range(USES)),)
PROGRAMS = {
    "called": Program(called(lambda cls: cls)),
    "remat of each call": Program(called(lambda cls: cls, wrap=nn.remat), cast=True),
    "jit of each call": Program(called(lambda cls: cls, wrap=nn.jit), cast=True),
    "remat of all calls": Program(called(nn.remat)),
    "scan": Program(lifted(scan)),
    "scan of remat": Program(lifted(remat, scan), cast=True),
    "scan of scan": Program(lifted(scan, scan, split=True)),
    "vmap": Program(lifted(lambda use: nn.vmap(use, **VMAP_SHARED)), groups=ALL),
    "cond in scan": Program(cond(lambda index: index < USES)),
    "cond, some iterations": Program(cond(lambda index: index % 2 == 1), used=(1, 3)),
    "shared scope": Program(shared_scope),
    "scan of layers": Program(lifted(functools.partial(nn.scan, **STACKED)), own=OWN),
    "scan of layers, remat": Program(
        lifted(remat, functools.partial(nn.scan, **STACKED)), own=OWN
    ),
    "scan of states": Program(
        lifted(
            functools.partial(
                nn.scan,
                variable_broadcast="params",
                variable_axes={OWG: 0},
                split_rngs={"params": False},
            )
        ),
        own=("state",),
    ),
    "members": Program(lifted(functools.partial(nn.vmap, **VMAP, **STACKED)), own=OWN),
    "scan of apply": Program(applied(microbatches)),
    "vmap of apply": Program(
        applied(lambda apply, *uses: jnp.sum(jax.vmap(apply)(*uses))), groups=ALL
    ),
    "map of apply": Program(
        applied(lambda apply, *uses: jnp.sum(lax.map(lambda xg: apply(*xg), uses)))
    ),
}
