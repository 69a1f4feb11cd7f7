"""quantize_params: kernels quantized once a step give the bits of kernels quantized in
every product.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from draws import normal
from equality import assert_same_bits
from jax import lax
from mesh import hlo
from parametrize import each_row
from programs import cases
from programs.known_amax import HISTORY, used_state

import jaxfp8

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
MICROBATCHES = 3


def two_layers():
    """Parameters, states with a history behind them, microbatches `[n, rows, K]`."""
    params = {"up": normal(cases.K, 8), "down": normal(8, cases.N, seed=1)}
    states = {name: cases.pack(used_state(i)) for i, name in enumerate(params)}
    x, _, grad = cases.operands(MICROBATCHES)
    return params, states, x, grad


def total_loss(params, states, xs, grads):
    """A scan over microbatches, each product in a rematerialized block."""

    @jax.checkpoint
    def block(x):
        for name in ("up", "down"):
            x = cases.product(x, params[name], states[name])
        return x

    def body(total, batch):
        x, grad = batch
        return total + jnp.sum(block(x) * grad), None

    return lax.scan(body, jnp.float32(0), (xs, grads))[0]


def quantized_loss(params, states, xs, grads):
    return total_loss(
        jaxfp8.quantize_params(params, states, cases.RECIPE), states, xs, grads
    )


def test_the_bits_of_products_that_quantize():
    arguments = two_layers()
    expected, got = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(*arguments)
        for f in (total_loss, quantized_loss)
    )
    assert_same_bits(got, expected, "value and gradients")


def test_kernels_are_quantized_once():
    """Not once in the loop over microbatches and again where remat runs a block
    again.
    """

    def quantized(function, kernel):
        jaxpr = str(
            jax.make_jaxpr(jax.jit(jax.grad(function, argnums=(0, 1))))(*two_layers())
        )
        shape = ",".join(map(str, kernel.shape))
        return len(re.findall(rf"f8_e4m3fn\[{shape}\].* = jaxfp8_quantize", jaxpr))

    for kernel in two_layers()[0].values():
        assert quantized(quantized_loss, kernel) == 1
        assert quantized(total_loss, kernel) > 1


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize("shape", [(6, 6), (6, 6, 4)])
def test_any_contraction(shape, contract):
    """Codes serve whatever dimension is contracted; where the second layout does not
    fit, it is made from them.
    """
    kernel, x = normal(*shape, seed=1), normal(5, 6)
    state = cases.pack(used_state())

    def loss(kernel, state, quantize):
        if quantize:
            kernel = jaxfp8.quantize_params({"a": kernel}, {"a": state}, cases.RECIPE)[
                "a"
            ]
        dimension_numbers = (((1,), (contract,)), ((), ()))
        y = jaxfp8.dot_general(
            x, kernel, dimension_numbers, recipe=cases.RECIPE, state=state
        )
        return jnp.sum(jnp.sin(y)), y

    expected, got = (
        jax.grad(loss, argnums=(0, 1), has_aux=True)(kernel, state, q)
        for q in (False, True)
    )
    assert_same_bits(got, expected, "gradients and y")


WITHOUT_STATE = {
    "delayed": cases.RECIPE,
    "current": jaxfp8.Float8CurrentScaling(),
    "rowwise": jaxfp8.Float8RowwiseScaling(),
    "block": jaxfp8.Float8BlockScaling(),
    "mx": jaxfp8.MXFP8BlockScaling(),
}


@each_row("recipe", WITHOUT_STATE)
def test_kernels_by_their_paths(recipe):
    """Without state a regex names them; they give the bits of products that
    quantize.
    """
    params, _, xs, grads = two_layers()
    params = {"block": params}

    def loss(params, where):
        if where:
            params = jaxfp8.quantize_params(params, None, recipe, where=where)
            assert isinstance(params["block"]["up"], jaxfp8.QTensor)
            assert params["block"]["down"].dtype == np.float32
        x = xs[0]
        for kernel in (params["block"]["up"], params["block"]["down"]):
            x = jaxfp8.dot_general(
                x,
                kernel,
                cases.MATMUL,
                recipe=recipe,
                state=jaxfp8.DotGeneralState(None, None, None),
            )
        return jnp.sum(x * grads[0])

    expected, got = (
        jax.value_and_grad(loss)(params, where) for where in (None, "block/u.")
    )
    assert_same_bits(got, expected, "value and gradients")


def test_blocks_that_move():
    """Scales of square blocks move with whole blocks of codes; blocks of a row
    cannot.
    """
    kernel = normal(2, 256, 130)
    recipe = jaxfp8.Float8BlockScaling()
    q = jaxfp8.quantize_params({"a": kernel}, None, recipe, where="a")["a"]
    for move in (
        lambda a: a[::-1],
        lambda a: jnp.concatenate([a, a], axis=1),
        lambda a: a.mT,
    ):
        moved = q.map(move)
        expected = jaxfp8.quantize_params({"a": move(kernel)}, None, recipe, where="a")[
            "a"
        ]
        assert moved.data_t is None
        for name in ("data", "scale_inv", "source"):
            oracle.assert_bitwise(getattr(moved, name), getattr(expected, name), name)
    with pytest.raises(
        ValueError, match="QTensor.map: function: expected whole blocks"
    ):
        q.map(lambda a: a[:, 1:])
    q = jaxfp8.quantize_params(
        {"a": kernel}, None, jaxfp8.MXFP8BlockScaling(), where="a"
    )["a"]
    with pytest.raises(
        ValueError,
        match="QTensor.map: expected a tensor with one scale, or with square blocks",
    ):
        q.map(lambda a: a)


def test_inference_without_the_kernel():
    """Codes alone multiply; they have no gradient to give."""
    params, states, xs, _ = two_layers()
    q = jaxfp8.quantize_params(params, states, cases.RECIPE)["up"]
    codes = jaxfp8.QTensor(q.data, q.scale_inv, q.data_t)
    with_source, without = (
        cases.product(xs[0], kernel, states["up"]) for kernel in (q, codes)
    )
    oracle.assert_bitwise(without, with_source, "y")
    with pytest.raises(TypeError, match="source"):
        jax.grad(
            lambda data: jnp.sum(
                cases.product(xs[0], jaxfp8.QTensor(data, q.scale_inv), states["up"])
            )
        )(q.data)


def test_errors():
    params, states, *_ = two_layers()
    other_length = jaxfp8.DelayedScaling(amax_history_len=7)
    high = jaxfp8.CustomRecipe(lambda role: None)
    for state, recipe, where, message in (
        ({"elsewhere": states["up"]}, cases.RECIPE, None, "found no state of a kernel"),
        (states, other_length, None, "resize_history"),
        (None, cases.RECIPE, None, "where: without a state"),
        (
            None,
            cases.RECIPE,
            "lm_.*",
            "where: no kernel matches 'lm_.*' as a whole; .* 'down'",
        ),
        (None, high, ".*", "recipe: expected kernels in FP8"),
    ):
        with pytest.raises(ValueError, match=f"quantize_params: .*{message}"):
            jaxfp8.quantize_params(params, state, recipe, where=where)
    with pytest.raises(TypeError, match="quantize_params: state: .* None, got Quant"):
        jaxfp8.quantize_params(params, states, WITHOUT_STATE["current"])
    quantized = jaxfp8.quantize_params(params, states, cases.RECIPE)
    with pytest.raises(TypeError, match="kernel"):
        jaxfp8.einsum(
            "bk,kn->bn",
            np.ones((2, cases.K), np.float32),
            quantized["up"],
            recipe=cases.RECIPE,
        )


@pytest.mark.parametrize("check_vma", [True, False])
def test_codes_that_are_gathered(check_vma):
    """FSDP by hand: bytes cross devices, no kernel does; the kernel's gradient comes
    back scattered.
    """
    recipe = jaxfp8.DelayedScaling(amax_history_len=HISTORY, pipeline_axes=())
    x, kernel, grad = cases.operands()
    state = cases.pack(used_state())
    cut = jax.sharding.PartitionSpec("fsdp")

    def gather(a):
        return lax.all_gather(a, "fsdp", axis=0, tiled=True)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(fsdp=2),
        in_specs=cut,
        out_specs=cut,
        check_vma=check_vma,
    )
    def step(x, kernel, grad):
        def product(kernel):
            quantized = jaxfp8.quantize_params({"a": kernel}, {"a": state}, recipe)
            codes = quantized["a"].map(gather)
            return jaxfp8.dot_general(
                x, codes, cases.MATMUL, recipe=recipe, state=state
            )

        y, vjp = jax.vjp(product, kernel)
        return y, *vjp(grad)

    with pytest.warns(jaxfp8.FP8StateWarning):
        y, gradient = step(x, kernel, grad)
        text = step.lower(x, kernel, grad).compile().as_text()
    expected = cases.one_product(x, kernel, grad, used_state())
    expected.check(y=y, wgrad=gradient)
    gathers = [c for c in hlo.collectives(text) if c.kind == "all-gather"]
    assert {dtype for c in gathers for dtype, _ in c.results} == {"u8"}
