"""One kernel in several layers, and kernels that do not train: whose gradient, whose
state, how many products.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import cases
from programs.known_amax import used_state


def inner(y, grad):
    """The scalar whose gradient with respect to y is `grad`, to the bit."""
    return jnp.sum(y * grad)


def products(function, *arguments) -> int:
    """How many FP8 products run, also without jit, which would drop those whose result
    nobody reads.
    """
    return str(jax.make_jaxpr(function)(*arguments)).count("= jaxfp8_scaled_matmul[")


# ------------------------------------------------------------------------- weight tying


# ----------------------------------------------------------------------- frozen kernels


def frozen(how, kernel):
    """A product `(x, state)` whose kernel does not train."""
    if how == "stop_gradient":
        return lambda x, state: cases.product(x, lax.stop_gradient(kernel), state)
    return lambda x, state: cases.product(x, kernel, state)


FROZEN = pytest.mark.parametrize("how", ["closed over", "stop_gradient"])


@FROZEN
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_frozen_kernel(how, jit):
    """fprop and dgrad, no wgrad, and fprop alone where x is data; the state moves as
    ever.
    """
    x, kernel, grad = cases.operands()
    state = used_state()

    def gradients(x, packed, kernel, argnums=(0, 1)):
        product = frozen(how, kernel)
        product = jax.jit(product) if jit else product
        return jax.value_and_grad(
            lambda *operands: inner(product(*operands), grad), argnums
        )(x, packed)

    packed = cases.pack(state)
    _, (dx, got) = gradients(x, packed, kernel)
    expected = cases.one_product(x, kernel, grad, state)
    cases.assert_state(got, expected.state)
    expected.dgrad.check(dx)
    assert products(gradients, x, packed, kernel) == 2

    def of_state(*operands):
        return gradients(*operands, argnums=1)

    cases.assert_state(of_state(x, packed, kernel)[1], expected.state)
    assert products(of_state, x, packed, kernel) == 1


@FROZEN
def test_a_frozen_kernel_keeps_no_input(how):
    """The codes of x are for wgrad alone. A loop would keep them for each step; it
    keeps the kernel's, once.
    """
    x, kernel, _ = cases.operands()
    packed = cases.pack(used_state())

    def kept(function, *arguments):
        _, vjp = jax.eval_shape(lambda *a: jax.vjp(function, *a), *arguments)
        return sorted(
            leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.dtype.itemsize == 1
        )

    product = frozen(how, kernel)
    codes = (cases.K, cases.N)
    assert kept(product, x, packed) == [codes]
    # The other way round: the codes of the kernel are for dgrad alone.
    assert kept(
        lambda kernel, packed: cases.product(x, kernel, packed), kernel, packed
    ) == [(cases.K, cases.ROWS)]

    def loop(x, packed):
        return lax.scan(
            lambda x, _: (
                product(x, packed) @ np.ones((cases.N, cases.K), np.float32),
                None,
            ),
            x,
            None,
            3,
        )

    assert kept(loop, x, packed) == [codes]
