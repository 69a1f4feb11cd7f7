"""Shapes and types: nothing to see, odd sizes, strange memory, operands that are no floats."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, PartitionSpec as P

import jaxfp8

from .libraries import OPERANDS, OWG
from .steps import in_two_octaves, normal, operands, same_bits, step_of, tally_products, tally_state, used_state
from .verdict import NotRun, Tally, refused, row

DTYPES = (np.dtype(np.float32), oracle.BF16)


def empty(library, *sizes):
    """Zeros of the right shape and dtype; the stored history is what it was."""
    n, tally = 5, Tally()
    for (m, k), dtype in itertools.product(sizes, DTYPES[: 2 if library.is_ours else 1]):
        variables = library.variables(normal(0, (k, n)), used_state())
        step = step_of(library, n, dtype=dtype, kernel_init=nn.initializers.zeros)  # the default divides by K
        got = step(variables, np.ones((m, k), np.float32), np.ones((m, n), np.float32))
        for product, shape, kind in ((got.y, (m, n), dtype), (got.dx, (m, k), None), (got.dkernel, (k, n), None)):
            is_right = product.shape == shape and product.dtype == (kind or np.float32) and not np.any(product)
            tally(is_right, f"{product.dtype}{product.shape} is not zeros of {shape}")
        after = library.update(variables, got.variables)
        for name in OPERANDS:
            before, now = (library.history(v, name) for v in (variables, after))
            tally(np.array_equal(before, now), f"{name} history {before} became {now}")
        tally(not library.is_ours or same_bits(after[OWG], variables[OWG]), "a scale moved")
    return tally.verdict()


@row("0-size batch: zeros of the right shape, history untouched", any_layer=True)
def empty_batch(library):
    return empty(library, (0, 8))


@row("K = 0", any_layer=True)
def empty_contraction(library):
    return empty(library, (6, 0), (0, 0))


@row("empty expert", any_layer=True)
def empty_expert(library):
    """Of three experts the second got no tokens: its state stays, and those of the others move."""
    layer, loads, x, grad = library.dense(5), (6, 0, 3), normal(0, (9, 8)), normal(1, (9, 5))
    kernels = [normal(2 + i, (8, 5)) for i in range(3)]
    variables = {i: library.variables(kernels[i], used_state()) for i in range(3)}
    rows = np.split(x, np.cumsum(loads)[:-1]), np.split(grad, np.cumsum(loads)[:-1])

    def loss(variables):
        return sum(jnp.vdot(layer.apply(variables[i], x), g) for i, (x, g) in enumerate(zip(*rows, strict=True)))

    gradient, tally = jax.jit(jax.grad(loss))(variables), Tally()
    after = {i: library.update(variables[i], gradient[i]) for i in range(3)}
    tally(same_bits(after[1][OWG], variables[1][OWG]), f"history {library.history(after[1], 'input')}")
    for i in (0, 2):
        tally(library.history(after[i], "input")[0] > 0, f"expert {i} has no amax")
        given = rows[0][i], kernels[i], rows[1][i]
        tally_state(tally, library, after[i], used_state(), given, what=f"expert {i}")
    if library.is_ours and library.layer is None:
        stacked = nn.vmap(nn.Dense, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True})
        experts = stacked(5, use_bias=False, dot_general_cls=jaxfp8.Fp8DotGeneral)
        first = experts.init(jax.random.key(0), jnp.ones((3, 4, 8)))
        grads = jax.grad(lambda v: jnp.sum(experts.apply(v, jnp.ones((3, 0, 8))) ** 2))(first)
        tally(same_bits(library.update(first, grads), first), "stacked experts without capacity")
    return tally.verdict()


@row("empty shard", any_layer=True)
def empty_shard(library):
    """Eight devices with no rows each, in shard_map."""
    layer, variables, tally = library.dense(5), library.variables(normal(0, (8, 5)), used_state()), Tally()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gradient = jax.grad(lambda variables, x: jnp.sum(layer.apply(variables, x) ** 2), argnums=(0, 1))
    for check_vma in (True, False)[: 2 if library.is_ours else 1]:
        specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P("data")), "check_vma": check_vma}
        mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))
        after, dx = mapped(variables, np.ones((0, 8), np.float32))
        tally(dx.shape == (0, 8) and not np.any(after["params"]["kernel"]), "gradients of nothing")
        after = library.update(variables, after)
        tally(same_bits(after[OWG], variables[OWG]), f"history {library.history(after, 'input')}")
    return tally.verdict()


@row("7x5x3, 217x41")
def odd_sizes(library):
    """No dimension is a multiple of anything: products within what FP8 may cost, ours within the oracle's bound."""
    tally, worst = Tally(), 0.0
    for shape, features in (((217, 41), 13), ((7, 5, 3), 41)):
        for dtype in DTYPES[: 2 if library.is_ours else 1]:
            x, kernel, grad = given = operands(int(np.prod(shape[:-1])), shape[-1], features, 4, 4, 4)
            x, grad = given[0], given[2] = x.astype(dtype), grad.astype(dtype)
            got = step_of(library, features, dtype=dtype)(
                library.variables(kernel, used_state()), x.reshape(shape), grad.reshape(*shape[:-1], features)
            )
            flat = got._replace(y=np.asarray(got.y).reshape(grad.shape), dx=np.asarray(got.dx).reshape(x.shape))
            worst = max(worst, tally_products(tally, flat, given, str(shape)))
            if library.is_ours:
                kinds = {"out_dtype": dtype, "dgrad_dtype": dtype, "wgrad_dtype": dtype}
                expected = oracle.dense_step(x, kernel.astype(dtype), grad, used_state(), **kinds)
                expected.y.check(flat.y, "y")
                expected.dgrad.check(flat.dx, "dx")
                # nn.Dense widens it to the f32 parameter.
                expected.wgrad.check(np.asarray(got.dkernel).astype(dtype), "dkernel")
            given = x, kernel.astype(dtype), grad
            tally_state(tally, library, got.variables, used_state(), given, what=f"{shape} in {dtype}")
    return tally.verdict(f"{tally.count} products within {worst:.2f} of what FP8 may cost")


EQUATIONS = {  # equation -> shapes of x and kernel
    "a,ab->b": ((8,), (8, 5)),
    "abcde,ef->abcdf": ((2, 1, 3, 1, 8), (8, 5)),
    "bij,bjk->bik": ((3, 4, 8), (3, 8, 5)),
    "aij,ajk->aik": ((1, 1, 8), (1, 8, 1)),
    "abc,cbd->ad": ((4, 2, 8), (8, 2, 5)),
}


@row("rank 1, rank 5, batch dims, size-1 dims")
def ranks(library):
    """Equations through the library's einsum, each within what rounding both operands to FP8 may cost."""
    tally = Tally()
    for eqn, (of_x, of_kernel) in EQUATIONS.items():
        # Scale 1 in the first step: both fit e4m3 as they are.
        x, kernel, layer = in_two_octaves(0, of_x, 4), in_two_octaves(1, of_kernel, 4), library.einsum()
        variables = layer.init(jax.random.key(0), eqn, x, kernel)
        y = np.asarray(layer.apply(variables, eqn, x, kernel), np.float64)
        exact, total = (
            np.einsum(eqn, f(x.astype(np.float64)), f(kernel.astype(np.float64))) for f in (lambda v: v, abs)
        )
        off = (np.abs(y - exact) / total).max() if y.shape == exact.shape else np.inf
        tally(off <= (1 + 2.0**-4) ** 2 - 1 + 2.0**-16, f"{eqn}: off by {off:.2%} of the sum of magnitudes")
    return tally.verdict()


@row("more than 2^31 elements")
def large(library):
    """The last values of an operand that 32-bit indices do not reach (with `--big`: 10 GiB).

    Ours, where the first step measures the tensor, 448 / 3.5 = 128: an amax that misses the end shows in every code.
    """
    if not library.big:
        raise NotRun("needs --big and 12 GiB")
    rows, cols, tally = 2**25 + 65, 64, Tally()
    x = jnp.ones((rows, cols), jnp.bfloat16).at[-1, -1].set(-3.5).at[-2, 0].set(2)
    if library.is_ours:
        quantizer = jaxfp8.DelayedScaling(amax_history_len=2, first_step="current").quantizers()[0]
        q, state = jax.jit(lambda x, state: quantizer.quantize(x[None], state), donate_argnums=0)(x, quantizer.init())
        tally(state.amax_history.tolist() == [3.5, 0] and state.scale.tolist() == [2.0**-7], "the state")
        expected = np.full((1000, cols), 128, np.float32)
        expected[-1, -1], expected[-2, 0] = -448, 256
        tally(np.array_equal(np.asarray(q.data[0, -1000:]).astype(np.float32), expected), "codes")
        tally(np.array_equal(np.asarray(q.data_t[0, :, -1000:]).astype(np.float32), expected.T), "transposed codes")
        return tally.verdict("the last elements are seen")
    layer = library.dense(1, dtype=jnp.bfloat16)
    variables = library.variables(np.ones((cols, 1), np.float32))
    grad = jax.jit(jax.grad(lambda v, x: jnp.sum(layer.apply(v, x).astype(jnp.float32))))(variables, x)
    amax = library.history(grad, "input")[0]
    tally(amax == 3.5, f"amax {amax}, not 3.5")
    return tally.verdict("the last element is seen")


def products(library):
    """`(x, kernel) -> product` in every way that the library has."""
    numbers, module = (((1,), (0,)), ((), ())), library.dot_general_cls()()
    yield lambda x, kernel: module.init_with_output(jax.random.key(0), x, kernel, numbers)[0]
    if library.is_ours:
        einsum, recipe = library.einsum(), jaxfp8.DelayedScaling(amax_history_len=2)
        state = {"recipe": recipe, "state": jaxfp8.init_state(recipe)}
        yield lambda x, kernel: einsum.init_with_output(jax.random.key(0), "mk,kn->mn", x, kernel)[0]
        yield lambda x, kernel: jaxfp8.dot_general(x, kernel, numbers, **state)
        yield lambda x, kernel: jaxfp8.einsum("mk,kn->mn", x, kernel, **state)


@row("int, bool, complex, fp8 operands: TypeError")
def not_floats(library):
    """Refused with a name for the operand or its dtype, or else the product of the values; scale 1 loses none.

    Ours names both: a quiet cast of int or FP8 codes would be a wrong number.
    """
    tally = Tally()
    for dtype in ("int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"):
        x, kernel = np.full((2, 3), 3, np.float32), np.full((3, 4), 2, np.float32)
        odd = 1 + 2j if dtype == "complex64" else 1
        for name, pair in (("x", ((x * odd).astype(dtype), kernel)), ("kernel", (x, (kernel * odd).astype(dtype)))):
            given = [jnp.asarray(value) for value in pair]
            exact = pair[0].astype(np.complex128) @ pair[1].astype(np.complex128)
            for product in products(library):
                refused(
                    lambda given=given, product=product: product(*given),
                    tally,
                    f"{name} of {dtype}",
                    rf"\b{name}\b.*{dtype}" if library.is_ours else rf"\b{name}\b|{dtype}",
                    accepted=lambda y, exact=exact: np.array_equal(np.asarray(y).astype(np.complex128), exact),
                )
    return tally.verdict()


@row("column-major operands")
def column_major(library):
    given = dict(zip(("x", "kernel", "grad"), operands(40, 36, 20, make=normal), strict=True))
    step, tally = step_of(library, 20), Tally()

    def run(x, kernel, grad):
        return step(library.variables(kernel, used_state()), x, grad)

    expected = jax.jit(run)(*given.values())
    form = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for which in given:
        placed = {**given, which: jax.device_put(given[which], form)}
        tally(placed[which].format.layout.major_to_minor == (1, 0), f"{which} lies row by row")
        got = jax.jit(run, in_shardings=tuple(form if name == which else None for name in given))(*placed.values())
        # Products of another layout may add up in another order: one rounding of 2**-24 for each of K < 64 terms.
        near = all(np.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(got[:3], expected[:3], strict=True))
        near = same_bits(got[:3], expected[:3]) if library.is_ours else near
        tally(near and same_bits(got.variables[OWG], expected.variables[OWG]), f"{which} column by column")
    return tally.verdict()


VIEWS = {
    "transposed": lambda x: x.T,
    "rows sliced": lambda x: x[1:33],
    "columns sliced": lambda x: x[:, 3:30],
    "every third": lambda x: x[::3, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "one of a stack": lambda x: x.reshape(5, 8, 36)[3],
    "broadcast": lambda x: jnp.broadcast_to(x[:1], (7, x.shape[1])),
}


@row("sliced operands")
def sliced(library):
    """x as a view of a larger array inside jit, where XLA picks the layout; ours to the bit as a dense copy of it, in
    float32 and bfloat16 by turns."""
    tally = Tally()
    for i, (name, view) in enumerate(VIEWS.items()):
        dtype = DTYPES[i % 2 if library.is_ours else 0]
        whole = in_two_octaves(0, (40, 36), 4).astype(dtype)
        x = np.ascontiguousarray(np.asarray(view(whole)))
        _, kernel, grad = operands(len(x), x.shape[1], 5, 4, 4, 4)
        grad, step = grad.astype(dtype), step_of(library, 5, dtype=dtype)
        variables = library.variables(kernel, used_state())
        got = jax.jit(lambda whole, v=variables, g=grad, view=view, step=step: step(v, view(whole), g))(whole)
        tally_products(tally, got, (x, kernel, grad), name)
        tally(library.history(got.variables, "input")[0] == oracle.amax(x), f"{name}: amax")
        tally(not library.is_ours or same_bits(got, step(variables, x, grad)), f"{name}: other bits")
    return tally.verdict()
