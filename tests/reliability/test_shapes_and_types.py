"""Shapes and types: nothing to see, odd sizes, strange memory, operands that are no floats, through the layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, PartitionSpec as P

import jaxfp8

from .cases import OWG, assert_same_bits, assert_state, dense, normal, step_of, used_state, variables_of

# ------------------------------------------------------------------------------------------------------- nothing to see


@pytest.mark.parametrize("m, k", [(0, 8), (6, 0), (0, 0)], ids=["0-size batch", "K = 0", "both"])
@pytest.mark.parametrize("dtype", [np.float32, oracle.BF16], ids=["f32", "bf16"])
def test_nothing_to_see(m, k, dtype):
    """Zeros of the right shape and dtype; the stored history is what it was. Flax raises for an empty batch."""
    n, variables = 5, variables_of(normal(0, (k, 5)), used_state())
    layer = dense(n, dtype=dtype).clone(kernel_init=nn.initializers.zeros)  # the default divides by K
    got = step_of(layer)(variables, np.ones((m, k), np.float32), np.ones((m, n), np.float32))
    for product, shape, wanted in (
        (got.y, (m, n), dtype),
        (got.dx, (m, k), np.float32),
        (got.dkernel, (k, n), np.float32),
    ):
        assert product.shape == shape and product.dtype == wanted and not np.any(product)
    assert_same_bits(jaxfp8.update_state(variables, got.variables)[OWG], variables[OWG], "state")


def test_empty_expert():
    """Of three experts the second got no tokens: its output is empty and its state stays; the others train."""
    layer, loads = dense(5), (6, 0, 3)
    variables = {f"expert_{i}": variables_of(normal(i, (8, 5)), used_state(i)) for i in range(3)}
    x, grad = (normal(10 + width, (sum(loads), width)) for width in (8, 5))

    @jax.jit
    def gradient(variables, x, grad):
        def loss(variables):
            tokens = jnp.split(x, np.cumsum(loads)[:-1])
            y = [layer.apply(variables[f"expert_{i}"], rows) for i, rows in enumerate(tokens)]
            return jnp.vdot(jnp.concatenate(y), grad)

        return jax.grad(loss)(variables)

    after = jaxfp8.update_state(variables, gradient(variables, x, grad))
    start = 0
    for i, load in enumerate(loads):
        rows, expert = slice(start, start := start + load), f"expert_{i}"
        if load == 0:
            assert_same_bits(after[expert][OWG], variables[expert][OWG], expert)
        else:
            expected = oracle.dense_step(x[rows], normal(i, (8, 5)), grad[rows], used_state(i))
            assert_state(after[expert], expected.state, expert)


def test_experts_without_capacity():
    """Stacked experts, a state each, and no room for tokens: every row of the state is untouched."""
    experts = nn.vmap(nn.Dense, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True})(
        5, use_bias=False, dot_general_cls=jaxfp8.Fp8DotGeneral
    )
    variables = experts.init(jax.random.key(0), jnp.ones((3, 4, 8)))
    loss = lambda variables: jnp.sum(experts.apply(variables, jnp.ones((3, 0, 8))) ** 2)  # noqa: E731
    assert_same_bits(jaxfp8.update_state(variables, jax.grad(loss)(variables)), variables, "three experts")


@pytest.mark.parametrize("check_vma", [True, False])
def test_empty_shard(check_vma):
    """Eight devices with no rows each."""
    layer, variables = dense(5), variables_of(normal(0, (8, 5)), used_state())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gradient = jax.grad(lambda variables, x: jnp.sum(layer.apply(variables, x) ** 2), argnums=(0, 1))
    mapped = jax.shard_map(
        gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")), check_vma=check_vma
    )
    gradients, dx = jax.jit(mapped)(variables, np.ones((0, 8), np.float32))
    assert dx.shape == (0, 8) and not np.any(gradients["params"]["kernel"])
    assert_same_bits(jaxfp8.update_state(variables, gradients)[OWG], variables[OWG], "state")


# ------------------------------------------------------------------------------------------------------------ odd sizes


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), oracle.BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape, features", [((217, 41), 13), ((7, 5, 3), 41)], ids=["217x41", "7x5x3"])
def test_odd_sizes(shape, features, dtype):
    """No dimension is a multiple of anything: all products within their bounds, state to the bit."""
    x, kernel = normal(0, shape, dtype=dtype), normal(1, (shape[-1], features))
    grad, state = normal(2, (*shape[:-1], features), dtype=dtype), used_state()
    got = step_of(dense(features, dtype=dtype))(variables_of(kernel, state), x, grad)
    flat_x, flat_grad = x.reshape(-1, shape[-1]), grad.reshape(-1, features)
    expected = oracle.dense_step(
        flat_x, kernel.astype(dtype), flat_grad, state, out_dtype=dtype, dgrad_dtype=dtype, wgrad_dtype=dtype
    )
    assert_state(got.variables, expected.state, "odd sizes")
    expected.y.check(np.asarray(got.y).reshape(flat_grad.shape), "y")
    expected.dgrad.check(np.asarray(got.dx).reshape(flat_x.shape), "dx")
    expected.wgrad.check(np.asarray(got.dkernel).astype(dtype), "dkernel")  # nn.Dense widens it to the f32 parameter


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """The last values of an operand that 32-bit indices do not reach: codes, transposed codes and both amaxes (9 GiB).

    The first step measures the tensor, 448 / 3.5 = 128, so an amax that misses the end shows in every code.
    """
    rows, cols = 2**25 + 65, 64
    x = jnp.ones((rows, cols), jnp.bfloat16).at[-1, -1].set(-3.5).at[-2, 0].set(2)
    assert x.size > 2**31
    quantizer = jaxfp8.DelayedScaling(amax_history_len=2, first_step="current").quantizers()[0]
    q, state = jax.jit(lambda x, state: quantizer.quantize(x[None], state), donate_argnums=0)(x, quantizer.init())
    assert state.amax_history.tolist() == [3.5, 0] and state.scale.tolist() == [2.0**-7]
    assert q.data.shape == (1, rows, cols) and q.data_t.shape == (1, cols, rows)
    expected = np.full((1000, cols), 128, np.float32)
    expected[-1, -1], expected[-2, 0] = -448, 256
    np.testing.assert_array_equal(np.asarray(q.data[0, -1000:]).astype(np.float32), expected)
    np.testing.assert_array_equal(np.asarray(q.data_t[0, :, -1000:]).astype(np.float32), expected.T)


# ------------------------------------------------------------------------------------------------------ strange memory

VIEWS = {
    "transposed": lambda x: x.T,
    "rows sliced": lambda x: x[1:33],
    "columns sliced": lambda x: x[:, 3:30],
    "every third": lambda x: x[::3, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "one of a stack": lambda x: x.reshape(5, 8, 36)[3],
    "broadcast": lambda x: jnp.broadcast_to(x[:1], (7, x.shape[1])),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_sliced_operands(view):
    """x as a view of a larger array inside jit, where XLA picks the layout: bitwise a dense copy of it."""
    whole = normal(0, (40, 36), dtype=oracle.BF16)
    x = np.ascontiguousarray(np.asarray(view(whole)))
    kernel, grad = normal(1, (x.shape[1], 5)), normal(2, (len(x), 5), dtype=oracle.BF16)
    variables, step = variables_of(kernel, used_state()), step_of(dense(5, dtype=oracle.BF16))
    got = jax.jit(lambda whole: step(variables, view(whole), grad))(whole)
    assert_same_bits(got, step(variables, x, grad), "view")


@pytest.mark.parametrize("which", ["x", "kernel", "grad"])
def test_column_major_operands(which):
    """An argument that lies in memory column by column."""
    operands = {"x": normal(0, (40, 36)), "kernel": normal(1, (36, 20)), "grad": normal(2, (40, 20))}
    layer, state = dense(20), used_state()

    def run(x, kernel, grad):
        return step_of(layer)(variables_of(kernel, state), x, grad)

    form = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    placed = {**operands, which: jax.device_put(operands[which], form)}
    assert placed[which].format.layout.major_to_minor == (1, 0)
    shardings = tuple(form if name == which else None for name in operands)
    got = jax.jit(run, in_shardings=shardings)(*placed.values())
    assert_same_bits(got, jax.jit(run)(*operands.values()), which)


# ------------------------------------------------------------------------------------------ operands that are no floats

MATMUL = (((1,), (0,)), ((), ()))
RECIPE = jaxfp8.DelayedScaling(amax_history_len=2)


STATE = {"recipe": RECIPE, "state": jaxfp8.init_state(RECIPE)}
PRODUCTS = {
    "dot_general": lambda x, kernel: jaxfp8.dot_general(x, kernel, MATMUL, **STATE),
    "einsum": lambda x, kernel: jaxfp8.einsum("mk,kn->mn", x, kernel, **STATE),
    "linen.Fp8DotGeneral": lambda x, kernel: jaxfp8.Fp8DotGeneral(RECIPE).init(jax.random.key(0), x, kernel, MATMUL),
    "linen.Fp8Einsum": lambda x, kernel: jaxfp8.linen.Fp8Einsum(RECIPE).init(jax.random.key(0), "mk,kn->mn", x, kernel),
}


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_operands_that_are_no_floats(product, dtype):
    """TypeError with the argument's name and dtype; a quiet cast of int or FP8 codes would be a wrong number."""
    good = {"x": jnp.ones((2, 3)), "kernel": jnp.ones((3, 4))}
    product(**good)
    for name, value in good.items():
        with pytest.raises(TypeError, match=rf"\b{name}\b.*{dtype}"):
            product(**{**good, name: value.astype(dtype)})
