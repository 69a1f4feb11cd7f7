"""One state, many uses: however the uses are written, state and gradients are those of one product of all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

import jaxfp8
from transforms import cases

OUTER, INNER = 2, 2

# Each writes the same: y[i, j] = product(x[i, j], kernel, state) for x [OUTER, INNER, ROWS, K].


def python_loop(product, x, kernel, state):
    return jnp.stack([jnp.stack([product(x_ij, kernel, state) for x_ij in x_i]) for x_i in x])


def nested_scan(product, x, kernel, state):
    def outer(carry, x_i):
        return lax.scan(lambda carry, x_ij: (carry, product(x_ij, kernel, state)), carry, x_i)

    return lax.scan(outer, 0, x)[1]


def reverse_unrolled_scan(product, x, kernel, state):
    def outer(carry, x_i):
        return lax.scan(lambda c, x_ij: (c, product(x_ij, kernel, state)), carry, x_i, unroll=2)

    return lax.scan(outer, 0, x, reverse=True)[1]


def nested_map(product, x, kernel, state):
    return lax.map(lambda x_i: lax.map(lambda x_ij: product(x_ij, kernel, state), x_i), x)


def map_in_batches(product, x, kernel, state):
    flat = x.reshape(-1, *x.shape[2:])
    y = lax.map(lambda x_ij: product(x_ij, kernel, state), flat, batch_size=3)  # one of the four is left over
    return y.reshape(*x.shape[:2], *y.shape[1:])


def fori_loop(product, x, kernel, state):
    flat = x.reshape(-1, *x.shape[2:])

    def body(i, y):
        return y.at[i].set(product(flat[i], kernel, state))

    y = lax.fori_loop(0, len(flat), body, jnp.zeros((len(flat), cases.ROWS, cases.N), x.dtype))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def remat_in_scan(product, x, kernel, state):
    rematerialized = jax.checkpoint(lambda x_ij: product(x_ij, kernel, state))
    return nested_scan(lambda x_ij, *_: rematerialized(x_ij), x, kernel, state)


def scan_in_remat(product, x, kernel, state):
    return jax.checkpoint(lambda x: nested_scan(product, x, kernel, state))(x)


def jit_in_scan(product, x, kernel, state):
    jitted = jax.jit(lambda x_ij: product(x_ij, kernel, state))
    return nested_scan(lambda x_ij, *_: jitted(x_ij), x, kernel, state)


def cond_in_scan(product, x, kernel, state):
    """Both branches use the state, each in every other iteration."""

    def one(index, x_ij):
        branches = [lambda x: product(x, kernel, state), lambda x: -product(-x, kernel, state)]
        return lax.cond(index % 2 == 0, *branches, x_ij)

    flat = x.reshape(-1, *x.shape[2:])
    y = lax.scan(lambda c, xs: (c, one(*xs)), 0, (jnp.arange(len(flat)), flat))[1]
    return y.reshape(*x.shape[:2], *y.shape[1:])


def switch(product, x, kernel, state):
    flat = x.reshape(-1, *x.shape[2:])
    branches = [lambda x, sign=sign: product(x * sign, kernel, state) * sign for sign in (1.0, -1.0)]
    y = jnp.stack([lax.switch(jnp.int32(i % 2), branches, x_ij) for i, x_ij in enumerate(flat)])
    return y.reshape(*x.shape[:2], *y.shape[1:])


def vmap_in_scan(product, x, kernel, state):
    return lax.scan(lambda c, x_i: (c, jax.vmap(lambda x_ij: product(x_ij, kernel, state))(x_i)), 0, x)[1]


def scan_in_vmap(product, x, kernel, state):
    def scanned(x_i):
        return lax.scan(lambda c, x_ij: (c, product(x_ij, kernel, state)), 0, x_i)[1]

    return jax.vmap(scanned)(x)


def nested_vmap(product, x, kernel, state):
    return jax.vmap(jax.vmap(lambda x_ij: product(x_ij, kernel, state)))(x)


def vmap_of_vectors(product, x, kernel, state):
    """Equinox's way: the layer sees one example."""
    over_rows = jax.vmap(lambda row: product(row, kernel, state))
    return jax.vmap(jax.vmap(over_rows))(x)


def vmap_with_arguments(product, x, kernel, state):
    over_inner = jax.vmap(product, in_axes=(0, None, None))
    return jax.vmap(over_inner, in_axes=(0, None, None))(x, kernel, state)


def remat_of_vmap_in_jit_in_scan(product, x, kernel, state):
    body = jax.jit(jax.checkpoint(jax.vmap(lambda x_ij: product(x_ij, kernel, state))))
    return lax.scan(lambda c, x_i: (c, body(x_i)), 0, x)[1]


CLOSED = [
    python_loop,
    nested_scan,
    reverse_unrolled_scan,
    nested_map,
    map_in_batches,
    fori_loop,
    remat_in_scan,
    scan_in_remat,
    jit_in_scan,
    cond_in_scan,
    switch,
    vmap_in_scan,
    scan_in_vmap,
    nested_vmap,
    vmap_of_vectors,
    vmap_with_arguments,
    remat_of_vmap_in_jit_in_scan,
]

# Programs in which the state crosses a boundary as an argument: autodiff adds what comes back unless it was cast.


def remat_with_arguments(product, x, kernel, state):
    return python_loop(jax.checkpoint(product), x, kernel, state)


def jit_with_arguments(product, x, kernel, state):
    return python_loop(jax.jit(product), x, kernel, state)


def state_in_the_carry(product, x, kernel, state):
    def body(carry, x_ij):
        kernel, state = carry
        return carry, product(x_ij, kernel, state)

    def outer(carry, x_i):
        return lax.scan(body, carry, x_i)

    return lax.scan(outer, (kernel, state), x)[1]


def cond_with_arguments(product, x, kernel, state):
    def one(x_ij):
        return lax.cond(x_ij[0, 0] > 0, product, lambda *operands: product(*operands), x_ij, kernel, state)

    return python_loop(lambda x_ij, *_: one(x_ij), x, kernel, state)


def stacked_for_a_scan(product, x, kernel, state):
    """Copies of the state as the xs of a scan: their cotangents meet in the broadcast."""
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * OUTER), (kernel, jax.tree.leaves(state)))
    tree = jax.tree.structure(state)

    def body(carry, xs):
        x_i, (kernel, leaves) = xs
        return carry, jnp.stack([product(x_ij, kernel, jax.tree.unflatten(tree, leaves)) for x_ij in x_i])

    return lax.scan(body, 0, (x, copies))[1]


ARGUMENTS = [remat_with_arguments, jit_with_arguments, state_in_the_carry, cond_with_arguments, stacked_for_a_scan]


def check(program, entry, dtype=np.float32, jit=True):
    """Value and gradients of `sum(y * grad)` against the oracle's one product."""
    x, kernel, grad = cases.operands(OUTER, INNER, dtype=dtype)
    state = cases.oracle_state()
    expected = cases.one_product(x, kernel, grad, state)

    def loss(x, kernel, state):
        if entry == "max_grad":
            state = jaxfp8.max_grad(state)
        y = program(cases.product, x, kernel, state)
        return jnp.sum(y.astype(jnp.float32) * grad.astype(np.float32)), y

    differentiate = jaxfp8.value_and_grad if entry == "value_and_grad" else jax.value_and_grad
    step = differentiate(loss, argnums=(0, 1, 2), has_aux=True)
    (_, y), (dx, dkernel, next_state) = (jax.jit(step) if jit else step)(x, kernel, cases.pack(state))

    cases.assert_state(next_state, expected.state)
    expected.y.check(y.reshape(-1, cases.N), "y")
    expected.dgrad.check(dx.reshape(-1, cases.K), "dgrad")
    expected.wgrad.check(dkernel, "wgrad")


@pytest.mark.parametrize("program", CLOSED)
def test_closing_over_the_state_needs_no_help(program):
    check(program, "grad")


@pytest.mark.parametrize("program", ARGUMENTS)
def test_state_as_an_argument_with_one_cast(program):
    check(program, "max_grad")


@pytest.mark.parametrize("program", [remat_with_arguments, scan_in_remat, nested_vmap])
def test_value_and_grad(program):
    check(program, "value_and_grad")


@pytest.mark.parametrize("program", [nested_vmap, cond_in_scan, remat_with_arguments])
def test_bfloat16(program):
    check(program, "max_grad", dtype=oracle.BF16)


@pytest.mark.parametrize("program, entry", [(python_loop, "max_grad"), (state_in_the_carry, "value_and_grad")])
def test_without_jit(program, entry):
    check(program, entry, jit=False)


@pytest.mark.parametrize("program", [remat_with_arguments, jit_with_arguments, state_in_the_carry])
def test_the_argument_programs_need_the_cast(program):
    """Without it autodiff adds: this is what the cast is for, and the comparison sees it."""
    with pytest.raises(AssertionError, match=r"(amax_history|scale): \d of \d differ"):
        check(program, "grad")


def test_remat_changes_no_bit():
    x, kernel, grad = cases.operands(OUTER, INNER)
    state = cases.pack(cases.oracle_state())

    def gradients(program):
        def loss(x, kernel, state):
            return jnp.sum(program(cases.product, x, kernel, state) * grad)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, kernel, state)

    with_remat, without = gradients(remat_in_scan), gradients(nested_scan)
    for got, expected in zip(jax.tree.leaves(with_remat), jax.tree.leaves(without), strict=True):
        oracle.assert_bitwise(got, expected, "remat")


def test_gradients_accumulated_inside_a_scan():
    """The gradient is taken in the body and its state combined by hand: one history entry, the max."""
    x, kernel, grad = cases.operands(OUTER)
    state = cases.oracle_state()
    packed = cases.pack(state)

    @jax.jit
    def step(kernel, packed):
        def body(accumulated, xs):
            x_i, grad_i = xs
            loss = lambda kernel, state: jnp.sum(cases.product(x_i, kernel, state) * grad_i)  # noqa: E731
            dkernel, next_state = jax.grad(loss, argnums=(0, 1))(kernel, packed)
            return (accumulated[0] + dkernel, jax.tree.map(jnp.maximum, accumulated[1], next_state)), None

        zeros = (jnp.zeros_like(kernel), jax.tree.map(jnp.zeros_like, packed))
        return lax.scan(body, zeros, (x, grad))[0]

    dkernel, next_state = step(kernel, packed)
    expected = cases.one_product(x, kernel, grad, state)
    cases.assert_state(next_state, expected.state)
    expected.wgrad.check(dkernel, "wgrad")
