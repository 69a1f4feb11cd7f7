"""Equality of trees by chex; of floats by their bits, so that NaNs and the signs of
zeros count.
"""

import chex
import jax
import numpy as np
import oracle


def assert_same_bits(got, expected, what="") -> None:
    """Raise AssertionError unless two trees have the same structure, shapes, dtypes and
    bits.
    """
    got, expected = (jax.tree.map(np.asarray, tree) for tree in (got, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected, custom_message=what)
    chex.assert_trees_all_equal(
        *(jax.tree.map(oracle.bits, tree) for tree in (got, expected)),
        custom_message=what,
    )


def assert_all_bitwise(got, expected, what="") -> None:
    """The same for the results of a call, in whatever sequence they come."""
    assert_same_bits(list(got), list(expected), what)
