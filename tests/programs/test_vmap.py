"""vmap: a shared state sees the whole batch as one product, a batched state is one
state a member.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from equality import assert_same_bits
from parametrize import each_row

import jaxfp8
from programs import cases
from programs.known_amax import used_state

B, C = 3, 2
CURRENT = jaxfp8.Float8CurrentScaling()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), oracle.BF16], ids=str)
def test_gradients_per_example(dtype):
    """vmap of grad is grad of each example, the state's gradient included: the caller
    takes the max over examples.
    """
    x, kernel, grad = cases.operands(B, dtype=dtype)
    state = used_state()
    packed = cases.pack(state)

    def loss(x, kernel, state, grad):
        return jnp.sum((cases.product(x, kernel, state) * grad).astype(jnp.float32))

    per_example = jax.vmap(
        jax.grad(loss, argnums=(0, 1, 2)), in_axes=(0, None, None, 0)
    )
    dx, dkernel, got = jax.jit(per_example)(x, kernel, packed, grad)
    steps = [cases.one_product(x[i], kernel, grad[i], state) for i in range(B)]
    cases.assert_state(got, [step.state for step in steps])
    together = jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), got)
    cases.assert_state(together, cases.one_product(x, kernel, grad, state).state)
    for i, expected in enumerate(steps):
        expected.check(f"example {i}", dgrad=dx[i], wgrad=dkernel[i])


def test_members_share_the_state_of_one_quantizer():
    """The kernel's state sees all members; each of the others sees its own."""
    x, kernel, grad = cases.operands(B)
    state = cases.pack([used_state(seed) for seed in range(B)])
    of_kernel = cases.pack(used_state()).kernel
    repeated = jax.tree.map(lambda leaf: jnp.stack([leaf] * B), of_kernel)

    def gradient(of_kernel, axes):
        def loss(state):
            each = jax.vmap(cases.product, in_axes=(0, None, axes))
            return jnp.vdot(each(x, kernel, state), grad)

        return jax.grad(loss)(dataclasses.replace(state, kernel=of_kernel))

    expected = gradient(repeated, 0)
    largest = jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), expected.kernel)
    expected = dataclasses.replace(expected, kernel=largest)
    got = gradient(of_kernel, jaxfp8.DotGeneralState(0, None, 0))
    assert_same_bits(got, expected, "the next state")


def test_no_members():
    """A batch of no examples: an empty result, a state that nothing touched."""
    x, kernel, _ = cases.operands(0)
    state = cases.pack(used_state())
    each = jax.vmap(cases.product, in_axes=(0, None, None))
    y, vjp = jax.vjp(each, x, kernel, state)
    assert y.shape == (0, cases.ROWS, cases.N)
    dx, dkernel, got = vjp(y)
    assert dx.shape == x.shape and not np.any(dkernel)
    cases.assert_untouched(got)


def nested(outer_axis, inner_axis):
    """The state's axis in each of two vmaps, None where it is shared."""
    return jax.vmap(
        jax.vmap(cases.product, in_axes=(0, None, inner_axis)),
        in_axes=(0, None, outer_axis),
    )


def scanned(x, kernel, state):
    return jax.lax.scan(lambda _, x: (None, cases.product(x, kernel, state)), None, x)[
        1
    ]


# The product, the batch of x, and the axis of the members in x, in the state and in y.
ENSEMBLES = {
    "shared in batched": (nested(0, None), (B, C), 0, 0, 0),
    "a scan in batched": (jax.vmap(scanned, in_axes=(0, None, 0)), (B, C), 0, 0, 0),
    "batched in shared": (nested(None, 0), (C, B), 1, 0, 1),
    "the last axis": (
        jax.vmap(cases.product, in_axes=(0, None, -1), out_axes=1),
        (B,),
        0,
        -1,
        1,
    ),
}


@each_row("function, batch, axis, state_axis, out_axis", ENSEMBLES)
def test_ensembles(function, batch, axis, state_axis, out_axis):
    """Each member has a state, and maybe a batch; the axis of the states comes back
    where it was.
    """
    x, kernel, grad = cases.operands(*batch)
    states = [used_state(seed) for seed in range(B)]
    packed = jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf, 0, state_axis), cases.pack(states)
    )
    y, vjp = jax.vjp(jax.jit(function), x, kernel, packed)
    dx, _, got = vjp(jnp.moveaxis(grad, axis, out_axis))
    steps = [
        cases.one_product(
            np.take(x, i, axis), kernel, np.take(grad, i, axis), states[i]
        )
        for i in range(B)
    ]
    got = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, state_axis, 0), got)
    cases.assert_state(got, [step.state for step in steps])
    for i, step in enumerate(steps):
        member = np.take(np.asarray(y), i, out_axis)
        dx_i = np.take(np.asarray(dx), i, axis)
        step.check(
            f"member {i}",
            y=member.reshape(-1, cases.N),
            dgrad=dx_i.reshape(-1, cases.K),
        )


@pytest.mark.parametrize("state_axis", [None, 0])
def test_a_bias_for_each_kernel(state_axis):
    """Experts: the gradient of each bias is the sum of its rows of grad."""
    x, kernels, grad = cases.operands(B, kernels=(B,))
    biases = np.float32(np.arange(B * cases.N).reshape(B, -1))
    states = [used_state(seed) for seed in range(B)]
    if state_axis is None:
        states = states[:1] * B
    packed = cases.pack(states[0] if state_axis is None else states)

    def product(x, kernel, bias, state):
        return jaxfp8.dot_general(
            x, kernel, cases.MATMUL, recipe=cases.RECIPE, state=state, bias=bias
        )

    def members(biases, states):
        return jax.vmap(product, (0, 0, 0, state_axis))(x, kernels, biases, states)

    y, vjp = jax.vjp(members, biases, packed)
    dbiases, _ = vjp(grad)
    for i, (dbias, state) in enumerate(zip(dbiases, states, strict=True)):
        oracle.assert_column_sums(dbias, grad[i], f"bias {i}")
        oracle.dense_step(x[i], kernels[i], grad[i], state, bias=biases[i]).y.check(
            y[i], f"y {i}"
        )


# ---------------------------------------------------------------------------- structure


def dots(function, *arguments) -> list[str]:
    """The result types of the products that a gradient lowers to, as `4x6`."""
    with jaxfp8.ops.implementation("reference"):
        text = jax.jit(function).lower(*arguments).as_text()
    assert "stablehlo.while" not in text, "a loop would hide products"
    return sorted(re.findall(r"stablehlo\.dot_general.*-> tensor<([0-9x]+)x\w+>", text))


@pytest.mark.parametrize("kernel_axis, state_axis", [(None, None), (0, None), (0, 0)])
def test_a_batch_is_three_products(kernel_axis, state_axis):
    """fprop, dgrad and wgrad. Where a batch shares a kernel and a state, of all rows:
    the kernel's gradient is one matrix, not one for each member.
    """
    x, kernel, grad = cases.operands(B, kernels=() if kernel_axis is None else (B,))
    states = [used_state(seed) for seed in range(B)]
    packed = cases.pack(states[0] if state_axis is None else states)
    product = jax.vmap(cases.product, in_axes=(0, kernel_axis, state_axis))

    def loss(x, kernel, state):
        return jnp.sum(product(x, kernel, state) * grad)

    got = dots(jax.value_and_grad(loss, argnums=(0, 1, 2)), x, kernel, packed)
    assert len(got) == 3
    if kernel_axis is None:
        rows, k, n = B * cases.ROWS, cases.K, cases.N
        sizes = [math.prod(map(int, shape.split("x"))) for shape in got]
        assert sorted(sizes) == sorted([rows * n, rows * k, k * n])


def of_activated(x, kernel):
    return jaxfp8.dot_general(
        jaxfp8.activated(x, "silu"),
        kernel,
        cases.MATMUL,
        recipe=CURRENT,
    )


def of_normalized(x, kernel):
    x = jaxfp8.normalized(x, jnp.ones(8), kind="rms")
    return jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=CURRENT)


def of_codes_once(x, kernel):
    codes = jaxfp8.quantize_params({"kernel": kernel}, None, CURRENT, where="kernel")[
        "kernel"
    ]
    return jaxfp8.dot_general(x, codes, cases.MATMUL, recipe=CURRENT)


def of_groups(x, kernel):
    return jaxfp8.ragged_dot(x, kernel[None], jnp.int32([3]), recipe=CURRENT)


@pytest.mark.parametrize(
    "product", [of_activated, of_normalized, of_codes_once, of_groups]
)
def test_arrays_of_numpy_in_a_vmap_in_jit(product):
    """JAX's custom derivatives refuse them ("non-canonical constant"); products take
    them as `jnp` arrays.
    """
    x, kernel = (normal(*shape) for shape in ((2, 3, 8), (2, 8, 4)))
    loss = lambda x, kernel: jnp.sum(product(x, kernel))  # noqa: E731
    each = jax.vmap(jax.grad(loss, (0, 1)))
    # XLA computes constants as it compiles, and rounds activations and norms otherwise
    # there.
    got, expected = jax.jit(lambda: each(x, kernel))(), jax.jit(each)(x, kernel)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        expected,
    )
