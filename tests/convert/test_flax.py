"""Flax's own classes: the same tree under other names, bitwise, and runs that go on."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY, normal
from equality import assert_same_bits
from flax import linen as nn
from programs.linen import STACKED

import jaxfp8
from jaxfp8 import convert
from jaxfp8.linen import Fp8Einsum

from .cases import OWG, state_leaves


class Model(nn.Module):
    """Products in every place where Flax's layers have them; `direct` and `einsum` are
    classes.
    """

    direct: type
    einsum: type

    @nn.compact
    def __call__(self, x):
        direct, einsum = (
            lambda cls=cls: cls(amax_history_length=3)
            for cls in (self.direct, self.einsum)
        )
        x = nn.Dense(8, dot_general_cls=direct)(x)
        x = nn.Dense(8, dot_general=direct())(x)
        kernel = self.param("kernel", nn.initializers.ones, (8, 8))
        x = einsum()("ab,bc->ac", x, kernel)
        layers = nn.scan(
            _Layer,
            **STACKED,
            length=2,
            in_axes=nn.broadcast,
        )
        return layers(direct)(x, None)[0]


class _Layer(nn.Module):
    direct: object

    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8, dot_general_cls=self.direct)(x), None


def initialized(direct, einsum):
    model = Model(direct, einsum)
    shapes = jax.eval_shape(model.init, KEY, np.ones((2, 8), np.float32))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def randomized(variables):
    """The variables with state that no two leaves share."""
    rng = np.random.default_rng(1)
    state = jax.tree.map(
        lambda leaf: rng.lognormal(size=leaf.shape).astype(np.float32), variables[OWG]
    )
    return {**variables, OWG: state}


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize("name", ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp"])
def test_flax_tree_becomes_ours_and_returns_bitwise(name):
    theirs = randomized(initialized(getattr(nn, name), nn.Fp8Einsum))
    ours = initialized(jaxfp8.Fp8DotGeneral, Fp8Einsum)
    got = convert.from_flax(theirs)
    assert jax.tree.structure(got) == jax.tree.structure(ours)
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, ours), (
        "stacked layers too"
    )
    collection = convert.from_flax(theirs[OWG])
    assert_same_bits(collection, got[OWG], "the bare collection")
    if name == "Fp8DirectDotGeneralOp":  # Flax has deprecated the other
        assert_same_bits(convert.to_flax(got), theirs, "round trip")
        back = convert.to_flax(collection)
        assert_same_bits(back, theirs[OWG], "the bare collection back")


def test_einsum_whose_operands_flax_exchanges():
    """`edf` before `bsd` in the output: Flax stores the kernel's amaxes as the
    input's.
    """
    x, kernel = normal(1, 3, 4), normal(2, 4, 5)
    product = "bsd,edf->ebsf", x, kernel, None, jnp.float32

    def next_state(layer):
        variables = layer.init(KEY, *product)
        return jax.grad(lambda v: jnp.sum(layer.apply(v, *product)))(variables)[OWG]

    theirs, ours = (
        next_state(cls(amax_history_length=4)) for cls in (nn.Fp8Einsum, Fp8Einsum)
    )
    converted = convert.from_flax(
        {"block": {"Fp8Einsum_0": theirs}}, swapped=["block/Fp8Einsum_.*"]
    )
    got = converted["block"]["Fp8Einsum_0"]
    assert_same_bits(got, ours, "as our own layer has it")
    back = convert.to_flax(converted, swapped=["block/Fp8Einsum_.*"])
    assert_same_bits(back["block"]["Fp8Einsum_0"], theirs, "exchanged back")


def test_state_cast_to_bfloat16_is_widened():
    module = {name: leaf.astype(oracle.BF16) for name, leaf in state_leaves(4).items()}
    got = convert.from_flax({"Dense_0": {"Fp8DirectDotGeneralOp_0": module}})[
        "Dense_0"
    ]["Fp8DotGeneral_0"]
    assert_same_bits(got, jax.tree.map(oracle.widen, module))
