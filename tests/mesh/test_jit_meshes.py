"""Training under jit on meshes of 2 x 2 x 2: every layout gives the bits of one device,
on every device.
"""

import jax
import jax.numpy as jnp
import pytest
from draws import KEY
from jax.sharding import PartitionSpec as P, reshard
from parametrize import each_row

import jaxfp8
from mesh import cases

KINDS = ("auto", "explicit")


def train(kind, name, recipe=cases.RECIPE, with_state=True, steps=cases.STEPS):
    mesh = cases.mesh(kind)
    layout = cases.LAYOUTS[name]
    with jax.set_mesh(mesh):
        weights, state, batches = cases.arguments(mesh, layout, recipe, with_state)
        return cases.train(
            cases.jitted(mesh, layout, recipe), weights, state, batches[:steps]
        )


@pytest.mark.parametrize("name", cases.LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps(kind, name):
    cases.assert_same(train(kind, name), cases.reference(), f"{kind} {name}")


# Gradients of a kernel [32, 16]. x has small whole numbers, which FP8 and sums of any
# order keep.
REDUCED_RECIPES = {
    "delayed": jaxfp8.DelayedScaling(amax_history_len=4),
    "current": jaxfp8.Float8CurrentScaling(),
}


def _by_recipe(recipe, product, kernel, x):
    state = jaxfp8.init_state(recipe) if recipe == REDUCED_RECIPES["delayed"] else None
    if product == "ragged_dot":
        sizes = jnp.full((1,), x.shape[0], jnp.int32)
        return jaxfp8.ragged_dot(
            reshard(x, P()), kernel[None], sizes, recipe=recipe, state=state
        )
    if product == "quantize_params":
        kernel = jaxfp8.quantize_params(kernel, None, recipe, where=".*")
    bias = jnp.zeros(kernel.shape[1:])
    return jaxfp8.dot_general(
        x, kernel, cases.MATMUL, recipe=recipe, state=state, bias=bias
    )


@pytest.mark.filterwarnings("ignore:this gradient never updates FP8 state")
@pytest.mark.parametrize("product", ["dot_general", "ragged_dot", "quantize_params"])
@each_row("recipe", REDUCED_RECIPES)
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_gradients_of_reduced_kernels(implementation, recipe, product):
    """A kernel that is `reduced` over the data axes has an unreduced gradient, whose
    sum is that of a plain kernel.
    """
    axes = set(cases.AXES)
    kernel = jax.random.randint(KEY, (32, 16), -4, 5).astype(jnp.float32)
    x = jax.random.randint(jax.random.key(1), (64, 32), -4, 5).astype(jnp.float32)

    def gradient(kernel, x):
        return jax.grad(lambda kernel: jnp.sum(_by_recipe(recipe, product, kernel, x)))(
            kernel
        )

    def summed(kernel, x):
        unreduced = gradient(reshard(kernel, P(None, None, reduced=axes)), x)
        assert jax.typeof(unreduced).sharding.spec.unreduced == axes
        return reshard(unreduced, P(None, None))

    with (
        jax.set_mesh(cases.mesh("explicit")),
        jaxfp8.ops.implementation(implementation),
    ):
        kernel = reshard(kernel, P(None, None))
        x = reshard(x, P(cases.AXES, None))
        expected = jax.jit(gradient)(kernel, x)
        assert jnp.array_equal(jax.jit(summed)(kernel, x), expected)


def test_a_reduced_state_and_an_unreduced_result_are_refused():
    recipe = REDUCED_RECIPES["delayed"]
    axes = set(cases.AXES)
    with jax.set_mesh(cases.mesh("explicit")):
        x, kernel, state = (
            reshard(tree, P())
            for tree in (
                jnp.ones((64, 32)),
                jnp.ones((32, 16)),
                jaxfp8.init_state(recipe),
            )
        )
        reduced = jax.tree.map(lambda leaf: reshard(leaf, P(None, reduced=axes)), state)
        with pytest.raises(
            ValueError, match="dot_general: state: expected one without `reduced` axes"
        ):
            jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe, state=reduced)
        with pytest.raises(
            ValueError,
            match="dot_general: out_sharding: expected one without `unreduced`",
        ):
            jaxfp8.dot_general(
                x,
                kernel,
                cases.MATMUL,
                recipe=recipe,
                state=state,
                out_sharding=P(unreduced=axes),
            )
