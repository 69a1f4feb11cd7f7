"""Shapes and types: nothing to see, odd sizes, strange memory, operands that are no
floats.
"""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cpu_mesh import mesh_of
from draws import KEY
from jax.sharding import PartitionSpec as P
from programs.cases import MATMUL

import jaxfp8

from .libraries import OPERANDS, OWG
from .steps import normal, operands, same_bits, step_of, tally_state, used_state
from .verdict import Tally, refused, row

DTYPES = (np.dtype(np.float32), oracle.BF16)


def empty(library, *sizes):
    """Zeros of the right shape and dtype; the stored history is what it was."""
    n = 5
    tally = Tally()
    for (m, k), dtype in itertools.product(
        sizes, DTYPES[: 2 if library.is_ours else 1]
    ):
        variables = library.variables(normal(0, (k, n)), used_state())
        # the default divides by K
        step = step_of(library, n, dtype=dtype, kernel_init=nn.initializers.zeros)
        got = step(variables, np.ones((m, k), np.float32), np.ones((m, n), np.float32))
        for product, shape, kind in (
            (got.y, (m, n), dtype),
            (got.dx, (m, k), None),
            (got.dkernel, (k, n), None),
        ):
            is_right = (
                product.shape == shape
                and product.dtype == (kind or np.float32)
                and not np.any(product)
            )
            tally(is_right, f"{product.dtype}{product.shape} is not zeros of {shape}")
        after = library.update(variables, got.variables)
        for name in OPERANDS:
            before, now = (library.history(v, name) for v in (variables, after))
            tally(np.array_equal(before, now), f"{name} history {before} became {now}")
        tally(
            not library.is_ours or same_bits(after[OWG], variables[OWG]),
            "a scale moved",
        )
    return tally.verdict()


@row("0-size batch: zeros of the right shape, history untouched", any_layer=True)
def empty_batch(library):
    return empty(library, (0, 8))


@row("K = 0", any_layer=True)
def empty_contraction(library):
    return empty(library, (6, 0), (0, 0))


@row("empty expert", any_layer=True)
def empty_expert(library):
    """Of three experts the second got no tokens: its state stays, and those of the
    others move.
    """
    layer = library.dense(5)
    experts = [operands(rows, 8, 5, seed=rows, make=normal) for rows in (6, 0, 3)]
    variables = [library.variables(kernel, used_state()) for _, kernel, _ in experts]

    def loss(variables):
        uses = zip(variables, experts, strict=True)
        return sum(jnp.vdot(layer.apply(v, x), grad) for v, (x, _, grad) in uses)

    gradient = jax.jit(jax.grad(loss))(variables)
    tally = Tally()
    after = list(map(library.update, variables, gradient))
    tally(
        same_bits(after[1][OWG], variables[1][OWG]),
        f"history {library.history(after[1], 'input')}",
    )
    for i in (0, 2):
        tally(library.history(after[i], "input")[0] > 0, f"expert {i} has no amax")
        tally_state(
            tally, library, after[i], used_state(), experts[i], what=f"expert {i}"
        )
    return tally.verdict()


@row("empty shard", any_layer=True)
def empty_shard(library):
    """Eight devices with no rows each, in shard_map."""
    layer = library.dense(5)
    variables = library.variables(normal(0, (8, 5)), used_state())
    tally = Tally()
    mesh = mesh_of(data=8)
    gradient = jax.grad(
        lambda variables, x: jnp.sum(layer.apply(variables, x) ** 2), argnums=(0, 1)
    )
    for check_vma in (True, False)[: 2 if library.is_ours else 1]:
        specs = {
            "in_specs": (P(), P("data")),
            "out_specs": (P(), P("data")),
            "check_vma": check_vma,
        }
        mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))
        after, dx = mapped(variables, np.ones((0, 8), np.float32))
        tally(
            dx.shape == (0, 8) and not np.any(after["params"]["kernel"]),
            "gradients of nothing",
        )
        after = library.update(variables, after)
        tally(
            same_bits(after[OWG], variables[OWG]),
            f"history {library.history(after, 'input')}",
        )
    return tally.verdict()


@row("more than 2^31 elements")
def large(library):
    """The last values of an operand that 32-bit indices do not reach, in 10 GiB.

    Ours, where the first step measures the tensor, 448 / 3.5 = 128: an amax that misses
    the end shows in every code.
    """
    rows = 2**25 + 65
    cols = 64
    tally = Tally()
    x = jnp.ones((rows, cols), jnp.bfloat16).at[-1, -1].set(-3.5).at[-2, 0].set(2)
    if library.is_ours:
        quantizer = jaxfp8.DelayedScaling(
            amax_history_len=2, first_step="current"
        ).quantizers()[0]
        q, state = jax.jit(
            lambda x, state: quantizer.quantize(x[None], state), donate_argnums=0
        )(x, quantizer.init())
        tally(
            state.amax_history.tolist() == [3.5, 0]
            and state.scale.tolist() == [2.0**-7],
            "the state",
        )
        expected = np.full((1000, cols), 128, np.float32)
        expected[-1, -1], expected[-2, 0] = -448, 256
        tally(
            np.array_equal(np.asarray(q.data[0, -1000:]).astype(np.float32), expected),
            "codes",
        )
        tally(
            np.array_equal(
                np.asarray(q.data_t[0, :, -1000:]).astype(np.float32), expected.T
            ),
            "transposed codes",
        )
        return tally.verdict("the last elements are seen")
    layer = library.dense(1, dtype=jnp.bfloat16)
    variables = library.variables(np.ones((cols, 1), np.float32))
    grad = jax.jit(
        jax.grad(lambda v, x: jnp.sum(layer.apply(v, x).astype(jnp.float32)))
    )(variables, x)
    amax = library.history(grad, "input")[0]
    tally(amax == 3.5, f"amax {amax}, not 3.5")
    return tally.verdict("the last element is seen")


def products(library):
    """`(x, kernel) -> product` in every way that the library has."""
    module = library.dot_general_cls()()
    yield lambda x, kernel: module.init_with_output(KEY, x, kernel, MATMUL)[0]
    if library.is_ours:
        einsum = library.einsum()
        recipe = jaxfp8.DelayedScaling(amax_history_len=2)
        state = {"recipe": recipe, "state": jaxfp8.init_state(recipe)}
        yield lambda x, kernel: einsum.init_with_output(KEY, "mk,kn->mn", x, kernel)[0]
        yield lambda x, kernel: jaxfp8.dot_general(x, kernel, MATMUL, **state)
        yield lambda x, kernel: jaxfp8.einsum("mk,kn->mn", x, kernel, **state)


@row("int, bool, complex, fp8 operands: TypeError")
def not_floats(library):
    """Refused with a name for the operand or its dtype, or else the product of the
    values; scale 1 loses none.

    Ours names both: a quiet cast of int or FP8 codes would be a wrong number.
    """
    tally = Tally()
    for dtype in ("int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"):
        x = np.full((2, 3), 3, np.float32)
        kernel = np.full((3, 4), 2, np.float32)
        odd = 1 + 2j if dtype == "complex64" else 1
        for name, pair in (
            ("x", ((x * odd).astype(dtype), kernel)),
            ("kernel", (x, (kernel * odd).astype(dtype))),
        ):
            given = [jnp.asarray(value) for value in pair]
            exact = pair[0].astype(np.complex128) @ pair[1].astype(np.complex128)
            for product in products(library):
                refused(
                    lambda given=given, product=product: product(*given),
                    tally,
                    f"{name} of {dtype}",
                    rf"\b{name}\b.*{dtype}"
                    if library.is_ours
                    else rf"\b{name}\b|{dtype}",
                    accepted=lambda y, exact=exact: np.array_equal(
                        np.asarray(y).astype(np.complex128), exact
                    ),
                )
    return tally.verdict()
