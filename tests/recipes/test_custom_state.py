"""State of a user's own quantizers: its variables, its next value, and uses that
combine by max wherever they are.

`grids.Counting` counts steps, remembers the amax, and quantizes to a grid that becomes
finer with the count.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from cpu_mesh import mesh_of
from draws import KEY
from flax import nnx
from jax.sharding import PartitionSpec
from programs import functional
from programs.cases import row, stacked

import jaxfp8
from recipes import grids
from recipes.grids import MATMUL, ROLES, Counting

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
RECIPE = jaxfp8.CustomRecipe(
    lambda role: Counting(2) if role.startswith("linear_grad") else Counting(4)
)
FIELDS = {
    "linear_input": "input",
    "linear_weight": "kernel",
    "linear_output": "output",
    "linear_grad_output": "output_grad",
    "linear_grad_input": "input_grad",
}


def steps_of(count):
    return {
        role: (2 if role.startswith("linear_grad") else 4) * 2**count for role in ROLES
    }


def seen(x, kernel, grad, count):
    """{role: amax} of the products that run in one step, of `x[i]` and `grad[i]` where
    these have a leading axis.
    """
    steps = steps_of(count)
    # results are seen before they are quantized
    del steps["linear_output"], steps["linear_grad_input"]
    amaxes = dict.fromkeys(ROLES, 0.0)
    uses = (of.reshape(-1, *of.shape[-2:]) for of in (x, grad))
    for x_i, grad_i in zip(*uses, strict=True):
        y, dx, _ = grids.layer(x_i, kernel, grad_i, steps)
        for role, value in zip(ROLES, (x_i, kernel, y, grad_i, dx), strict=True):
            amaxes[role] = max(amaxes[role], float(np.abs(value).max()))
    return amaxes


def assert_state(state, amaxes, count):
    """A DotGeneralState, or Flax's variables by name."""
    for role, field in FIELDS.items():
        of = (
            getattr(state, field) if isinstance(state, jaxfp8.DotGeneralState) else None
        )
        for name, expected in (("amax", amaxes[role]), ("count", count)):
            got = of[name] if of is not None else state[f"{role}_{name}"]
            oracle.assert_bitwise(
                got, np.array([expected], np.float32), f"{role}_{name}"
            )


def product(x, kernel, state):
    return jaxfp8.dot_general(x, kernel, MATMUL, recipe=RECIPE, state=state)


def loss(state, x, kernel, grad):
    """`<y, grad>`, so that the gradient of y is grad."""
    return jnp.vdot(product(x, kernel, state), grad)


def state_gradient(loss, state, x, *others, differentiate=jax.grad):
    """The next state, where the gradient of x is wanted too: without it there is none
    to quantize.
    """
    return differentiate(loss, argnums=(0, 1))(state, x, *others)[0]


def uses_of(count=4):
    _, kernel, _ = grids.data()
    x = np.stack(
        [grids.fractions((grids.M, grids.K), 20 + i, 1 + i % 3) for i in range(count)]
    )
    grad = np.stack(
        [grids.fractions((grids.M, grids.N), 40 + i, 4 - i % 3) for i in range(count)]
    )
    return x, kernel, grad


# Uses of one state --------------------------------------------------------------------


@pytest.mark.parametrize("program", ["loop", "remat in scan", "vmap"])
@pytest.mark.parametrize(
    "entry", [lambda tree: tree, jaxfp8.max_grad], ids=["grad", "max_grad"]
)
def test_uses_combine_by_max(program, entry):
    """Under vmap the uses are one larger product, so the amaxes of results are those of
    it.
    """
    x, kernel, grad = uses_of()
    state, run = jaxfp8.init_state(RECIPE), functional.PROGRAMS[program].run

    def of_program(state, x, grad):
        return run(
            lambda state, x, grad: loss(state, x, kernel, grad), entry(state), x, grad
        )

    step = jax.jit(lambda *args: state_gradient(of_program, *args))
    for count in range(3):
        gradient = step(state, x, grad)
        assert_state(gradient, seen(x, kernel, grad, count), count + 1)
        state = jaxfp8.update_state(state, gradient)


def test_matrices_of_a_batch_combine_by_max():
    x, kernel, grad = uses_of()
    kernels = np.stack([kernel] * len(x))
    batches = (((2,), (1,)), ((0,), (0,)))

    def of_batch(state, x, kernels):
        y = jaxfp8.dot_general(x, kernels, batches, recipe=RECIPE, state=state)
        return jnp.vdot(y, grad)

    gradient = state_gradient(of_batch, jaxfp8.init_state(RECIPE), x, kernels)
    assert_state(gradient, seen(x, kernel, grad, 0), 1)


def test_members_keep_their_own():
    """vmap over states: each as it is alone."""
    x, kernel, grad = uses_of(3)
    kernels = np.stack([kernel, 2 * kernel, kernel / 2])
    state = stacked(jaxfp8.init_state(RECIPE), 3)
    state = jax.tree_util.tree_map_with_path(
        lambda p, a: a + jnp.arange(3.0)[:, None] * float("count" in str(p)), state
    )
    gradient = jax.jit(jax.vmap(lambda *args: state_gradient(loss, *args)))(
        state, x, kernels, grad
    )
    for i in range(3):
        assert_state(row(gradient, i), seen(x[i], kernels[i], grad[i], i), i + 1)


def test_a_layer_that_is_not_used_keeps_its_state():
    x, kernel, grad = grids.data()
    states = [
        jax.tree.map(lambda leaf: leaf + 3, jaxfp8.init_state(RECIPE)) for _ in range(2)
    ]
    gradient = state_gradient(
        lambda states, x: loss(states[0], x, kernel, grad), states, x
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient[1]))
    after = jaxfp8.update_state(states, gradient)
    chex.assert_trees_all_equal(after[1], states[1])
    assert_state(after[0], seen(x, kernel, grad, 3), 4)


def test_update_state_refuses_what_is_no_state():
    x, kernel, grad = grids.data()
    state = jaxfp8.init_state(RECIPE)
    gradient = state_gradient(loss, state, x, kernel, grad)
    negative = jax.tree.map(lambda leaf: -leaf, gradient)
    with pytest.raises(
        ValueError,
        match="update_state: input/amax: expected a state that is not negative",
    ):
        jaxfp8.update_state(state, negative)
    for bad in (negative, jax.tree.map(lambda leaf: leaf * jnp.nan, gradient)):
        chex.assert_trees_all_equal(jax.jit(jaxfp8.update_state)(state, bad), state)


# Meshes -------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Rows are cut; what a device quantizes is its own, the state is that of all."""
    x, kernel, grad = grids.data(3, m=16, n=8)
    recipe = jaxfp8.CustomRecipe(RECIPE.qfactory, pipeline_axes=())

    def of_device(state, x, kernel, grad):
        return jnp.vdot(
            jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state), grad
        )

    def next_state(*args):
        return state_gradient(of_device, *args)

    rows, whole = PartitionSpec("data"), PartitionSpec()
    specs = {"in_specs": (whole, rows, whole, rows), "out_specs": whole}
    step = jax.shard_map(next_state, mesh=mesh_of(data=8), check_vma=check_vma, **specs)
    gradient = jax.jit(step)(jaxfp8.init_state(recipe), x, kernel, grad)
    assert_state(gradient, seen(x, kernel, grad, 0), 1)


# Layers -------------------------------------------------------------------------------


def linen_steps(count):
    """Variables after some steps, from kernels that do not move."""
    x, kernel, grad = grids.data()
    layer = nn.Dense(
        grids.N,
        use_bias=False,
        dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(recipe=RECIPE),
    )
    variables = layer.init(KEY, x)
    variables = {**variables, "params": {"kernel": kernel}}

    def of_variables(variables, x):
        return jnp.vdot(layer.apply(variables, x), grad)

    for _ in range(count):
        gradient = state_gradient(of_variables, variables, x)
        variables = jaxfp8.update_state(variables, gradient)
    return variables[OWG]


def nnx_optimizer_steps(count):
    """The same with an optimizer, whose `update` gets arrays alone; its parameters do
    not move.
    """
    x, kernel, grad = grids.data()
    fp8 = jaxfp8.nnx.Fp8DotGeneral(RECIPE)
    layer = nnx.Linear(
        grids.K, grids.N, use_bias=False, dot_general=fp8, rngs=nnx.Rngs(0)
    )
    layer.kernel.set_value(jnp.asarray(kernel))
    optimizer = jaxfp8.nnx.Optimizer(layer, optax.sgd(0.0, momentum=0.9))
    for _ in range(count):
        _, gradients = jaxfp8.nnx.value_and_grad(
            lambda layer, x: jnp.vdot(layer(x), grad), argnums=(0, 1)
        )(layer, x)
        optimizer.update(layer, gradients[0])
    return nnx.to_pure_dict(nnx.state(layer, jaxfp8.nnx.OverwriteWithGradient))[
        "dot_general"
    ]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("run", [linen_steps, nnx_optimizer_steps])
def test_variables_of_layers(run, steps):
    variables = run(steps)
    variables = variables.get("Fp8DotGeneral_0", variables)
    assert set(variables) == {
        f"{role}_{name}" for role in ROLES for name in ("amax", "count")
    }
    assert_state(variables, seen(*grids.data(), steps - 1), steps)


def test_variables_in_an_optimizer_of_arrays_are_refused():
    """Flax gives `update` plain arrays: no type tells the state from parameters."""
    fp8 = jaxfp8.nnx.Fp8DotGeneral(RECIPE)
    layer = nnx.Linear(4, 4, dot_general=fp8, rngs=nnx.Rngs(0))
    tx = jaxfp8.train.optimizer(optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"init: params: .* got dot_general/.*jaxfp8\.nnx\.Optimizer"
    ):
        nnx.Optimizer(layer, tx, wrt=jaxfp8.nnx.trainable)
