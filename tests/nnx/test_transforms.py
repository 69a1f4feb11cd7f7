"""Models that are split, or lose the graph protocol, and losses that fail; programs are in `programs/nnx.py`."""

import jax
import numpy as np
import oracle
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import OverwriteWithGradient

from .cases import H, assert_plain, assert_state, expected_state, linear, operands, use

USES = 3


def each(use):
    return lambda layer, xs, grads: sum(use(layer, x, grad) for x, grad in zip(xs, grads, strict=True))


def test_state_as_argument():
    """A split model's `nnx.State` in place of the module, with uses that only the cast at the top can combine."""
    layer = linear()
    graphdef, state = nnx.split(layer)
    xs, grads = operands(0, USES)
    kernel = np.asarray(layer.kernel.get_value())
    gradients = jaxfp8.nnx.grad(lambda state: each(nnx.remat(use))(nnx.merge(graphdef, state), xs, grads))(state)
    jaxfp8.nnx.update_state(layer, gradients)
    uses = [(x, kernel, grad) for x, grad in zip(xs, grads, strict=True)]
    assert_state(layer.dot_general, expected_state(uses, oracle.LayerState.init(H)), "state as argument")


def test_model_is_as_before_after_an_error_in_the_loss():
    layer = linear()
    before = jax.tree.leaves(nnx.state(layer, OverwriteWithGradient))

    def loss(layer):
        raise RuntimeError("in the loss")

    with pytest.raises(RuntimeError, match="in the loss"):
        jaxfp8.nnx.grad(loss)(layer)
    after = jax.tree.leaves(nnx.state(layer, OverwriteWithGradient))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_state_returned_by_the_loss_is_plain():
    """Aux that holds the model's state, taken while uses combine by max."""
    layer = linear()
    xs, grads = operands(0, 1)

    def loss(layer):
        return use(layer, xs[0], grads[0]), nnx.to_pure_dict(nnx.state(layer))

    _, aux = jaxfp8.nnx.grad(loss, has_aux=True)(layer)
    assert all(leaf.dtype == np.dtype(np.float32) for leaf in jax.tree.leaves(aux))


def test_tree_mode():
    """Without the graph protocol NNX differentiates the whole module; the state comes with it."""
    layer, state = linear(), oracle.LayerState.init(H)
    xs, grads = operands(0, 2)
    kernel = np.asarray(layer.kernel.get_value())
    with nnx.set_graph_mode(False):
        gradients = jaxfp8.nnx.grad(each(use))(layer, xs, grads)
        jaxfp8.nnx.update_state(layer, gradients)
    uses = [(x, kernel, grad) for x, grad in zip(xs, grads, strict=True)]
    assert_state(layer.dot_general, expected_state(uses, state), "tree mode")
    assert_plain(layer)
