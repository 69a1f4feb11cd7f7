"""einsum: equations as numpy reads them, states bitwise, products and gradients in
their bound, one product each.

A case whose operand is summed or takes a diagonal first says so itself (`x_first`,
`kernel_first`), in letters alone, so that the oracle reads no equation the way the
package does.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import BF16, E4M3, E5M2, F16, F32
from oracle.products import rounded_bound
from programs.cases import assert_state, pack

import jaxfp8
from jaxfp8.dot import einsum

RECIPE = jaxfp8.DelayedScaling(amax_history_len=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """An equation, and the same in numpy: `product` of the operands after `x_first` and
    `kernel_first`.
    """

    eqn: str
    x: tuple
    kernel: tuple
    product: str = ""
    x_first: str = ""
    kernel_first: str = ""


CASES = [
    # implicit output: in alphabetical order
    Case("zk,ka", (5, 7), (7, 3), "zk,ka->az"),
    Case(" mk , kn -> mn ", (5, 7), (7, 3), "mk,kn->mn"),
    Case("k,k->", (7,), (7,)),
    Case(",n->n", (), (3,)),
    Case("i,i->i", (5,), (5,)),
    Case("abmk,bakn->bamn", (2, 3, 4, 5), (3, 2, 5, 4)),
    # jnp.einsum swaps this one's operands
    Case("emh,gecm->gech", (3, 5, 6), (2, 3, 4, 5)),
    Case("...K,nK", (2, 3, 7), (4, 7), "abk,nk->abn"),
    Case("...k,kn->n...", (2, 3, 7), (7, 4), "abk,kn->nab"),
    Case("...mk,...kn->...mn", (6, 2, 3, 7), (2, 7, 4), "abmk,bkn->abmn"),
    Case("...k,...k->...", (2, 3, 7), (7,), "abk,k->ab"),
    Case("mk,kn->mn...", (5, 7), (7, 3), "mk,kn->mn"),
    # Size 1 broadcasts.
    Case("bmk,bkn->bmn", (1, 5, 7), (4, 7, 3), "mk,bkn->bmn", x_first="bmk->mk"),
    Case(
        "...mk,...kn->...mn",
        (6, 5, 7),
        (1, 7, 3),
        "bmk,kn->bmn",
        kernel_first="bkn->kn",
    ),
    Case("mk,kn->mn", (5, 1), (7, 3), "m,n->mn", x_first="mk->m", kernel_first="kn->n"),
    Case("bmk,bkn->bmn", (1, 5, 7), (1, 7, 3)),
    Case("mm,mn->mn", (1, 7), (7, 3), "m,mn->mn", x_first="am->m"),
    # Labels of one operand alone, summed before it is quantized.
    Case("amk,kn->mn", (3, 5, 7), (7, 3), "mk,kn->mn", x_first="amk->mk"),
    Case("mk,akn->mn", (5, 7), (2, 7, 3), "mk,kn->mn", kernel_first="akn->kn"),
    Case("k...,kn->n", (7, 2, 2), (7, 3), "k,kn->n", x_first="kab->k"),
    # Repeated labels.
    Case("kk,kn->n", (7, 7), (7, 3), "k,kn->n", x_first="kk->k"),
    Case(
        "kmk,nkn->mn",
        (4, 5, 4),
        (3, 4, 3),
        "mk,kn->mn",
        x_first="kmk->mk",
        kernel_first="nkn->kn",
    ),
]


def product(eqn, a, b, a_inv, b_inv) -> oracle.Product:
    """np.einsum of codes in f64 and its bound: as oracle.scaled_matmul derives it, of
    as many terms as the equation sums.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    s = float(a_inv) * float(b_inv)
    exact = np.einsum(eqn, a, b) * s
    total = np.einsum(eqn, np.abs(a), np.abs(b)) * s
    terms = np.einsum(eqn, np.ones(a.shape), np.ones(b.shape))
    growth = terms * oracle.PRECISE
    bound = total * (growth / (1 - growth) + 2 * oracle.PRECISE)
    return oracle.Product(np.asarray(exact), rounded_bound(exact, bound, F32))


def apply_first(eqn, value):
    """What happens to an operand before it is quantized."""
    return np.einsum(eqn, value) if eqn else value


def transpose_first(eqn, shape, wanted: oracle.Product) -> oracle.Product:
    """The gradient through `apply_first`: each element of the operand has a part in one
    element of its result.
    """
    if not eqn:
        return wanted
    size = int(np.prod(shape))
    jacobian = np.stack(
        [np.einsum(eqn, unit.reshape(shape)).ravel() for unit in np.eye(size)]
    )
    assert (jacobian.sum(axis=1) <= 1).all()
    return oracle.Product(
        *(
            (jacobian @ part.ravel()).reshape(shape)
            for part in (wanted.exact, wanted.bound)
        )
    )


def fractions(rng, shape, step):
    """f32 multiples of `step` of at most 7 bits: every sum of them here is exact, in
    any order.
    """
    return (rng.integers(-127, 128, shape) * step).astype(F32)


def operands(case, seed=0):
    rng = np.random.default_rng(seed)
    # Amaxes far apart: an x taken for the kernel is seen in the state.
    return fractions(rng, case.x, 2.0**-5), fractions(rng, case.kernel, 2.0**-9)


def first_state():
    return oracle.LayerState(
        *(oracle.State(F32([a, 0]), F32(1)) for a in (5.0, 0.3, 1e-3))
    )


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: f"{case.eqn} {case.x} {case.kernel}".replace(" ", "_"),
)
def test_equations(case):
    x, kernel = operands(case)
    state = first_state()

    @jax.jit
    def step(x, kernel, grad, state):
        y, vjp = jax.vjp(
            lambda *args: einsum(case.eqn, *args[:2], recipe=RECIPE, state=args[2]),
            x,
            kernel,
            state,
        )
        return y, *vjp(grad)

    wanted = jax.eval_shape(
        lambda x, kernel: jnp.einsum(case.eqn, x, kernel), x, kernel
    )
    grad = fractions(np.random.default_rng(1), wanted.shape, 2.0**-14)
    y, dx, dkernel, next_state = step(x, kernel, grad, pack(state))
    assert (y.shape, y.dtype) == (wanted.shape, wanted.dtype)

    x_codes, _, x_next = oracle.step(apply_first(case.x_first, x), state.input, E4M3)
    k_codes, _, k_next = oracle.step(
        apply_first(case.kernel_first, kernel), state.kernel, E4M3
    )
    g_codes, _, g_next = oracle.step(grad, state.output_grad, E5M2)
    assert_state(next_state, oracle.LayerState(x_next, k_next, g_next))
    terms = case.product or case.eqn
    x_term, k_term, y_term = terms.replace("->", ",").split(",")
    product(terms, x_codes, k_codes, x_next.scale, k_next.scale).check(y, "y")
    dgrad = product(
        f"{y_term},{k_term}->{x_term}", g_codes, k_codes, g_next.scale, k_next.scale
    )
    transpose_first(case.x_first, case.x, dgrad).check(dx, "dgrad")
    wgrad = product(
        f"{x_term},{y_term}->{k_term}", x_codes, g_codes, x_next.scale, g_next.scale
    )
    transpose_first(case.kernel_first, case.kernel, wgrad).check(dkernel, "wgrad")


def test_sums_are_not_rounded_to_the_operand():
    """256 + 1 is no bf16 number: a sum in bf16 would record 256, and in f16 60000 +
    60000 would be infinite.
    """
    for dtype, terms, total in (
        (BF16, (256, 1), 257),
        (F16, (60000, 60000), 120000),
    ):
        x = np.full((3, 2), terms, dtype)

        def loss(state, x=x):
            return jnp.sum(
                einsum(
                    "ma,mn->n",
                    x,
                    np.ones((3, 2), F32),
                    recipe=RECIPE,
                    state=state,
                )
            )

        state = jax.jit(jax.grad(loss))(jaxfp8.init_state(RECIPE))
        assert state.input.amax_history[0] == F32(
            np.asarray(terms, dtype).astype(F32).sum()
        )
        assert state.input.amax_history[0] > 0.99 * total


def test_nothing_to_see():
    """A zero-size operand: zeros of the right shape, and no quantizer is touched."""
    for eqn, x, kernel, shape in (
        ("mk,kn->mn", (0, 7), (7, 3), (0, 3)),
        ("mk,kn->mn", (5, 0), (0, 3), (5, 3)),
        ("bmk,bkn->bmn", (0, 5, 7), (1, 7, 3), (0, 5, 3)),
    ):

        def run(x, kernel, state, eqn=eqn):
            return einsum(eqn, x, kernel, recipe=RECIPE, state=state)

        state = jaxfp8.init_state(RECIPE)
        y, vjp = jax.vjp(run, jnp.ones(x), jnp.ones(kernel), state)
        assert y.shape == shape
        assert not any(np.any(leaf) for leaf in jax.tree.leaves((y, vjp(y))))
