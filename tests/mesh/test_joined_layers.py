"""Layers that a rule makes one product, cut by columns: heads stay on their devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from cpu_mesh import mesh_of
from draws import KEY, normal
from equality import assert_same_bits as assert_same
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8
from jaxfp8.linen import Dense, quantize
from mesh.hlo import QUICKLY, collectives

X = normal(4, 8, 32)
FEATURES = {"query": (4, 64), "key": (2, 64), "value": (2, 64)}


class Projections(nn.Module):
    @nn.compact
    def __call__(self, x):
        return [nn.DenseGeneral(n, name=name)(x) for name, n in FEATURES.items()]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_heads_stay_on_their_devices(kind):
    """One device's bits; only amaxes are reduced."""
    model = quantize(Projections(), [("", Dense.of(*FEATURES))])
    variables = model.init(KEY, X)

    def loss(variables, x):
        return sum(jnp.sum(jnp.sin(y)) for y in model.apply(variables, x))

    gradient = jax.jit(jaxfp8.grad(loss))
    mesh = mesh_of(kind, tp=2)

    def placed(path, leaf):
        specs = {"kernel": P(None, "tp"), "bias": P("tp")}
        spec = specs.get(path[-1].key, P())
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        args = jax.tree.map_with_path(placed, variables), X
        compiled = gradient.lower(*args).compile(QUICKLY)
    found = collectives(compiled.as_text())
    assert found and all(each.is_amax for each in found)
    assert_same(compiled(*args), gradient(variables, X))
