"""vmap: a shared state sees the whole batch as one product, a batched state is one
state a member.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from equality import assert_same_bits

import jaxfp8
from programs import cases
from programs.known_amax import OPERANDS, merged, used_state

B, C = 3, 2
DTYPES = pytest.mark.parametrize(
    "dtype", [np.dtype(np.float32), oracle.BF16], ids=["f32", "bf16"]
)


def gradients(function, x, kernel, state, grad):
    """(y, dx, dkernel, next state) of a vmapped product."""

    @jax.jit
    def step(x, kernel, state, grad):
        y, vjp = jax.vjp(function, x, kernel, state)
        return y, *vjp(grad)

    return step(x, kernel, state, grad)


def dense(x, kernel, grad, state) -> oracle.DenseStep:
    return oracle.dense_step(
        x, kernel, grad, state, out_dtype=x.dtype, dgrad_dtype=x.dtype
    )


@DTYPES
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
    steps = [dense(x[i], kernel, grad[i], state) for i in range(B)]
    cases.assert_state(got, [step.state for step in steps])
    together = jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), got)
    cases.assert_state(together, cases.one_product(x, kernel, grad, state).state)
    for i, expected in enumerate(steps):
        expected.check(f"example {i}", dgrad=dx[i], wgrad=dkernel[i])


@pytest.mark.parametrize("own", OPERANDS)
def test_one_quantizer_of_its_own(own):
    """Members with a state of their own for one quantizer share the others': the max
    over all members.
    """
    x, kernels, grads = cases.operands(B, kernels=(B,))
    common, owned = used_state(), [used_state(seed) for seed in range(1, 1 + B)]
    states = [
        dataclasses.replace(common, **{own: getattr(state, own)}) for state in owned
    ]
    steps = [dense(*member) for member in zip(x, kernels, grads, states, strict=True)]

    def all_members(x, kernels, common, owned):
        def member(x, kernel, quantizer):
            return cases.product(
                x, kernel, dataclasses.replace(common, **{own: quantizer})
            )

        return jax.vmap(member)(x, kernels, getattr(owned, own))

    step = jax.jit(lambda *args: jax.vjp(all_members, *args)[1](grads))
    _, dkernels, from_common, from_owned = step(
        x, kernels, cases.pack(common), cases.pack(owned)
    )

    shared = [
        dataclasses.replace(step.state, **{own: getattr(common, own)}) for step in steps
    ]
    expected = dataclasses.replace(
        cases.pack(merged(shared)), **{own: getattr(from_common, own)}
    )
    assert_same_bits(from_common, expected, "shared")
    cases.assert_untouched(getattr(from_common, own))
    expected = getattr(cases.pack([step.state for step in steps]), own)
    assert_same_bits(getattr(from_owned, own), expected, "owned")
    for i, step in enumerate(steps):
        step.wgrad.check(dkernels[i], f"wgrad {i}")


@pytest.mark.parametrize("state_axis", [None, 0])
def test_no_members(state_axis):
    """A batch of no examples: an empty result, a state that nothing touched."""
    x, kernel, _ = cases.operands(0)
    state = cases.pack(used_state())
    if state_axis == 0:
        state = jax.tree.map(
            lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), state
        )
    y, vjp = jax.vjp(
        jax.vmap(cases.product, in_axes=(0, None, state_axis)), x, kernel, state
    )
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
    "axis 1 of the state": (
        jax.vmap(cases.product, in_axes=(0, None, 1)),
        (B,),
        0,
        1,
        0,
    ),
    "the last axis": (
        jax.vmap(cases.product, in_axes=(0, None, -1), out_axes=1),
        (B,),
        0,
        -1,
        1,
    ),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensembles(name):
    """Each member has a state, and maybe a batch; the axis of the states comes back
    where it was.
    """
    function, batch, axis, state_axis, out_axis = ENSEMBLES[name]
    x, kernel, grad = cases.operands(*batch)
    states = [used_state(seed) for seed in range(B)]
    packed = jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf, 0, state_axis), cases.pack(states)
    )
    y, dx, _, got = gradients(
        function, x, kernel, packed, np.moveaxis(grad, axis, out_axis)
    )
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
    packed = cases.pack(states if state_axis == 0 else states[0])

    def product(x, kernel, bias, state):
        return jaxfp8.dot_general(
            x, kernel, cases.MATMUL, recipe=cases.RECIPE, state=state, bias=bias
        )

    def members(biases, states):
        return jax.vmap(product, (0, 0, 0, state_axis))(x, kernels, biases, states)

    y, vjp = jax.vjp(members, biases, packed)
    dbiases, _ = vjp(grad)
    states = states if state_axis == 0 else states[:1] * B
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


@pytest.mark.parametrize("vectors", [False, True], ids=["matrices", "vectors"])
def test_a_batch_with_a_shared_state_is_three_products(vectors):
    """fprop, dgrad and wgrad of all rows; the kernel's gradient is one matrix, not one
    for each member.
    """
    x, kernel, grad = cases.operands(B)
    product = jax.vmap(cases.product, in_axes=(0, None, None))
    product = jax.vmap(product, in_axes=(0, None, None)) if vectors else product

    def loss(x, kernel, state):
        return jnp.sum(product(x, kernel, state) * grad)

    got = dots(
        jax.value_and_grad(loss, argnums=(0, 1, 2)), x, kernel, cases.pack(used_state())
    )
    rows, k, n = B * cases.ROWS, cases.K, cases.N
    sizes = sorted(int(np.prod([int(d) for d in shape.split("x")])) for shape in got)
    assert sizes == sorted([rows * n, rows * k, k * n]), got


@pytest.mark.parametrize("state_axis", [None, 0], ids=["experts", "ensemble"])
def test_a_batch_of_kernels_is_three_grouped_products(state_axis):
    x, kernels, grad = cases.operands(B, kernels=(B,))
    states = [used_state(seed) for seed in range(B)]
    packed = cases.pack(states if state_axis == 0 else states[0])

    def loss(x, kernels, state):
        return jnp.sum(
            jax.vmap(cases.product, in_axes=(0, 0, state_axis))(x, kernels, state)
            * grad
        )

    got = dots(jax.value_and_grad(loss, argnums=(0, 1, 2)), x, kernels, packed)
    assert len(got) == 3, got


def of_activated(x, kernel):
    return jaxfp8.dot_general(
        jaxfp8.activated(x, "silu"),
        kernel,
        cases.MATMUL,
        recipe=jaxfp8.Float8CurrentScaling(),
    )


def of_normalized(x, kernel):
    x = jaxfp8.normalized(x, jnp.ones(8), kind="rms")
    return jaxfp8.dot_general(
        x, kernel, cases.MATMUL, recipe=jaxfp8.Float8CurrentScaling()
    )


def of_codes_once(x, kernel):
    codes = jaxfp8.quantize_params(
        {"kernel": kernel}, None, jaxfp8.Float8CurrentScaling(), where="kernel"
    )["kernel"]
    return jaxfp8.dot_general(
        x, codes, cases.MATMUL, recipe=jaxfp8.Float8CurrentScaling()
    )


def of_groups(x, kernel):
    return jaxfp8.ragged_dot(
        x, kernel[None], jnp.int32([3]), recipe=jaxfp8.Float8CurrentScaling()
    )


@pytest.mark.parametrize(
    "product", [of_activated, of_normalized, of_codes_once, of_groups]
)
@pytest.mark.parametrize(
    "transform",
    [lambda loss: loss, lambda loss: jax.grad(loss, (0, 1))],
    ids=["loss", "grad"],
)
def test_arrays_of_numpy_in_a_vmap_in_jit(product, transform):
    """JAX's custom derivatives refuse them ("non-canonical constant"); products take
    them as `jnp` arrays.
    """
    x, kernel = (normal(*shape) for shape in ((2, 3, 8), (2, 8, 4)))
    each = jax.vmap(transform(lambda x, kernel: jnp.sum(product(x, kernel))))
    # XLA computes constants as it compiles, and rounds activations and norms otherwise
    # there.
    got, expected = jax.jit(lambda: each(x, kernel))(), jax.jit(each)(x, kernel)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        expected,
    )
