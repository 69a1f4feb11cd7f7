"""linen.quantize: which layer runs which recipe; the model edited by hand is the
reference, bit for bit.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxfp8
from jaxfp8.linen import quantize

from .quantized import (
    KEY,
    OWG,
    RULES,
    A,
    B,
    D,
    Model,
    assert_same,
    by_hand,
    by_rules,
    compare_programs,
    compare_training,
    fp8,
    model,
    x,
)


@functools.cache
def variables_by_hand():
    return jax.jit(by_hand().init)(KEY, x())


@pytest.mark.ci
def test_trains_as_the_model_edited_by_hand():
    compare_training(by_rules(), by_hand(), x())


@pytest.mark.parametrize(
    "method",
    [
        None,
        "encode",
        Model.encode,
        Model.__call__,
        lambda m, x: m.encode(x),
        lambda m, x: m.blocks[0](x),
    ],
)
def test_every_way_to_call(method):
    variables = variables_by_hand()
    got = by_rules().apply(variables, x(), method=method)
    assert_same(got, by_hand().apply(variables, x(), method=method))


def test_bound_models():
    variables = variables_by_hand()
    hand = by_hand().bind(variables)
    assert_same(by_rules().bind(variables)(x()), hand(x()))
    assert_same(by_rules().bind(variables).encode(x()), hand.encode(x()))
    # before setup has run
    assert_same(by_rules().bind(variables).blocks[1](x()), hand.blocks[1](x()))
    assert_same(by_rules().bind(variables).shared(x()), hand.shared(x()))
    assert_same(nn.apply(Model.encode, by_rules())(variables, x()), hand.encode(x()))
    unbound, _ = by_rules().bind(variables).unbind()
    assert unbound == by_rules()


def test_bound_submodules_in_containers():
    class Towers(nn.Module):
        def setup(self):
            self.towers = {"a": nn.Dense(D), "b": (nn.Dense(D), 3)}

        def __call__(self, x):
            return self.towers["b"][0](self.towers["a"](x))

    quantized = quantize(Towers(), [("towers_a", A), ("towers_b_0", B)])
    variables = quantized.init(KEY, x())
    bound = quantized.bind(variables)
    hidden = nn.Dense(D, dot_general_cls=fp8(A)).apply(
        {name: tree["towers_a"] for name, tree in variables.items()}, x()
    )
    assert_same(bound.towers["a"](x()), hidden)
    assert_same(bound.towers["b"][0](hidden), bound(x()))
    assert bound.towers["b"][1] == 3


def test_is_a_module_like_its_model():
    quantized = by_rules()
    assert isinstance(quantized, Model) and type(quantized).__name__ == "Model"
    assert quantized == by_rules() and hash(quantized) == hash(by_rules())
    assert quantized != model() and quantized != quantize(model(), RULES[1:])
    assert quantized.clone(h=A) != quantized and quantized.clone(h=A).h == A
    assert_same(
        quantized.clone().init(KEY, x()),
        by_hand().init(KEY, x()),
    )
    assert "MultiHeadDotProductAttention" in quantized.tabulate(
        KEY, x(), console_kwargs={"width": 300}
    )
    assert repr(quantized) == repr(model())


# ----------------------------------------------------------------- which rule, and None


def test_which_rule():
    """First match, as a whole, and None."""
    compare_programs(
        quantize(model(), [("head", A), ("head", B), (".*", None)]), model(h=A), x()
    )
    compare_programs(
        quantize(
            model(), [("mlp", A), ("attn", A), ("blocks_0", A), ("ead", A), ("hea", A)]
        ),
        model(),
        x(),
    )
    compare_programs(
        quantize(by_hand(), [(r"blocks_\d/mlp", None)]), model(A, None, None, A), x()
    )


def test_rules_on_rules():
    """The later rules are asked first; a model in a model has its own paths, and the
    outer rules come first.
    """
    twice = quantize(quantize(model(), [("head", A), ("shared", A)]), [("head", B)])
    compare_programs(twice, model(h=B, shared=A), x())
    inner = quantize(model(), [("head", A), ("shared", A)])
    outer = quantize(nn.Sequential([inner]), [("layers_0/head", B)])
    compare_programs(outer, nn.Sequential([model(h=B, shared=A)]), x())


# ------------------------------------------------------------------------------- layers


def test_own_layers():
    for layer, rules, wanted in (
        (jaxfp8.linen.Dense(5), [("", A)], jaxfp8.linen.Dense(5, recipe=A)),
        (
            jaxfp8.linen.GatedMLP(16, recipe=B),
            [(".*", A)],
            jaxfp8.linen.GatedMLP(16, recipe=A),
        ),
        (
            jaxfp8.linen.NormDense(5),
            [("dense", A)],
            jaxfp8.linen.NormDense(5, recipe=A),
        ),
        (
            jaxfp8.linen.Dense(5),
            [("Fp8DotGeneral_0", A)],
            jaxfp8.linen.Dense(5, recipe=A),
        ),
    ):
        compare_programs(quantize(layer, rules), wanted, x())


def test_own_layers_in_high_precision():
    mlp = quantize(jaxfp8.linen.GatedMLP(16), [("wi", None)])
    variables = mlp.init(KEY, x())
    assert set(variables[OWG]) == {"wo"}
    both = quantize(jaxfp8.linen.GatedMLP(16), [("w[io]", None)])
    high = jaxfp8.linen.GatedMLP(16, recipe=jaxfp8.HighPrecision())
    compare_programs(both, high, x())


class EditedEinsum(nn.Module):
    """nn.Einsum with an FP8 product, by hand."""

    bias: bool

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.linear.default_kernel_init, (D, 2, 4))
        bias = (
            self.param("bias", nn.initializers.zeros_init(), (2, 4))
            if self.bias
            else None
        )
        y = jaxfp8.linen.Fp8Einsum(recipe=A)("bld,dhk->blhk", x, kernel)
        return y if bias is None else y + bias[None, None]


@pytest.mark.parametrize("bias", [True, False])
def test_einsum(bias):
    plain = nn.Einsum((D, 2, 4), "bld,dhk->blhk", use_bias=bias)
    compare_training(quantize(plain, [("", A)]), EditedEinsum(bias), x())
    variables = plain.init(KEY, x())
    assert_same(
        quantize(plain, [("", None)]).apply(variables, x()), plain.apply(variables, x())
    )


class Experts(nn.Module):
    """Products that a module holds itself, by name."""

    up: object = None
    down: object = None

    @nn.compact
    def __call__(self, x):
        up = self.param("up_kernel", nn.initializers.normal(), (D, 16))
        down = self.param("down_kernel", nn.initializers.normal(), (16, D))
        hidden = jaxfp8.linen.Fp8Einsum(recipe=self.up, name="up")("bld,dh->blh", x, up)
        return jaxfp8.linen.Fp8Einsum(recipe=self.down, name="down")(
            "blh,hd->bld", hidden, down
        )


def test_products_that_modules_hold():
    compare_programs(quantize(Experts(), [("down", B), ("", A)]), Experts(A, B), x())


class Parameters(nn.Module):
    """Parameters that are no plain arrays: in boxes, a pair, a Python number, None."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
        kernel = self.param("kernel", init, (D, D))
        left, right = self.param("pair", lambda key: (jnp.ones(()), jnp.ones((D, D))))
        number = self.param("number", lambda key: 1.0)
        self.param("nothing", lambda key: None)
        return nn.Dense(D, kernel_init=init)(x @ kernel * left @ right * number)


def test_parameters_that_are_no_arrays():
    """Boxed matrices are named by their shapes; nothing else is in the way."""
    quantized = quantize(Parameters(), [(".*", A)])
    variables = quantized.init(KEY, x())
    with pytest.warns(jaxfp8.FP8StateWarning, match="as with 'kernel 8x8': where"):
        quantized.apply(variables, x())


class OldLayer(nn.Module, kw_only=True):
    """Any module with a field `dot_general_cls` is a layer."""

    width: int = 5
    dot_general_cls: object = None

    def setup(self):
        self.product = (
            self.dot_general_cls() if self.dot_general_cls else jax.lax.dot_general
        )
        self.kernel = self.param("kernel", nn.initializers.normal(), (D, self.width))

    def __call__(self, x):
        return self.product(x, self.kernel, (((x.ndim - 1,), (0,)), ((), ())))


def test_layers_by_their_field():
    compare_programs(
        quantize(OldLayer(), [("", A)]), OldLayer(dot_general_cls=fp8(A)), x()
    )


@pytest.mark.parametrize("bad", [Model, 3])
def test_errors(bad):
    with pytest.raises(TypeError, match="linen.quantize: model: expected an instance"):
        quantize(bad, RULES)


def test_bound_model_is_an_error():
    with pytest.raises(
        ValueError, match="linen.quantize: model: expected an unbound module"
    ):
        quantize(model().bind(model().init(KEY, x())), RULES)
