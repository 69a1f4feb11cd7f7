"""Layers in a loop, whose state is read before it, against the same layers one after
the other: bit for bit.

The layers one after the other have a state each, that nothing stacks; the oracle judges
those everywhere else.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from draws import KEY
from equality import assert_same_bits
from jax import lax
from parametrize import each_row

import jaxfp8
from jaxfp8.ops import _readings
from programs.cases import MATMUL, row, stack_rows, stacked

LAYERS, ROWS, WIDTH = 4, 8, 16
DELAYED = jaxfp8.DelayedScaling(amax_history_len=4)
RECIPES = {
    "H = 1": jaxfp8.DelayedScaling(amax_history_len=1),
    "H = 2": jaxfp8.DelayedScaling(amax_history_len=2),
    "most recent": jaxfp8.DelayedScaling(
        amax_history_len=4, amax_compute_algo="most_recent"
    ),
    "margin, e4m3": jaxfp8.DelayedScaling(
        margin=2, amax_history_len=4, fp8_format=jaxfp8.Format.E4M3
    ),
    "a function": jaxfp8.DelayedScaling(
        amax_history_len=4, amax_compute_algo=lambda history: 2 * jnp.max(history)
    ),
    "current first": jaxfp8.DelayedScaling(amax_history_len=4, first_step="current"),
}


def layer(recipe, x, kernel, state):
    """Without a product beside an addition, which XLA may contract in one program and
    not in another.
    """
    return (
        jnp.maximum(
            jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state), 0
        )
        + x
    )


def scan(use, x, kernels, states):
    return lax.scan(lambda x, at: (use(x, *at), None), x, (kernels, states))[0]


def scan_of_scan(use, x, kernels, states):
    halves = jax.tree.map(
        lambda leaf: leaf.reshape(2, LAYERS // 2, *leaf.shape[1:]), (kernels, states)
    )
    return lax.scan(lambda x, at: (scan(use, x, *at), None), x, halves)[0]


def by_index(use, x, kernels, states):
    def body(i, x):
        return use(
            x,
            *jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False),
                (kernels, states),
            ),
        )

    return lax.fori_loop(0, LAYERS, body, x)


def unstacked(use, x, kernels, states):
    for at in zip(
        jnp.unstack(kernels), *map(jnp.unstack, jax.tree.leaves(states)), strict=True
    ):
        x = use(x, at[0], jax.tree.unflatten(jax.tree.structure(states), at[1:]))
    return x


LOOPS = {
    "scan of remat": lambda use, *args: scan(jax.checkpoint(use), *args),
    "scan of scan": scan_of_scan,
    "by index": by_index,
    "unstacked": unstacked,
}


def assert_same_steps(loop, recipe, use=layer):
    """Compare five steps: one of them with a NaN, the last one with state below
    zero.
    """
    use = functools.partial(use, recipe)
    kernels = jax.random.normal(KEY, (LAYERS, WIDTH, WIDTH)) / 4
    states = stacked(jaxfp8.init_state(recipe), LAYERS)

    def one_after_the_other(use, x, kernels, states):
        for at in zip(kernels, states, strict=True):
            x = use(x, *at)
        return x

    def loss(trainable, x, loop):
        return jnp.sum(loop(use, x, *trainable) ** 2)

    # x too: all layers have all products
    in_loop = jax.jit(functools.partial(jaxfp8.grad(loss, (0, 1)), loop=loop))
    one_by_one = jax.jit(
        functools.partial(jaxfp8.grad(loss, (0, 1)), loop=one_after_the_other)
    )
    for step in range(5):
        x = jax.random.normal(jax.random.key(step), (ROWS, WIDTH)) * 2.0**step
        x = x.at[0, 0].set(jnp.nan) if step == 2 else x
        if step == 4:
            states = jax.tree.map(lambda leaf: leaf.at[1].set(-leaf[1]), states)
        rows = [row(states, i) for i in range(LAYERS)]
        (dkernels, next_states), _ = in_loop((kernels, states), x)
        expected, _ = one_by_one((list(kernels), rows), x)
        expected = list(map(stack_rows, expected))
        assert_same_bits(next_states, expected[1], f"state of step {step}")
        assert_same_bits(dkernels, expected[0], f"gradients of step {step}")
        states = next_states


@each_row("recipe", RECIPES)
def test_recipes(recipe, reads):
    assert_same_steps(scan, recipe)
    assert reads


def test_one_gpu_reads_both_amaxes_from_one_array(monkeypatch):
    """The same steps by what one GPU computes, which does not read the amax of x or of
    the kernel by itself.
    """
    joined = []

    def as_on_one_gpu(op, *operands):
        joined.append(len(operands))
        unread = [jnp.full_like(amax, jnp.nan) for amax in operands[:2]]
        return op.cuda(*unread, *operands[2:])

    monkeypatch.setattr(_readings._JoinRecorded, "cpu", as_on_one_gpu)
    assert_same_steps(scan, DELAYED)
    assert set(joined) == {3 + 3 + 1}


@each_row("recipe", RECIPES)
def test_the_arithmetic_of_scales_is_not_in_the_program(recipe):
    """Exact quotients are a hundred operations for each product and pass, which XLA
    compiles: ops compute them.
    """
    kernels = jnp.ones((LAYERS, WIDTH, WIDTH))
    states = stacked(jaxfp8.init_state(recipe), LAYERS)

    def loss(trainable, x):
        return jnp.sum(scan(functools.partial(layer, recipe), x, *trainable))

    program = str(
        jax.make_jaxpr(jaxfp8.grad(loss))((kernels, states), jnp.ones((ROWS, WIDTH)))
    )
    assert "read_histories" in program
    assert "shift_left" not in program


def test_a_row_by_its_index_names_unstack():
    """Outside of a loop; the dtype of a gradient of state has no such rule."""
    states = stacked(jaxfp8.init_state(DELAYED), LAYERS)

    def first(states):
        x, kernel = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH))
        return jnp.sum(layer(DELAYED, x, kernel, row(states, 0)))

    with pytest.raises(TypeError, match="jnp.unstack"):
        jaxfp8.grad(first)(states)


@each_row("loop", LOOPS)
def test_loops(loop, reads):
    assert_same_steps(loop, DELAYED)
    assert reads


def test_a_call_that_is_not_finite():
    """It leaves the amaxes of the other call of the same layers."""
    kernels = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH
    states = stacked(jaxfp8.init_state(DELAYED), LAYERS)
    good = jnp.ones((ROWS, WIDTH))
    use = functools.partial(layer, DELAYED)

    def loss(states, *calls):
        return sum(jnp.sum(scan(use, x, kernels, states)) for x in calls)

    gradient = jaxfp8.grad(loss)
    bad = good.at[0, 0].set(jnp.nan)
    assert_same_bits(gradient(states, good, bad), gradient(states, good))


def quantized_once(recipe, x, kernel, state):
    return layer(
        recipe,
        x,
        jaxfp8.quantize_params({"w": kernel}, {"w": state}, recipe)["w"],
        state,
    )


def experts(recipe, x, kernel, state):
    """Two experts, of the same kernel and of twice that."""
    kernels = jnp.stack([kernel, 2 * kernel])
    return x + jnp.maximum(
        jaxfp8.ragged_dot(
            x, kernels, jnp.int32([3, ROWS - 4]), recipe=recipe, state=state
        ),
        0,
    )


def quantizer(role):
    return jaxfp8.recipes.DelayedScalingQuantizer(
        margin=role == "linear_weight", amax_history_len=3
    )


def of_operands(role):
    return (
        quantizer(role)
        if role in ("linear_input", "linear_weight", "linear_grad_output")
        else None
    )


OTHERS = {
    "codes": (quantized_once, DELAYED, True),
    "experts": (experts, DELAYED, True),
    "custom": (layer, jaxfp8.CustomRecipe(of_operands), True),
    "custom, results too": (layer, jaxfp8.CustomRecipe(quantizer), False),
}


@each_row("use, recipe, is_read", OTHERS)
def test_other_products(use, recipe, is_read, reads):
    """With the state read outside of the loop or, where `is_read` is False, in it."""
    assert_same_steps(scan, recipe, use)
    assert bool(reads) == is_read
