"""Programs in which one layer has several uses in a step, and their data."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .libraries import OWG
from .steps import normal

M, K, N, USES = 6, 8, 5, 4


def data(step):
    """x `[USES, M, K]` and grad `[USES, M, N]` of sizes that differ from use to use."""
    sizes = 2.0 ** np.random.default_rng(step).permutation(USES)
    x = normal(2 * step, (USES, M, K)) * sizes[:, None, None].astype(np.float32)
    return x, normal(2 * step + 1, (USES, M, N)) * sizes[::-1, None, None].astype(
        np.float32
    )


def uses_of(kernel, x, grad):
    """`(x, kernel, grad)` of each use."""
    return [(x[i], kernel, grad[i]) for i in range(USES)]


def twice(library, variables, x, grad):
    layer = library.dense(N)
    call = (
        functools.partial(layer.apply, variables)
        if library.layer
        else layer.bind(variables)
    )
    return sum(jnp.vdot(call(x[i]), grad[i]) for i in range(USES))


def microbatches(library, variables, x, grad):
    def body(total, use):
        return total + jnp.vdot(library.dense(N).apply(variables, use[0]), use[1]), None

    return jax.lax.scan(body, jnp.float32(0), (x, grad))[0]


def scan_broadcast(library, variables, x, grad):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, total, use):
            return total + jnp.vdot(
                library.dense(N, name="layer")(use[0]), use[1]
            ), None

    scan = nn.scan(
        Body, variable_broadcast=["params", OWG], split_rngs={"params": False}
    )()
    nested = {collection: {"layer": variables[collection]} for collection in variables}
    return scan.apply(nested, jnp.float32(0), (x, grad))[0]


def examples(library, variables, x, grad):
    def one(x, grad):
        return jnp.vdot(library.dense(N).apply(variables, x), grad)

    return jnp.sum(jax.vmap(one)(x, grad))


SHARED = {
    "a layer called twice": twice,
    "scan over microbatches": microbatches,
    "nn.scan broadcast": scan_broadcast,
    "vmap over examples": examples,
}
