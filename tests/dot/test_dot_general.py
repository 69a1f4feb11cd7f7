"""jaxfp8.dot_general as a function: its options, when it warns, what JAX can do with it
and what it must refuse.
"""

import functools
import warnings

import another_process
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowering import cuda_text
from parametrize import each_row
from programs import cases
from programs.known_amax import used_state

import jaxfp8

X, KERNEL, GRAD = cases.operands()
STATE = used_state()
PACKED = cases.pack(STATE)


def product(x, kernel, state, **options):
    return jaxfp8.dot_general(
        x, kernel, cases.MATMUL, recipe=cases.RECIPE, state=state, **options
    )


def loss(x, kernel, state):
    return jnp.sum(product(x, kernel, state) * GRAD)


# ------------------------------------------------------------------------------ options

HIGHEST, DEFAULT = lax.Precision.HIGHEST, lax.Precision.DEFAULT
LEFT_TO_THE_RECIPE = [None, DEFAULT, "default", "fastest", (DEFAULT, DEFAULT)]
PRECISE = [HIGHEST, "high", "highest", "float32", (HIGHEST, HIGHEST)]


@pytest.mark.parametrize(
    "precision, precise",
    [*((p, 2) for p in LEFT_TO_THE_RECIPE), *((p, 3) for p in PRECISE)],
    ids=str,
)
def test_precision_reaches_the_handlers(precision, precise, cuda_custom_calls):
    """The recipe accumulates dgrad and wgrad precisely; fprop is fast unless the caller
    asks.
    """

    def step(x, kernel, state):
        y, vjp = jax.vjp(
            lambda *operands: product(*operands, precision=precision), x, kernel, state
        )
        return y, vjp(GRAD)

    text = cuda_text(step, X, KERNEL, PACKED)
    lines = [line for line in text.splitlines() if "@jaxfp8_scaled_matmul" in line]
    assert (
        len(lines) == 3 and sum("precise = true" in line for line in lines) == precise
    )


@pytest.mark.parametrize("recipe", [None, jaxfp8.DelayedScaling(min_size=1000)])
def test_high_precision_is_the_product_of_jax(recipe):
    """It takes any precision of JAX, and adds nothing to the program of a mesh."""
    options = {"precision": (HIGHEST, DEFAULT), "preferred_element_type": jnp.float32}
    state = jaxfp8.DotGeneralState(None, None, None)

    def program(dot_general):
        def mapped(x, kernel):
            return dot_general(x, kernel, cases.MATMUL, **options)

        mesh, whole = jax.make_mesh((1,), ("data",)), jax.P()
        mapped = jax.shard_map(
            mapped, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
        return str(jax.make_jaxpr(mapped)(X, KERNEL))

    ours = functools.partial(jaxfp8.dot_general, recipe=recipe, state=state)
    assert program(ours) == program(lax.dot_general)


# ----------------------------------------------------------------------------- warnings


def warned(function, *arguments) -> int:
    """How often Python's default filter would show the warning."""
    with warnings.catch_warnings(record=True, action="default") as caught:
        for _ in range(3):
            jax.block_until_ready(function(*arguments))
    assert {w.category for w in caught} <= {jaxfp8.FP8StateWarning}
    return len(caught)


ADAPTER = np.ones((cases.ROWS, 2), np.float32), np.ones((2, X.shape[1]), np.float32)
NEVER_UPDATED = {
    "gradient of parameters alone": lambda: jax.grad(
        lambda kernel: loss(X, kernel, PACKED)
    )(KERNEL),
    "under jit": lambda: jax.jit(jax.grad(loss, argnums=1))(X, KERNEL, PACKED),
    "of what computes the input": lambda: jax.grad(
        lambda low: loss(low[0] @ low[1] + X, KERNEL, PACKED)
    )(ADAPTER),
    "two layers": lambda: jax.grad(
        lambda k: loss(X, k, PACKED) + loss(2 * X, k, PACKED)
    )(KERNEL),
}
NO_GRADIENT = {
    "inference": lambda: product(X, KERNEL, PACKED),
    "vmapped": lambda: jax.vmap(lambda x: product(x, KERNEL, PACKED))(np.stack([X, X])),
    "gradient of the state too": lambda: jax.grad(loss, argnums=(1, 2))(
        X, KERNEL, PACKED
    ),
    "of the input": lambda: jax.grad(loss)(X, KERNEL, PACKED),
    "of each input, in a loop": lambda: lax.map(
        lambda x: jax.grad(loss)(x, KERNEL, PACKED), np.stack([X, X])
    ),
    "gradient of something else": lambda: jax.grad(
        lambda z: z * loss(X, KERNEL, PACKED)
    )(1.0),
}


@each_row("run", NEVER_UPDATED)
def test_gradients_that_never_update_state_warn_once(run):
    assert warned(run) == 1


@each_row("run", NO_GRADIENT)
def test_no_warning(run):
    assert warned(run) == 0


def test_once_in_a_process():
    """With the filters that Python starts with, whatever the number of layers, steps
    and compilations.
    """
    program = """
import jax, jax.numpy as jnp, jaxfp8
recipe = jaxfp8.DelayedScaling(amax_history_len=2)
state = jaxfp8.init_state(recipe)
def loss(kernel):
    for _ in range(2):
        kernel = jaxfp8.dot_general(kernel, kernel, (((1,), (0,)), ((), ())),
            recipe=recipe, state=state)
    return kernel.sum()
for size in (2, 3, 3):
    jax.grad(loss)(jnp.ones((size, size)))
    jax.jit(jax.grad(loss))(jnp.ones((size, size)))
"""
    done = another_process.python("-c", program)
    assert done.stderr.count("FP8StateWarning: ") == 1, done.stderr


# ---------------------------------------------------------------------- what JAX can do


def test_a_vjp_called_twice():
    """Each call is the backward of one forward: the same codes of x and kernel, each
    grad its own amax.
    """
    _, vjp = jax.vjp(product, X, KERNEL, PACKED)
    for size in (1, 4, 1):
        grad = GRAD * np.float32(size)
        dx, dkernel, state = vjp(grad)
        expected = cases.one_product(X, KERNEL, grad, STATE)
        cases.assert_state(state, expected.state, f"size {size}")
        expected.check(dgrad=dx, wgrad=dkernel)


# ------------------------------------------------------------------ what it must refuse

REFUSED = {
    "jvp": lambda: jax.jvp(lambda x: product(x, KERNEL, PACKED), (X,), (X,)),
    "hessian of the state": lambda: jax.hessian(lambda state: loss(X, KERNEL, state))(
        PACKED
    ),
    "jvp of a vmap of a remat": lambda: jax.jvp(
        jax.vmap(jax.checkpoint(lambda x: cases.product(x, KERNEL, PACKED))), (X,), (X,)
    ),
}


@pytest.mark.filterwarnings("ignore::jaxfp8.FP8StateWarning")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, jit):
    """A wrong number is the one forbidden answer."""
    says = "first derivatives in reverse mode|can't apply forward-mode autodiff"
    with pytest.raises((TypeError, NotImplementedError), match=says):
        (jax.jit(REFUSED[name]) if jit else REFUSED[name])()
