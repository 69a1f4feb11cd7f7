"""Flax's own classes: the same tree under other names, bitwise, and runs that go on."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn

import jaxfp8
from jaxfp8 import convert
from jaxfp8.linen import Fp8Einsum

from .cases import OWG, assert_same_tree, state_leaves


class Model(nn.Module):
    """Products in every place where Flax's layers have them; `direct` and `einsum` are classes."""

    direct: type
    einsum: type

    @nn.compact
    def __call__(self, x):
        direct, einsum = (lambda cls=cls: cls(amax_history_length=3) for cls in (self.direct, self.einsum))
        x = nn.Dense(8, dot_general_cls=direct)(x)
        x = nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=direct, out_dot_general_cls=direct)(x[None])[0]
        x = nn.Dense(8, dot_general=direct())(x)
        kernel = self.param("kernel", nn.initializers.ones, (8, 8))
        x = einsum()("ab,bc->ac", x, kernel)
        layers = nn.scan(
            _Layer, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True}, length=2, in_axes=nn.broadcast
        )
        return layers(direct)(x, None)[0]


class _Layer(nn.Module):
    direct: object

    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8, dot_general_cls=self.direct)(x), None


def initialized(direct, einsum):
    model = Model(direct, einsum)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones((2, 8), np.float32))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def randomized(variables):
    """The variables with state that no two leaves share."""
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: rng.lognormal(size=leaf.shape).astype(np.float32), variables[OWG])
    return {**variables, OWG: state}


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize("name", ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp"])
def test_flax_tree_becomes_ours_and_returns_bitwise(name):
    theirs = randomized(initialized(getattr(nn, name), nn.Fp8Einsum))
    ours = initialized(jaxfp8.Fp8DotGeneral, Fp8Einsum)
    got = convert.from_flax(theirs)
    assert jax.tree.structure(got) == jax.tree.structure(ours)
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, ours), "stacked layers too"
    assert_same_tree(convert.to_flax(got, name=name), theirs, "round trip")

    collection = convert.from_flax(theirs[OWG])
    assert_same_tree(collection, got[OWG], "the bare collection")
    assert_same_tree(convert.to_flax(collection, name=name), theirs[OWG], "the bare collection back")
    dense = got[OWG]["Dense_0"]["Fp8DotGeneral_0"]
    for leaf, value in theirs[OWG]["Dense_0"][f"{name}_0"].items():
        oracle.assert_bitwise(dense[leaf], value, leaf)
    assert got["params"] is theirs["params"], "other collections are not touched"
    assert_same_tree(convert.from_flax(got), got, "our own tree stays")


def of_amax(rng, shape, exponent):
    """f32 values whose largest magnitude is 7 * 2**exponent: FP8_MAX / amax is then a power of two, 448 and 57344
    being 7 * 2**6 and 7 * 2**13, and no rounding separates one formula of the scale from another."""
    x = rng.integers(-6, 7, size=shape).astype(np.float32)
    x.flat[rng.integers(x.size)] = 7
    return x * np.float32(2.0**exponent)


def next_states(layer, variables, run, steps):
    """Applies `run` for every step's data, as a trainer that overwrites; the collection after each."""
    step = jax.jit(lambda state, data: jax.grad(lambda s: run(layer, {**variables, OWG: s}, data))(state))
    state, states = variables[OWG], []
    for data in steps:
        state = step(state, data)
        states.append(state)
    return states


def test_einsum_whose_operands_flax_exchanges():
    """`edf` before `bsd` in the output: Flax stores the kernel's amaxes as the input's."""
    rng = np.random.default_rng(3)
    eqn = "bsd,edf->ebsf"
    kernel = of_amax(rng, (2, 4, 5), -3)
    data = [(of_amax(rng, (1, 3, 4), e), of_amax(rng, (2, 1, 3, 5), 1 - e)) for e in (2, 4, 3, 1)]

    def run(layer, variables, data):
        y = layer.apply(variables, eqn, data[0], kernel, preferred_element_type=jnp.float32)
        return jnp.vdot(y, data[1])

    theirs, ours = nn.Fp8Einsum(amax_history_length=4), Fp8Einsum(amax_history_length=4)
    start = theirs.init(jax.random.key(0), eqn, data[0][0], kernel, preferred_element_type=jnp.float32)
    *_, halfway = next_states(theirs, start, run, data[:2])
    assert halfway["input_amax_history"][0] == oracle.amax(kernel), "what this test is about"
    converted = convert.from_flax({"block": {"Fp8Einsum_0": halfway}}, swapped=["block/Fp8Einsum_.*"])
    state = converted["block"]["Fp8Einsum_0"]
    assert state["input_amax_history"][0] == oracle.amax(data[1][0])
    expected = next_states(theirs, {OWG: halfway}, run, data[2:])
    got = next_states(ours, {OWG: state}, run, data[2:])
    for ours_now, theirs_now in zip(got, expected, strict=True):
        back = convert.to_flax({"Fp8Einsum_0": ours_now}, swapped=["Fp8Einsum_0"])["Fp8Einsum_0"]
        assert_same_tree(back, theirs_now, "exchanged back")


def test_state_cast_to_bfloat16_is_widened():
    module = {name: leaf.astype(oracle.BF16) for name, leaf in state_leaves(4).items()}
    got = convert.from_flax({"Dense_0": {"Fp8DirectDotGeneralOp_0": module}})["Dense_0"]["Fp8DotGeneral_0"]
    for name, leaf in module.items():
        oracle.assert_bitwise(got[name], oracle.widen(leaf), name)
