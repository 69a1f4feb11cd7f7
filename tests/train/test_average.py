"""average: parameters are averaged, the FP8 state is the newest, in Linen, NNX and
plain trees.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import KEY
from equality import assert_same_bits

import jaxfp8
import jaxfp8.nnx

X = jax.random.normal(KEY, (8, 16))
DECAY = 0.75


def test_linen():
    model = nn.Dense(4, dot_general_cls=jaxfp8.Fp8DotGeneral)
    old = model.init(jax.random.key(1), X)
    new = jax.tree.map(lambda leaf: leaf + 2, old)
    got = jax.jit(jaxfp8.train.average)(old, new, DECAY)
    assert_same_bits(got["_overwrite_with_gradient"], new["_overwrite_with_gradient"])
    for name in ("kernel", "bias"):
        expected = DECAY * np.float64(old["params"][name]) + (1 - DECAY) * np.float64(
            new["params"][name]
        )
        np.testing.assert_allclose(
            got["params"][name], expected, rtol=2**-22, atol=2**-22
        )


def test_plain_trees():
    """A dataclass of state beside parameters, integers and narrow dtypes."""
    state = jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=2))
    old = {"w": jnp.ones(2, jnp.bfloat16), "count": jnp.int32(1), "state": state}
    new = jax.tree.map(lambda leaf: leaf * 0 + 2, old)
    got = jaxfp8.train.average(old, new, 0.5)
    assert got["w"].dtype == jnp.bfloat16 and got["w"].tolist() == [1.5, 1.5]
    assert got["count"] == 2
    assert_same_bits(got["state"], new["state"])


def test_decays_that_are_no_share():
    for bad, error in (
        (2, ValueError),
        (-0.5, ValueError),
        (np.nan, ValueError),
        (10**400, ValueError),
        (np.ones(3), ValueError),
        ("a", TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error, match="train.average: decay: expected .*, got "):
            jaxfp8.train.average({"a": 1.0}, {"a": 2.0}, bad)
    assert float(jax.jit(jaxfp8.train.average)({"a": 1.0}, {"a": 2.0}, 0.5)["a"]) == 1.5


def test_trees_that_differ():
    with pytest.raises(
        ValueError, match="train.average: new: expected the structure of old, .*'b'"
    ):
        jaxfp8.train.average({"a": 1.0}, {"a": 1.0, "b": 2.0}, 0.9)
