"""reset_state: everywhere, or only in the rows that an optimizer has stepped on."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import KEY
from equality import assert_same_bits
from flax import nnx

import jaxfp8
from jaxfp8.convert import reset_state

INITIAL = jaxfp8.recipes.QuantizerState(
    np.zeros((3, 4), np.float32), np.ones((3, 1), np.float32)
)


def told(names, is_told=True):
    """Expect the warning that names quantizers and causes; under jit nothing is
    known.
    """
    if not is_told:
        return contextlib.nullcontext()
    return pytest.warns(
        jaxfp8.FP8StateWarning,
        match=f"reset_state: tree: .*{names}: .*an optimizer has stepped on it",
    )


def stack(rows, **spoilt):
    """Three layers of a state that has been in use, on the axis that nn.scan stacks
    along.
    """
    state = jaxfp8.recipes.QuantizerState(
        np.full((3, 4), 2, np.float32), np.full((3, 1), 0.5, np.float32)
    )
    for name, value in spoilt.items():
        getattr(state, name)[rows, 0] = value
    return state


@pytest.mark.parametrize(
    "spoilt",
    [{"amax_history": -1e-45}, {"amax_history": -np.inf}, {"scale": -1}],
    ids=str,
)
@pytest.mark.parametrize("convert", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_reset(spoilt, convert):
    """NaN, infinity and -0 are read as nothing; a parameter below zero is a
    parameter.
    """
    honest = (
        stack([0], amax_history=np.nan) if "scale" in spoilt else stack([0], scale=-0.0)
    )
    tree = {
        "bad": stack([1], **spoilt),
        "honest": honest,
        "params": {"scale": np.full(2, -1, np.float32)},
    }
    with told("bad", convert is not jax.jit):
        got = convert(lambda tree: reset_state(tree, only_bad=True))(tree)
    rows = jax.tree.map(
        lambda leaf, initial: np.where(np.arange(3)[:, None] == 1, initial, leaf),
        tree["bad"],
        INITIAL,
    )
    assert_same_bits(got, tree | {"bad": rows})
    with told("bad", convert is not jax.jit):
        assert_same_bits(
            convert(reset_state)(tree), tree | {"bad": INITIAL, "honest": INITIAL}
        )
    assert_same_bits(reset_state({"honest": honest}, only_bad=True), {"honest": honest})


def test_models():
    """An NNX state goes back into its model; Linen's variables are as `init` made
    them.
    """
    x = jnp.ones((2, 8))
    layer = nn.Dense(4, dot_general_cls=jaxfp8.Fp8DotGeneral)
    variables = layer.init(KEY, x)
    spoilt = jax.tree.map(lambda leaf: leaf - 2, variables)
    with told("Fp8DotGeneral_0/input, .*/kernel, .*/output_grad"):
        assert_same_bits(reset_state(spoilt), variables | {"params": spoilt["params"]})
    layer = nnx.Linear(8, 4, dot_general=jaxfp8.nnx.Fp8DotGeneral(), rngs=nnx.Rngs(0))
    layer.dot_general.input_scale.set_value(jnp.float32([-1]))
    scalars = jaxfp8.inspect.scalars(nnx.state(layer))
    assert np.isnan(scalars["fp8/dot_general/input/scale"])
    with told("dot_general/input"):
        nnx.update(layer, reset_state(nnx.state(layer), only_bad=True))
    assert np.isfinite(layer(x)).all() and layer.dot_general.input_scale[...] == 1
