"""inspect.compare: its figures against numpy, from operands that numpy quantizes
itself.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from equality import assert_same_bits
from flax import nnx
from programs.cases import MATMUL, pack
from programs.known_amax import leaves

import jaxfp8
from jaxfp8 import inspect
from jaxfp8.inspect._compare import _sqnr

A = jaxfp8.DelayedScaling(amax_history_len=2)
FIGURES = ("output", "input_grad", "kernel_grad")
# f64 in numpy and f32 in JAX differ by 2**-20 of a tensor, which moves few codes to a
# neighbour. One of the 128 codes or more that each tensor has, moved by a step of
# 2**-3, twice a rounding's worst error, changes the noise by 2**2 / 128 at the very
# most: 10 log10(1 + 2**-5) dB.
DB = 10 * math.log10(1 + 2**-5)


def state_of(amax_x, amax_kernel, amax_grad):
    return oracle.LayerState(
        *(
            oracle.State(np.full(2, amax, np.float32), np.float32(1))
            for amax in (amax_x, amax_kernel, amax_grad)
        )
    )


def rounded(x, amax, fmt=oracle.E4M3):
    """What is left of x, f64, with the scale that this amax gives."""
    scale = np.float32(fmt.max) / np.float32(amax)
    codes, _ = oracle.quantize(np.asarray(x, np.float32), scale, fmt)
    return codes.astype(np.float64) / np.float64(scale)


def db(exact, got):
    return 10 * np.log10(np.sum(exact**2) / np.sum((exact - got) ** 2))


def products(x, kernel, grad):
    """y and both gradients."""
    return x @ kernel, grad @ kernel.T, x.T @ grad


def fp8_products(x, kernel, grad, amaxes):
    of_x, of_kernel, of_grad = amaxes
    grad = rounded(grad, of_grad, oracle.E5M2)
    return products(rounded(x, of_x), rounded(kernel, of_kernel), grad)


def two_layers(scales):
    """`y = relu(x @ k0) @ k1` and what numpy says of both products, alone and in the
    model; loss sum(y * w).
    """
    x, k0, k1, w = (
        normal(*shape, seed=seed).astype(np.float64)
        for seed, shape in enumerate(((16, 32), (32, 24), (24, 8), (16, 8)))
    )
    hidden = np.maximum(x @ k0, 0)
    grad = (w @ k1.T) * (hidden > 0)
    operands = {"0": (x, k0, grad), "1": (hidden, k1, w)}
    exact = {name: products(*each) for name, each in operands.items()}
    alone = {name: fp8_products(*each, scales[name]) for name, each in operands.items()}
    hidden = np.maximum(alone["0"][0], 0)
    of_1 = fp8_products(hidden, k1, w, scales["1"])
    of_0 = fp8_products(x, k0, of_1[1] * (hidden > 0), scales["0"])
    model = {"0": of_0, "1": of_1}
    rows = {
        name: {
            prefix + figure: db(exact[name][i], got[name][i])
            for prefix, got in (("", alone), ("model_", model))
            for i, figure in enumerate(FIGURES)
        }
        for name in "01"
    }
    return (x, k0, k1, w), rows


SCALES = {"0": (3.0, 4.0, 40.0), "1": (20.0, 0.5, 2.0)}  # the last kernel saturates


def test_figures_by_hand():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {
                "use_bias": False,
                "dot_general_cls": lambda: jaxfp8.Fp8DotGeneral(recipe=A),
            }
            return nn.Dense(8, name="1", **options)(
                nn.relu(nn.Dense(24, name="0", **options)(x))
            )

    (x, k0, k1, w), wanted = two_layers(SCALES)
    x, k0, k1, w = (jnp.asarray(array, jnp.float32) for array in (x, k0, k1, w))
    states = {
        name: {"Fp8DotGeneral_0": leaves(state_of(*amaxes))}
        for name, amaxes in SCALES.items()
    }
    variables = {
        "params": {"0": {"kernel": k0}, "1": {"kernel": k1}},
        jaxfp8.OVERWRITE_WITH_GRADIENT: states,
    }
    comparison = inspect.compare(Model(), x, variables, loss=lambda y: jnp.sum(y * w))
    assert [row["layer"] for row in comparison.rows] == ["1", "0"]  # the worst first
    for row in comparison.rows:
        for figure, value in wanted[row["layer"]].items():
            assert abs(row[figure] - value) < DB, (row["layer"], figure)
    assert comparison.rows[0]["output"] < 10 < comparison.rows[1]["output"]
    head, first, second = str(comparison).split("\n")
    assert head.split() == [
        "layer",
        *FIGURES,
        *(f"model_{figure}" for figure in FIGURES),
    ]
    assert first.split() == [
        "1",
        *(f"{comparison.rows[0][name]:.1f}" for name in head.split()[1:]),
    ]
    assert len(first) == len(second) == len(head)


def test_nnx():
    """Products whose result the loss does not read have no row; nothing is updated."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.unused = (
                jaxfp8.nnx.Linear(8, 8, recipe=A, rngs=rngs) for _ in range(2)
            )
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            self.unused(x)
            return self.drop(self.up(x))

    model = Model(nnx.Rngs(0))
    kinds = nnx.Param, jaxfp8.nnx.OverwriteWithGradient
    before = jax.tree.map(np.array, nnx.state(model, *kinds))
    comparison = inspect.compare(model, jnp.ones((4, 8)))
    assert {row["layer"] for row in comparison.rows} == {"up"}
    assert_same_bits(nnx.state(model, *kinds), before)


def test_what_is_lost_wholly_or_not_at_all():
    x = jnp.ones((4, 8))
    kernel = jnp.ones((8, 4))

    def compared(*amaxes):
        def product(x, kernel):
            return jaxfp8.dot_general(
                x, kernel, MATMUL, recipe=A, state=pack(state_of(*amaxes))
            )

        (row,) = inspect.compare(product, (x, kernel), loss=jnp.sum).rows
        return {figure: row[figure] for figure in FIGURES}

    # scales of 1, and codes of 1
    assert set(compared(448, 448, 57344).values()) == {math.inf}
    # All of x is flushed to zero: what is lost of what needs it is all there was.
    assert compared(1e30, 448, 57344) == {
        "output": 0.0,
        "input_grad": math.inf,
        "kernel_grad": 0.0,
    }


def test_figures_of_tensors_that_are_not_finite():
    nan, inf = math.nan, math.inf
    cases = (1, nan, -inf), (1, inf, -inf), (nan, 1, nan), (inf, inf, nan), (0, 1, -inf)
    for exact, got, figure in (*cases, (nan, nan, nan), (0, 0, inf), (1, 0.9, 20)):
        sqnr = _sqnr(np.array([exact]), np.array([got]))
        np.testing.assert_allclose(sqnr, figure)


def gram(x):
    """`x.T @ x` in FP8."""
    return jaxfp8.einsum("mk,mn->kn", x, x, recipe=jaxfp8.Float8CurrentScaling())


def test_results_that_are_not_arrays():
    """Numbers, text and None are results too; the mean of squares leaves them out."""
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)

    found = inspect.compare(lambda x: {"y": gram(x), "rest": (3, 1.5, "text", None)}, x)
    assert found.rows == inspect.compare(gram, x).rows


def test_errors():
    x = jnp.ones((4, 8))
    with pytest.raises(
        ValueError,
        match="compare: model: expected FP8 products that .* is autocast off",
    ):
        inspect.compare(lambda x: 2 * x, x)
    with pytest.raises(
        ValueError,
        match="compare: model: expected FP8 products that the gradient of the loss",
    ):
        inspect.compare(gram, x, loss=lambda y: jax.lax.stop_gradient(jnp.sum(y)))
    with pytest.raises(
        TypeError,
        match="compare: model: expected a result with .*, got none; register the class",
    ):
        inspect.compare(lambda x: jnp.argmax(gram(x)), x)
    with pytest.raises(
        TypeError,
        match="compare: variables: expected None for a model that is not Linen's",
    ):
        inspect.compare(gram, x, {})
    with pytest.raises(TypeError, match="'int' object is not callable"):
        inspect.compare(3, x)
