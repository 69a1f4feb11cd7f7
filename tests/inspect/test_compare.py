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
from flax import nnx
from programs.cases import MATMUL
from programs.linen import STACKED

import jaxfp8
from jaxfp8 import inspect

A = jaxfp8.DelayedScaling(amax_history_len=2)
FIGURES = ("output", "input_grad", "kernel_grad")
# f64 in numpy and f32 in JAX differ by 2**-20 of a tensor, which moves few codes to a
# neighbour. One of the 128 codes or more that each tensor has, moved by a step of
# 2**-3, twice a rounding's worst error, changes the noise by 2**2 / 128 at the very
# most: 10 log10(1 + 2**-5) dB.
DB = 10 * math.log10(1 + 2**-5)


def state_of(amax_x, amax_kernel, amax_grad):
    return jaxfp8.DotGeneralState(
        *(
            jaxfp8.recipes.QuantizerState(
                jnp.full((2,), amax, jnp.float32), jnp.ones((1,), jnp.float32)
            )
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


def two_layers(scales):
    """`y = relu(x @ k0) @ k1` and what numpy says of both products, alone and in the
    model; loss sum(y * w).
    """
    rng = np.random.default_rng(0)
    x, k0, k1, w = (
        rng.standard_normal(shape) for shape in ((16, 32), (32, 24), (24, 8), (16, 8))
    )
    x, k0, k1, w = (
        array.astype(np.float32).astype(np.float64) for array in (x, k0, k1, w)
    )
    e5m2 = oracle.E5M2

    def layer(x, kernel, scale):
        x = rounded(x, scale[0])
        kernel = rounded(kernel, scale[1])
        return x @ kernel, lambda grad: (
            rounded(grad, scale[2], e5m2) @ kernel.T,
            x.T @ rounded(grad, scale[2], e5m2),
        )

    h = x @ k0
    y = np.maximum(h, 0) @ k1
    exact = {"0": (h, None, None), "1": (y, w @ k1.T, np.maximum(h, 0).T @ w)}
    grad_h = (w @ k1.T) * (h > 0)
    exact["0"] = (h, grad_h @ k0.T, x.T @ grad_h)
    alone = {}
    model = {}
    for name, operands in (("0", (x, k0, grad_h)), ("1", (np.maximum(h, 0), k1, w))):
        out, back = layer(*operands[:2], scales[name])
        alone[name] = (out, *back(operands[2]))
    h8, back0 = layer(x, k0, scales["0"])
    y8, back1 = layer(np.maximum(h8, 0), k1, scales["1"])
    a8, k18 = back1(w)
    model["1"] = (y8, a8, k18)
    model["0"] = (h8, *back0(a8 * (h8 > 0)))
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
    states = {}
    for name, scale in SCALES.items():
        state = state_of(*scale)
        states[name] = {
            "Fp8DotGeneral_0": {
                f"{operand}_{leaf}": getattr(getattr(state, operand), leaf)
                for operand in ("input", "kernel", "output_grad")
                for leaf in ("amax_history", "scale")
            }
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
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = jaxfp8.nnx.Linear(8, 16, recipe=A, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
            self.unused = jaxfp8.nnx.Linear(16, 16, recipe=A, rngs=rngs)

        def __call__(self, x):
            self.unused(x[:, :1].repeat(16, axis=1))
            return self.blocks[0](self.drop(self.up(x)))

    model = jaxfp8.nnx.quantize(Model(nnx.Rngs(0)), [("blocks/0", A)])
    before = jax.tree.map(
        np.asarray, nnx.state(model, nnx.Param, jaxfp8.nnx.OverwriteWithGradient)
    )
    comparison = inspect.compare(model, jnp.ones((4, 8)))
    assert {row["layer"] for row in comparison.rows} == {"up", "blocks/0"}
    after = nnx.state(model, nnx.Param, jaxfp8.nnx.OverwriteWithGradient)
    # nothing is updated
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


def test_a_loop_that_reads_state_before_it_runs():
    """`linen.scan` gives its products a reading in place of state; their rows are those
    of `nn.scan`.
    """

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(16, dot_general_cls=jaxfp8.make_dot_general_cls(A))(x), None

    def compared(scan):
        model = scan(Block, **STACKED, length=2)()
        x = np.random.default_rng(0).standard_normal((4, 16), np.float32)
        return inspect.compare(
            model,
            (x, None),
            model.init(jax.random.key(0), x, None),
            loss=lambda out: out[0].sum(),
        )

    assert compared(jaxfp8.linen.scan).rows == compared(nn.scan).rows


def test_what_is_lost_wholly_or_not_at_all():
    x = jnp.ones((4, 8))
    kernel = jnp.ones((8, 4))

    def compared(*amaxes):
        def product(x, kernel):
            return jaxfp8.dot_general(
                x, kernel, MATMUL, recipe=A, state=state_of(*amaxes)
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
        match="compare: model: expected FP8 products, got none; is autocast off",
    ):
        inspect.compare(lambda x: 2 * x, x)
    with pytest.raises(
        ValueError,
        match="compare: loss: expected a loss whose gradient reaches an FP8 product",
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
    with pytest.raises(
        TypeError,
        match="compare: model: expected a Linen or NNX module or a function, got int",
    ):
        inspect.compare(3, x)
