"""Steps as TPUs run them, on the CPU of this machine: the results of the jnp
reference.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import ops

NUMBERS = {
    "rows": (((1,), (0,)), ((), ())),
    "first": (((0,), (1,)), ((), ())),
    "batch": (((2,), (1,)), ((0,), (0,))),
}
SHAPES = {
    "rows": ((32, 48), (48, 16)),
    "first": ((48, 32), (16, 48)),
    "batch": ((2, 32, 48), (2, 48, 16)),
}
RECIPES = {
    "delayed": jaxfp8.DelayedScaling(amax_history_len=4),
    "current": jaxfp8.Float8CurrentScaling(),
}
RECIPES |= {"rows": jaxfp8.Float8RowwiseScaling()}


def operands(layout):
    rng = np.random.default_rng(0)
    x, kernel = (
        rng.standard_normal(shape).astype(np.float32) for shape in SHAPES[layout]
    )
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(kernel)


def assert_as_reference(function, *arguments):
    """The value and the gradients of a function of bfloat16 numbers."""

    def loss(*arguments):
        return jnp.sum(jnp.sin(function(*arguments).astype(jnp.float32)))

    step, results = jax.value_and_grad(loss, tuple(range(len(arguments)))), []
    for name in ("reference", "tpu"):
        with ops.implementation(name):
            results.append(jax.jit(step)(*arguments))
    for expected, got in zip(*map(jax.tree.leaves, results), strict=True):
        assert expected.dtype == got.dtype
        # Sums may be in another order.
        expected, got = np.float32(expected), np.float32(got)
        atol = 2**-9 * np.max(np.abs(expected))
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=atol)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("delayed", "rows"), ("delayed", "first"), ("current", "batch"), ("rows", "rows")],
)
def test_a_step_is_that_of_the_reference(recipe, layout):
    recipe = RECIPES[recipe]

    def product(x, kernel, state):
        options = {"recipe": recipe, "preferred_element_type": jnp.bfloat16}
        return jaxfp8.dot_general(x, kernel, NUMBERS[layout], state=state, **options)

    assert_as_reference(product, *operands(layout), jaxfp8.init_state(recipe))


@pytest.mark.parametrize("name", ["tpu", "reference"])
def test_a_loop_keeps_codes_as_the_first_product_reads_them(name):
    recipe = jaxfp8.StaticScaling()
    x, kernel = operands("rows")
    with ops.implementation(name) if name == "tpu" else contextlib.nullcontext():
        vjp = jax.eval_shape(
            lambda *operands: jax.vjp(
                lambda *o: jaxfp8.dot_general(*o, NUMBERS["rows"], recipe=recipe),
                *operands,
            )[1],
            x,
            kernel,
        )
    shapes = {
        leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.float8_e4m3fn
    }
    assert ((32, 48) in shapes) == (name == "tpu")


@pytest.mark.parametrize(
    "recipe",
    [jaxfp8.Float8BlockScaling(), jaxfp8.MXFP8BlockScaling()],
    ids=lambda r: type(r).__name__,
)
def test_recipes_of_blocks_are_refused_by_name(recipe):
    with (
        ops.implementation("tpu"),
        pytest.raises(NotImplementedError, match="Float8RowwiseScaling"),
    ):
        jaxfp8.dot_general(
            jnp.ones((32, 256)), jnp.ones((256, 32)), NUMBERS["rows"], recipe=recipe
        )


def test_a_ragged_product_on_a_mesh_is_refused_outside_of_shard_map():
    mesh = jax.make_mesh((2,), ("experts",), devices=jax.devices()[:2])
    cut, sizes = jax.NamedSharding(mesh, jax.P("experts")), jnp.array([3, 4])
    lhs, rhs, sizes = jax.device_put(
        (jnp.ones((8, 16)), jnp.ones((2, 16, 32)), sizes), cut
    )

    def multiply(lhs, rhs, sizes):
        return jaxfp8.ragged_dot(
            lhs, rhs, sizes, recipe=jaxfp8.Float8CurrentScaling(power_2_scale=True)
        )

    specs = {"in_specs": (jax.P("experts"),) * 3, "out_specs": jax.P("experts")}
    with ops.implementation("tpu"):
        with pytest.raises(
            NotImplementedError,
            match="ragged_matmul: expected operands .* jax.shard_map",
        ):
            jax.jit(multiply)(lhs, rhs, sizes)
        y = jax.jit(jax.shard_map(multiply, mesh=mesh, **specs))(lhs, rhs, sizes)
    np.testing.assert_array_equal(
        y, np.float32([16] * 3 + [0] + [16] * 4)[:, None] * np.ones(32)
    )
