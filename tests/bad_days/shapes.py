"""Shapes and types: nothing to see, odd sizes, strange memory, operands that are no floats."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, PartitionSpec as P

from .libraries import OPERANDS, OWG
from .steps import in_two_octaves, normal, same_bits, step_of, tally_products, used_state
from .verdict import NotRun, Tally, refused, row


def empty(library, m, k):
    n = 5
    variables = library.variables(normal(0, (k, n)), used_state())
    got = step_of(library, n, kernel_init=nn.initializers.zeros)(
        variables, np.ones((m, k), np.float32), np.ones((m, n), np.float32)
    )
    tally = Tally()
    for product, shape in ((got.y, (m, n)), (got.dx, (m, k)), (got.dkernel, (k, n))):
        tally(product.shape == shape and not np.any(product), f"{product.shape} is not zeros of {shape}")
    after = library.update(variables, got.variables)
    for name in OPERANDS:
        before, now = (library.history(v, name) for v in (variables, after))
        tally(np.array_equal(before, now), f"{name} history {before} became {now}")
    return tally.verdict()


@row("0-size batch: zeros of the right shape, history untouched")
def empty_batch(library):
    return empty(library, 0, 8)


@row("K = 0")
def empty_contraction(library):
    return empty(library, 6, 0)


@row("empty expert")
def empty_expert(library):
    """Of three experts the second got no tokens: its state stays, and those of the others move."""
    layer, loads, x = library.dense(5), (6, 0, 3), normal(0, (9, 8))
    variables = {i: library.variables(normal(i, (8, 5)), used_state()) for i in range(3)}

    def loss(variables):
        tokens = jnp.split(x, np.cumsum(loads)[:-1])
        return sum(jnp.sum(layer.apply(variables[i], rows) ** 2) for i, rows in enumerate(tokens))

    gradient, tally = jax.jit(jax.grad(loss))(variables), Tally()
    after = {i: library.update(variables[i], gradient[i]) for i in range(3)}
    tally(same_bits(after[1][OWG], variables[1][OWG]), f"history {library.history(after[1], 'input')}")
    for i in (0, 2):
        tally(library.history(after[i], "input")[0] > 0, f"expert {i} has no amax")
    return tally.verdict()


@row("empty shard")
def empty_shard(library):
    """Eight devices with no rows each, in shard_map."""
    layer, variables = library.dense(5), library.variables(normal(0, (8, 5)), used_state())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    gradient = jax.grad(lambda variables, x: jnp.sum(layer.apply(variables, x) ** 2))
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    after = library.update(variables, jax.jit(mapped)(variables, np.ones((0, 8), np.float32)))
    tally = Tally()
    tally(same_bits(after[OWG], variables[OWG]), f"history {library.history(after, 'input')}")
    return tally.verdict()


@row("7x5x3, 217x41")
def odd_sizes(library):
    tally, worst = Tally(), 0.0
    for shape, features in (((217, 41), 13), ((7, 5, 3), 41)):
        x, kernel = in_two_octaves(0, shape, 4), in_two_octaves(1, (shape[-1], features), 4)
        grad = in_two_octaves(2, (*shape[:-1], features), 4)
        got = step_of(library, features)(library.variables(kernel, used_state()), x, grad)
        flat = got._replace(y=np.asarray(got.y).reshape(-1, features), dx=np.asarray(got.dx).reshape(-1, shape[-1]))
        operands = x.reshape(-1, shape[-1]), kernel, grad.reshape(-1, features)
        worst = max(worst, tally_products(tally, flat, operands, str(shape)))
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
    """The amax of a bf16 tensor is in its last element (with `--big`: 10 GiB)."""
    if not library.big:
        raise NotRun("needs --big and 12 GiB")
    rows, cols = 2**25 + 65, 64
    x = jnp.ones((rows, cols), jnp.bfloat16).at[-1, -1].set(-3.5)
    layer, tally = library.dense(1, dtype=jnp.bfloat16), Tally()
    variables = library.variables(np.ones((cols, 1), np.float32))
    grad = jax.jit(jax.grad(lambda v, x: jnp.sum(layer.apply(v, x).astype(jnp.float32))))(variables, x)
    amax = library.history(grad, "input")[0]
    tally(amax == 3.5, f"amax {amax}, not 3.5")
    return tally.verdict("the last element is seen")


@row("int, bool, complex, fp8 operands: TypeError")
def not_floats(library):
    """Refused with a name for the operand or its dtype, or else the product of the values; scale 1 loses none."""
    tally, numbers = Tally(), (((1,), (0,)), ((), ()))
    module = library.dot_general_cls()()
    for dtype in ("int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"):
        x, kernel = np.full((2, 3), 3, np.float32), np.full((3, 4), 2, np.float32)
        odd = 1 + 2j if dtype == "complex64" else 1
        for name, operands in (("x", ((x * odd).astype(dtype), kernel)), ("kernel", (x, (kernel * odd).astype(dtype)))):
            given = [jnp.asarray(value) for value in operands]
            exact = operands[0].astype(np.complex128) @ operands[1].astype(np.complex128)
            refused(
                lambda given=given: module.init_with_output(jax.random.key(0), *given, numbers)[0],
                tally,
                f"{name} of {dtype}",
                rf"\b{name}\b|{dtype}",
                accepted=lambda y, exact=exact: np.array_equal(np.asarray(y).astype(np.complex128), exact),
            )
    return tally.verdict()


@row("column-major operands")
def column_major(library):
    operands = {"x": normal(0, (40, 36)), "kernel": normal(1, (36, 20)), "grad": normal(2, (40, 20))}
    step, tally = step_of(library, 20), Tally()

    def run(x, kernel, grad):
        return step(library.variables(kernel, used_state()), x, grad)

    expected = jax.jit(run)(*operands.values())
    form = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for which in operands:
        placed = {**operands, which: jax.device_put(operands[which], form)}
        got = jax.jit(run, in_shardings=tuple(form if name == which else None for name in operands))(*placed.values())
        # Products of another layout may add up in another order: one rounding of 2**-24 for each of K < 64 terms.
        near = all(np.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(got[:3], expected[:3], strict=True))
        tally(near and same_bits(got.variables[OWG], expected.variables[OWG]), f"{which} column by column")
    return tally.verdict()


VIEWS = {
    "transposed": lambda x: x.T,
    "columns sliced": lambda x: x[:, 3:30],
    "every third": lambda x: x[::3, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "broadcast": lambda x: jnp.broadcast_to(x[:1], (7, x.shape[1])),
}


@row("sliced operands")
def sliced(library):
    tally, whole = Tally(), in_two_octaves(0, (40, 36), 4)
    for name, view in VIEWS.items():
        x = np.ascontiguousarray(np.asarray(view(whole)))
        kernel, grad = in_two_octaves(1, (x.shape[1], 5), 4), in_two_octaves(2, (len(x), 5), 4)
        step, variables = step_of(library, 5), library.variables(kernel, used_state())
        got = jax.jit(lambda whole, view=view, step=step, v=variables, g=grad: step(v, view(whole), g))(whole)
        tally_products(tally, got, (x, kernel, grad), name)
        tally(library.history(got.variables, "input")[0] == oracle.amax(x), f"{name}: amax")
    return tally.verdict()
