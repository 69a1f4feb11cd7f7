"""Which leaves count as quantizer state, in every container that people keep variables
in.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import KEY
from flax import linen as nn, nnx
from parametrize import each_row

import jaxfp8
from jaxfp8.recipes import _state_tree

from . import replay

RECIPE = jaxfp8.DelayedScaling(amax_history_len=3)


class EqxLayer(eqx.Module):
    weight: jax.Array
    fp8: jaxfp8.DotGeneralState
    activation: object


def nnx_model():
    def layer():
        product = jaxfp8.nnx.Fp8DotGeneral(RECIPE)
        return nnx.Linear(2, 2, dot_general=product, rngs=nnx.Rngs(0))

    return nnx.Dict(layers=nnx.List([layer(), layer()]))


NNX_NAMES = [
    f"layers/{i}/dot_general/{operand}"
    for i in range(2)
    for operand in ("input", "kernel", "output_grad")
]
NORM = {
    "params": {
        "LayerNorm_0": {"scale": jnp.ones(2), "bias": jnp.ones(2)},
        "Dense_0": {"kernel": jnp.ones((2, 2))},
    }
}
COLLECTION = {
    "Dense_0": {"input_amax_history": jnp.zeros(3), "input_scale": jnp.ones(1)}
}
CONTAINERS = {
    "variables": (
        lambda: {**NORM, replay.OWG: COLLECTION},
        ["_overwrite_with_gradient/Dense_0/input"],
        3,
    ),
    "collection": (lambda: COLLECTION, ["Dense_0/input"], 0),
    "only a norm": (lambda: NORM, [], 3),
    "scale and bias side by side": (
        lambda: {"x_scale": 1.0, "x_history": 2.0, "amax": 3.0},
        [],
        3,
    ),
    "a name that ends alike": (lambda: {"myamax_history": 1.0, "myscale": 2.0}, [], 2),
    "DotGeneralState": (
        lambda: jaxfp8.init_state(RECIPE),
        ["input", "kernel", "output_grad"],
        0,
    ),
    "nnx state": (
        lambda: nnx.state(nnx_model()),
        NNX_NAMES,
        4,
    ),
    "nnx pure": (
        lambda: nnx.as_pure(nnx.state(nnx_model())),
        NNX_NAMES,
        4,
    ),
    "nnx module": (nnx_model, NNX_NAMES, 4),
    "equinox": (
        lambda: [EqxLayer(jnp.ones(2), jaxfp8.init_state(RECIPE), jax.nn.relu)],
        ["0/fp8/input", "0/fp8/kernel", "0/fp8/output_grad"],
        2,
    ),
}


@each_row("make, names, parameters", CONTAINERS)
def test_quantizers_are_found(make, names, parameters):
    tree = make()
    found = _state_tree.flatten(tree)
    assert [q.name for q in found.quantizers] == names
    for q in found.quantizers:
        history, scale = (found.leaves[i] for i in q.positions)
        assert history.shape == (3,) and scale.shape == (1,)
    assert len(found.positions()) == 2 * len(names)
    assert len(found.leaves) == 2 * len(names) + parameters
    assert jax.tree.structure(found.replace({})) == jax.tree.structure(tree)


@pytest.mark.parametrize("length", [1, 3])
def test_layers_stacked_on_another_axis(length):
    """The slots of a history are last, and the scale has one element for each row."""
    state = jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=length))
    moved = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf], axis=1), state)
    got = rf"expected a history \(..., H\) .* \({length}, 2\) and \(1, 2\)"
    for function in (
        jaxfp8.inspect.summary,
        jaxfp8.convert.reset_state,
        lambda state: jaxfp8.convert.resize_history(state, 5),
        lambda state: jaxfp8.update_state(state, state),
        jax.grad(lambda state: jnp.sum(jaxfp8.max_grad(state).input.scale)),
    ):
        with pytest.raises(ValueError, match=got):
            function(moved)


def test_leaves_are_in_the_order_of_jax():
    """Positions are those of jax.tree.leaves, also where a DotGeneralState is in
    between.
    """
    tree = {
        "b": jaxfp8.init_state(RECIPE),
        "a": 1.0,
        "c": [2.0, None, jaxfp8.init_state(RECIPE)],
    }
    for ours, theirs in zip(
        _state_tree.flatten(tree).leaves, jax.tree.leaves(tree), strict=True
    ):
        assert ours is theirs


def test_state_of_own_quantizers():
    """What has no pair is state below the collection's key and inside a
    DotGeneralState, and nowhere else.
    """
    tree = {
        replay.OWG: {"Dense_0": {"linear_input_count": np.zeros(2)}},
        "params": {"linear_input_count": np.zeros(2)},
    }
    found = _state_tree.flatten(tree)
    assert [found.name(i) for i in found.positions()] == [
        "_overwrite_with_gradient/Dense_0/linear_input_count"
    ]
    in_nnx = {
        "a": {"linear_input_count": nnx.Param(np.zeros(2))},
        "b": {"linear_input_count": jaxfp8.nnx.OverwriteWithGradient(np.zeros(2))},
    }
    found = _state_tree.flatten(nnx.State(in_nnx))
    assert [found.name(i) for i in found.positions()] == ["b/linear_input_count"]
    custom = jaxfp8.DotGeneralState(
        input={"count": np.zeros(2)}, kernel=(), output_grad=None
    )
    found = _state_tree.flatten({"w": np.ones(2), "fp8": custom})
    assert [found.name(i) for i in found.positions()] == ["fp8/input/count"]


def test_state_that_weight_norm_takes_for_a_kernel_is_refused():
    """Its filter of kernels matches the names of state too; the norm of a history would
    be its state.
    """
    dense = nn.Dense(8, dot_general_cls=jaxfp8.Fp8DotGeneral)
    x = jnp.ones((4, 16))
    variables = nn.WeightNorm(dense).init(KEY, x)
    name = (
        "layer_instance/Fp8DotGeneral_0/kernel_amax_history/scale: name the kernel "
        "alone"
    )
    for use in (
        lambda: jaxfp8.grad(lambda variables: 0.0)(variables),
        lambda: jaxfp8.train.optimizer(optax.sgd(0.1)).init(variables),
        lambda: jaxfp8.linen.TrainState.create(
            apply_fn=None, params=variables, tx=optax.sgd(0.1)
        ),
    ):
        with pytest.raises(ValueError, match=name):
            use()
    kernel = nn.WeightNorm(dense, variable_filter={"layer_instance/kernel"})
    jaxfp8.grad(lambda variables: kernel.apply(variables, x).sum())(kernel.init(KEY, x))
