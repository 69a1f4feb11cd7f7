"""What the tests of converters share: random state and the comparison of trees."""

import jax
import numpy as np
import oracle

OWG = "_overwrite_with_gradient"
OPERANDS = ("input", "kernel", "output_grad")


def flat(tree) -> dict:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def assert_same_tree(got, expected, what: str):
    got, expected = flat(got), flat(expected)
    assert set(got) == set(expected), what
    for name, leaf in expected.items():
        oracle.assert_bitwise(got[name], np.asarray(leaf), f"{what} {name}")


def state_leaves(seed, length=4, lead=()):
    """Random state of one product under the stored names; numpy, so that nothing of JAX can round it."""
    rng = np.random.default_rng(seed)
    state = {}
    for operand in OPERANDS:
        state[f"{operand}_amax_history"] = rng.lognormal(size=(*lead, length)).astype(np.float32)
        state[f"{operand}_scale"] = rng.lognormal(size=(*lead, 1)).astype(np.float32)
    return state
