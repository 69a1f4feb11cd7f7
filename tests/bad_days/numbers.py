"""Numbers, arguments and programs that came from outside: what was silently wrong,
hung, or had no message.
"""

import another_process
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax import export
from programs.cases import MATMUL

import jaxfp8

from .steps import (
    in_two_octaves,
    next_state,
    normal,
    operands,
    same_bits,
    step_of,
    tally_products,
)
from .verdict import Tally, refused, row

M, K, N = 16, 24, 8
RECIPES = (
    jaxfp8.Float8CurrentScaling(),
    jaxfp8.Float8RowwiseScaling(),
    jaxfp8.Float8BlockScaling(),
    jaxfp8.MXFP8BlockScaling(),
)


def with_amaxes(library, x, kernel, grad):
    """Variables whose scales are right for these operands."""
    return library.variables(
        kernel, next_state(oracle.LayerState.init(4), (x, kernel, grad))
    )


@row("gradients of 1e-30: the product of the scales is subnormal", any_layer=True)
def tiny_gradients(library):
    """dx of a kernel of 1e-5 and a gradient of 1e-30 is 1e-35, the product of their
    scales 4e-43.
    """
    tally = Tally()
    given = operands(M, K, N, grads=1e-30, kernel=1e-5)
    step = step_of(library, N)(with_amaxes(library, *given), given[0], given[2])
    worst = tally_products(tally, step, given, "gradients of 1e-30")
    return tally.verdict(f"off by {worst:.2g} times what FP8 may cost")


@row("operands of 1e24: the product of the scales overflows", any_layer=True)
def huge_operands(library):
    tally = Tally()
    (x, kernel, grad) = operands(M, K, N, data=1e24, kernel=1e24)
    x[3] = kernel[:, 2] = 0
    y = np.asarray(
        step_of(library, N)(with_amaxes(library, x, kernel, grad), x, grad).y
    )
    tally((y[3] == 0).all() and (y[:, 2] == 0).all(), "zeros became " + str(y[3, :2]))
    return tally.verdict()


@row("the gradient through a QTensor's values", peer="Flax has no quantized tensor")
def through_dequantize(library):
    tally = Tally()
    kernel = in_two_octaves(1, (K, N), 4)
    weight = normal(2, (K, N))
    for recipe in (jaxfp8.DelayedScaling(), *RECIPES):
        quantizer = recipe.quantizers()[1]
        q, _ = quantizer.quantize(jnp.asarray(kernel), quantizer.init())
        fields = {"block": q.block, "power_2_scale": q.power_2_scale}

        def values(kernel, scale_inv, source, q=q, fields=fields):
            q = jaxfp8.QTensor(
                q.data, scale_inv, source=kernel if source else None, **fields
            )
            return jnp.vdot(q.dequantize(jnp.float32), weight)

        got = jax.jit(jax.grad(values), static_argnums=2)(
            jnp.asarray(kernel), q.scale_inv, True
        )
        tally(
            same_bits(np.asarray(got), weight),
            f"{type(recipe).__name__}: the gradient is {np.asarray(got)[0, :2]}",
        )
        if q.scale_inv.dtype == np.float32:
            call = lambda q=q, values=values: jax.grad(values, 1)(  # noqa: E731
                kernel, q.scale_inv, False
            )
            refused(
                call,
                tally,
                f"{type(recipe).__name__} without a source",
                "derivatives|gradient",
            )
    return tally.verdict()


@row("export with a batch of any size, read again")
def symbolic_batch(library):
    """Values, in every recipe of ours, and gradients."""
    tally = Tally()
    (x, kernel, grad) = operands(40, K, N)
    variables = with_amaxes(library, x, kernel, grad)
    (b,) = export.symbolic_shape("b")

    def exported(fn):
        types = [jax.ShapeDtypeStruct((b, size), np.float32) for size in (K, N)]
        return export.deserialize(another_process.export(fn, *types).serialize()).call

    layer = library.dense(N)
    products = {
        "the layer": lambda x, kernel: layer.apply(
            {**variables, "params": {"kernel": kernel}}, x
        )
    }
    if library.is_ours:
        products |= {
            type(recipe).__name__: lambda x, kernel, recipe=recipe: jaxfp8.dot_general(
                x, kernel, MATMUL, recipe=recipe
            )
            for recipe in RECIPES
        }
    for name, product in products.items():

        def both(x, grad, product=product):
            y, vjp = jax.vjp(product, x, jnp.asarray(kernel))
            return y, *vjp(grad)

        with tally.raising(name):
            run = exported(both)
            for size in (1, 40):
                got = run(x[:size], grad[:size])
                expected = jax.jit(both)(x[:size], grad[:size])
                # A contraction of any size adds in another order: two roundings a term,
                # and the sum.
                for a, e in zip(got, expected, strict=True):
                    limit = (size + 4) * 2.0**-23 * 40 * np.abs(e).max()
                    tally(
                        np.abs(np.asarray(a) - np.asarray(e)).max() <= limit,
                        f"{name}, a batch of {size}",
                    )
    return tally.verdict()


@row("vmap of a cond: the taken branch's amax, or an error", any_layer=True)
def vmap_of_cond(library):
    """Of two examples the one of 8 times the size does not take the branch."""
    tally = Tally()
    (x, kernel, grad) = operands(M, K, N)
    layer = library.dense(N)
    variables = with_amaxes(library, x, kernel, grad)
    examples = jnp.stack([x, 8 * x])

    taken = jnp.array([True, False])

    def one(variables, x, taken):
        return jax.lax.cond(
            taken,
            lambda: jnp.vdot(layer.apply(variables, x), grad),
            lambda: jnp.float32(0),
        )

    def by_vmap(variables):
        return jnp.sum(jax.vmap(one, (None, 0, 0))(variables, examples, taken))

    def by_map(variables):
        return jnp.sum(jax.lax.map(lambda at: one(variables, *at), (examples, taken)))

    def amax(loss):
        return library.history(library.grad(loss)(variables), "input")[0]

    largest = np.abs(x).max()
    refused(
        lambda: amax(by_vmap), tally, "vmap", "jax.lax.map", lambda got: got == largest
    )
    with tally.raising("lax.map"):  # the remedy
        ratio = amax(by_map) / largest
        tally(ratio == 1, f"with lax.map the amax is {ratio} times the true one")
    return tally.verdict()
