"""Products that are told of the activation behind them: the gradient of their result
goes straight to FP8.

In float32 nothing is rounded in between, so there every bit is that of the plain path.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from aot import count
from cpu_mesh import mesh_of
from equality import assert_same_bits
from jax import lax
from jax.sharding import PartitionSpec as P
from programs import functional
from programs.known_amax import HISTORY, RECIPES
from recipes.cases import KINDS

import jaxfp8

from . import fused_cases as cases
from .fused_cases import BF16, F16, F32, RECIPE

ROWS, WIDTH, HIDDEN, OUT = 6, 16, 8, 5
ACTIVATIONS = ("relu", "silu", "gelu", "silu_gated", "gelu_gated", "relu_squared")
ACTIVATIONS += (cases.CLAMPED,)


# ------------------------------------------------------------------- one narrow product


def exact_operands(name, dtype):
    """Integers and eighths, whose product is exact in every dtype; the gradient of the
    activation is not.
    """
    rng = np.random.default_rng(0)
    features = (*(2,) * jaxfp8.ops.is_gated(name), HIDDEN)
    x = rng.integers(-2, 3, (ROWS, WIDTH)).astype(F32)
    kernel = rng.integers(-4, 5, (WIDTH, *features)).astype(F32) / 8
    bias = rng.integers(-4, 5, features).astype(F32) / 8
    return x, kernel, bias, rng.standard_normal((ROWS, HIDDEN)).astype(dtype)


def exact_state():
    """Scales of x and kernel are powers of two, that of grad is any."""
    amaxes = 448 / 2**3, 448 / 2**4, 7.3
    return oracle.LayerState(
        *(oracle.State(np.full(HISTORY, amax, F32), np.float32(1)) for amax in amaxes)
    )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_narrow_dtypes_have_the_codes_of_float32(name, dtype):
    """The gradient of the activation is not rounded before it becomes codes, an amax
    and the gradient of the bias.
    """
    x, kernel, bias, grad = exact_operands(name, dtype)

    def gradients(dtype):
        def loss(x, kernel, bias, state):
            options = {"recipe": RECIPE, "state": state, "bias": bias}
            h = jaxfp8.dot_general(
                x,
                kernel,
                cases.MATMUL,
                preferred_element_type=dtype,
                activation=name,
                **options,
            )
            return jnp.sum((h.value * grad.astype(dtype)).astype(F32))

        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        return step(x.astype(dtype), kernel, bias, cases.pack(exact_state()))

    dx, *others = gradients(dtype)
    wide_dx, *wide = gradients(F32)
    assert_same_bits(others, wide)
    assert_same_bits(dx, wide_dx.astype(dtype))


# ------------------------------------------------------ two products, to the plain path


def parameters(name, dtype=F32, seed=0, rows=(ROWS,)):
    """x, and wi, its bias and wo."""
    rng, pair = np.random.default_rng(seed), (2,) * jaxfp8.ops.is_gated(name)
    shapes = (WIDTH, *pair, HIDDEN), (*pair, HIDDEN), (HIDDEN, OUT)
    x = rng.standard_normal((*rows, WIDTH)).astype(F32).astype(dtype)
    return x, *(rng.standard_normal(shape).astype(F32) for shape in shapes)


def mlp(x, wi, bias, wo, states, name, *, told, recipe=RECIPE, use=None):
    """Two products; `told` says whether the first knows the activation. `use(h, y)` may
    use more of them.
    """
    options = {"recipe": recipe, "preferred_element_type": x.dtype}
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    first = functools.partial(
        jaxfp8.dot_general, x, wi, numbers, state=states[0], bias=bias, **options
    )
    h = first(activation=name) if told else jaxfp8.activated(first(), name)
    y = jaxfp8.dot_general(h, wo, numbers, state=states[1], **options)
    total = jnp.sum(jnp.sin(y.astype(jnp.float32)))
    return total if use is None else total + use(h)


def states(recipe=RECIPE):
    return tuple(
        jax.tree.map(lambda leaf, i=i: leaf + (1 + i) / 4, jaxfp8.init_state(recipe))
        for i in range(2)
    )


def both(name, operands, given, through=lambda loss: loss, **options):
    """Values and gradients, told and not, of the loss `through` a transformation."""
    wanted = [
        jax.jit(
            jaxfp8.value_and_grad(
                through(functools.partial(mlp, name=name, told=told, **options)),
                tuple(range(5)),
            )
        )
        for told in (True, False)
    ]
    return [run(*operands, given) for run in wanted]


@pytest.mark.parametrize("recipe", ["delayed", "e4m3", *KINDS])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32_is_the_plain_path(name, recipe):
    recipe = RECIPES[recipe].recipe
    assert_same_bits(
        *both(name, parameters(name), states(recipe), recipe=recipe), "told"
    )


@pytest.mark.parametrize("recipe", ["rowwise", "block", "mx"])
def test_other_scales_take_the_rounded_gradient(recipe):
    recipe = RECIPES[recipe].recipe
    assert_same_bits(
        *both(
            "silu_gated", parameters("silu_gated", BF16), states(recipe), recipe=recipe
        ),
        "told",
    )


def test_bfloat16_differs_by_the_rounding():
    told, plain = both("silu_gated", parameters("silu_gated", BF16), states())
    assert_same_bits(told[0], plain[0], "forward")
    tops = [
        np.asarray(got[1][4][0].output_grad.amax_history)[0] for got in (told, plain)
    ]
    assert tops[0] != tops[1] and abs(tops[0] - tops[1]) <= 2.0**-8 * tops[1]


def test_an_activation_with_another_use():
    """The result of the product has a cotangent of its own: one tensor holds the sum,
    in bf16 too.
    """
    use = lambda h: jnp.sum(jnp.cos(h.x.astype(jnp.float32)))  # noqa: E731
    assert_same_bits(
        *both("silu_gated", parameters("silu_gated", BF16), states(), use=use),
        "used twice",
    )


@pytest.mark.parametrize("why", ["small", "high precision", "no rows"])
def test_products_that_are_not_fp8(why):
    recipe = {
        "small": jaxfp8.DelayedScaling(amax_history_len=HISTORY, min_size=1000),
        "high precision": None,
    }
    recipe = recipe.get(why, RECIPE)
    operands = parameters("gelu_gated", BF16, rows=(0 if why == "no rows" else ROWS,))
    assert_same_bits(*both("gelu_gated", operands, states(), recipe=recipe), why)


TRANSFORMATIONS = {
    "remat, save_gemm_outputs": functional.POLICIES["save_gemm_outputs"],
    "vmap over x": lambda loss: (
        lambda x, *rest: jnp.sum(
            jax.vmap(lambda x: loss(x, *rest))(x.reshape(3, 2, -1))
        )
    ),
    # One product whose columns have the batch between the rows and the pair, and a
    # batch of products.
    "vmap over kernels": lambda loss: (
        lambda x, wi, *rest: jnp.sum(
            jax.vmap(lambda wi: loss(x, wi, *rest))(jnp.stack([wi, 2 * wi]))
        )
    ),
}


@pytest.mark.parametrize("way", TRANSFORMATIONS)
@pytest.mark.parametrize("name", ["silu_gated", "gelu"])
def test_transformations(name, way):
    assert_same_bits(*both(name, parameters(name), states(), TRANSFORMATIONS[way]), way)


@pytest.mark.parametrize("kind", ["Auto", "Explicit", "shard_map"])
def test_data_parallel(kind):
    """The rows over three devices: codes and amaxes are those of one."""
    by_hand = kind == "shard_map"
    mesh = mesh_of("Auto" if by_hand else kind, data=3)
    operands, given = parameters("silu_gated"), states()

    def through(loss):
        if not by_hand:
            return loss
        specs = (P("data"), *[P()] * 4)
        return jax.shard_map(
            lambda *a: lax.psum(loss(*a), "data"),
            mesh=mesh,
            in_specs=specs,
            out_specs=P(),
        )

    with jax.set_mesh(mesh):
        x = jax.device_put(operands[0], jax.NamedSharding(mesh, P("data")))
        told, plain = both("silu_gated", (x, *operands[1:]), given, through)
    assert_same_bits(
        jax.tree.map(np.asarray, told), jax.tree.map(np.asarray, plain), "mesh"
    )
    assert_same_bits(
        told[1][4], both("silu_gated", operands, given)[0][1][4], "state of one device"
    )


# ------------------------------------------------------------------ what is in programs


def shapes(rows, width, hidden):
    arrays = (
        ((rows, width), BF16),
        ((width, 2, hidden), F32),
        ((2, hidden), F32),
        ((hidden, width), F32),
    )
    return *(jax.ShapeDtypeStruct(*array) for array in arrays), jax.eval_shape(states)


def test_residuals():
    """Nothing more is kept than by the plain path."""
    kept = [
        count.residual_bytes(
            functools.partial(mlp, name="silu_gated", told=told), *shapes(64, 32, 48)
        )
        for told in (True, False)
    ]
    assert kept[0] == kept[1]
