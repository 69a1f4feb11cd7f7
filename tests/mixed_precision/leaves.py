"""What is no gradient and no parameter: casts and loss scales leave it alone."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
# Its source alone is a value.
QTENSOR = jaxfp8.QTensor(
    jnp.ones((2, 2), jnp.float8_e4m3fn), jnp.ones(1), source=jnp.ones((2, 2))
)


def others():
    """FP8 state, codes, integers, keys, whatever they are named and however deep."""
    return {
        OWG: {
            "Dense_0": {"input_amax_history": jnp.ones(2), "input_scale": jnp.ones(1)}
        },
        "own": {OWG: {"linear_input_amax": jnp.ones(2)}},
        "plain": jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=3)),
        "e5m2": jnp.ones(2, jnp.float8_e5m2),
        "ints": jnp.arange(2),
        "flag": np.bool_(True),
        "key": jax.random.key(0),
        "nothing": None,
    }


def assert_others_stay(change, tree):
    """Of `others()`, a QTensor and `tree`; returns the rest, and the source of the
    QTensor.
    """
    given = others() | {"q": QTENSOR} | tree
    got = change(given)
    assert jax.tree.structure(got) == jax.tree.structure(given)
    stayed, wanted = ([each[name] for name in others()] for each in (got, given))
    assert all(
        a is b
        for a, b in zip(jax.tree.leaves(stayed), jax.tree.leaves(wanted), strict=True)
    )
    assert got["q"].data is QTENSOR.data and got["q"].scale_inv is QTENSOR.scale_inv
    return {name: got[name] for name in tree}, got["q"].source
