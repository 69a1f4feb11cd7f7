"""State under every NNX transform: bitwise the oracle's, with a true max where a layer is used more than once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import OverwriteWithGradient

from .cases import (
    H,
    assert_kernel_gradient,
    assert_plain,
    assert_state,
    expected_state,
    linear,
    operands,
    use,
)

USES = 3
each = lambda f: lambda layer, xs, grads: sum(f(layer, x, grad) for x, grad in zip(xs, grads, strict=True))  # noqa: E731


def scan_closed_over(layer, xs, grads):
    return jax.lax.scan(lambda total, xg: (total + use(layer, *xg), None), 0.0, (xs, grads))[0]


def scan_broadcast(layer, xs, grads):
    return nnx.scan(use, in_axes=(nnx.StateAxes({...: None}), 0, 0), out_axes=0)(layer, xs, grads).sum()


def scan_carried(layer, xs, grads):
    def body(carry, x, grad):
        layer, total = carry
        return layer, total + use(layer, x, grad)

    return nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)((layer, 0.0), xs, grads)[1]


def scan_of_remat_of_jit(layer, xs, grads):
    body = nnx.remat(nnx.jit(use))
    return nnx.scan(body, in_axes=(nnx.StateAxes({...: None}), 0, 0), out_axes=0)(layer, xs, grads).sum()


def vmap_shared(layer, xs, grads):
    return nnx.vmap(use, in_axes=(None, 0, 0))(layer, xs, grads).sum()


def cond_taken(layer, x, grad):
    return nnx.cond(x.sum() > -jnp.inf, use, lambda *_: 0.0, layer, x, grad)


def switch(layer, x, grad):
    return nnx.switch(jnp.int32(1), [lambda *_: 0.0, use], layer, x, grad)


def split_and_merge(layer, xs, grads):
    parts = nnx.split(layer)
    return each(lambda parts, x, grad: use(nnx.merge(*parts), x, grad))(parts, xs, grads)


def remat_inside_and_outside(layer, xs, grads):
    return nnx.remat(use)(layer, xs[0], grads[0]) + each(use)(layer, xs[1:], grads[1:])


# Those that need no help: the layer itself sees all uses, or the transform combines them.
BY_ITSELF = {
    "three calls": each(use),
    "split and merge": split_and_merge,
    "lax.scan over a closure": scan_closed_over,
    "vmap, shared": vmap_shared,
    "clones": each(lambda layer, x, grad: use(nnx.clone(layer), x, grad)),
    "remat of all": nnx.remat(each(use)),
    "jit of all": nnx.jit(each(use)),
}
PROGRAMS = BY_ITSELF | {
    "jit of each": each(nnx.jit(use)),
    "remat of each": each(nnx.remat(use)),
    "remat inside and outside": remat_inside_and_outside,
    "scan, broadcast": scan_broadcast,
    "scan, carried": scan_carried,
    "scan of remat of jit": scan_of_remat_of_jit,
    "cond taken": each(cond_taken),
    "switch": each(switch),
}


def check_shared(program, grad, jit):
    """Two steps of a layer that is used three times in each."""
    layer, state = linear(), oracle.LayerState.init(H)

    def step(layer, xs, grads):
        gradients = grad(program)(layer, xs, grads)
        jaxfp8.nnx.update_state(layer, gradients)
        return gradients

    step = nnx.jit(step) if jit else step
    kernel = np.asarray(layer.kernel.get_value())
    for i in range(2):
        xs, grads = operands(i, USES)
        uses = [(x, kernel, grad) for x, grad in zip(xs, grads, strict=True)]
        gradients = step(layer, xs, grads)
        assert_kernel_gradient(gradients.kernel.get_value(), uses, state, f"step {i}: kernel gradient")
        state = expected_state(uses, state)
        assert_state(layer.dot_general, state, f"step {i}")
        assert_plain(layer)


@pytest.mark.varied
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_shared_state_is_the_max_of_all_uses(program, jit):
    check_shared(program, jaxfp8.nnx.grad, jit)


@pytest.mark.parametrize("program", BY_ITSELF.values(), ids=BY_ITSELF)
def test_nnx_grad_alone(program):
    """Without our grad wherever that can be right: with NNX's own, of parameters and state."""
    check_shared(program, functools.partial(nnx.grad, argnums=nnx.DiffState(0, jaxfp8.nnx.trainable)), jit=True)


def test_split_state_and_jax_grad():
    """The functional way: `nnx.split`, `jax.grad` of the state, `nnx.merge`."""
    layer = linear()
    graphdef, state, params = nnx.split(layer, OverwriteWithGradient, ...)
    xs, grads = operands(0, USES)

    @jax.jit
    def gradient(state):
        return jax.grad(lambda state: each(use)(nnx.merge(graphdef, state, params), xs, grads))(state)

    nnx.update(layer, gradient(state))
    kernel = np.asarray(layer.kernel.get_value())
    uses = [(x, kernel, grad) for x, grad in zip(xs, grads, strict=True)]
    assert_state(layer.dot_general, expected_state(uses, oracle.LayerState.init(H)), "split")


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


@pytest.mark.parametrize("transform", ["vmap", "scan"])
def test_stacked_layers_have_a_state_each(transform):
    """Ensembles and scanned layers: state on axis 0, one row a layer."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return linear(key)

    layers = make(jax.random.split(jax.random.key(0), USES))
    assert layers.dot_general.input_amax_history.shape == (USES, H)
    over = {"vmap": nnx.vmap(use, in_axes=0), "scan": nnx.scan(nnx.remat(use), in_axes=0, out_axes=0)}[transform]

    @nnx.jit
    def step(layers, xs, grads):
        gradients = jaxfp8.nnx.grad(lambda *args: over(*args).sum())(layers, xs, grads)
        jaxfp8.nnx.update_state(layers, gradients)

    states = [oracle.LayerState.init(H)] * USES
    kernels = np.asarray(layers.kernel.get_value())
    for i in range(2):
        xs, grads = operands(i, USES)
        step(layers, xs, grads)
        for row in range(USES):
            states[row] = oracle.dense_step(xs[row], kernels[row], grads[row], states[row]).state
            assert_state(layers.dot_general, states[row], f"step {i}, row {row}", row)
    assert_plain(layers)


def test_branch_not_taken_leaves_the_state():
    layer = linear()
    xs, grads = operands(0, 1)

    @nnx.jit
    def step(layer, taken):
        def loss(layer):
            return nnx.cond(taken, use, lambda layer, x, grad: jnp.vdot(x, x), layer, xs[0], grads[0])

        jaxfp8.nnx.update_state(layer, jaxfp8.nnx.grad(loss)(layer))

    state = oracle.LayerState.init(H)
    kernel = np.asarray(layer.kernel.get_value())
    for taken in (False, True, False, True):
        step(layer, taken)
        if taken:
            state = oracle.dense_step(xs[0], kernel, grads[0], state).state
        assert_state(layer.dot_general, state, f"taken: {taken}")


def test_max_grad_with_nnx_grad():
    """The context manager by itself, for a loss that is differentiated by other means."""

    def loss(layer, xs, grads):
        with jaxfp8.nnx.max_grad(layer):
            return each(nnx.remat(use))(layer, xs, grads)

    check_shared(lambda *args: loss(*args), lambda f: nnx.grad(f, argnums=nnx.DiffState(0, ...)), jit=True)


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
