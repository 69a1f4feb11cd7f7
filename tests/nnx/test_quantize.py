"""nnx.quantize: the model edited by hand is the reference, and every comparison with it
is bitwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal
from equality import assert_same_bits as assert_same
from flax import nnx
from linen.test_quantize_copies import COPIES as LINEN_COPIES
from parametrize import each_row

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import Fp8DotGeneral, Fp8Einsum, OverwriteWithGradient, quantize

A, B = (jaxfp8.DelayedScaling(amax_history_len=h) for h in (3, 5))
D = 8


def fp8(recipe, kind=Fp8DotGeneral):
    return (
        {}
        if recipe is None
        else {"dot_general" if kind is Fp8DotGeneral else "einsum_op": kind(recipe)}
    )


class Block(nnx.Module):
    """Layers of each kind; `a`, `m` and `e` are the edit by hand."""

    def __init__(self, rngs, a=None, m=None, e=None):
        self.attn = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        if a is not None:
            for layer in (
                self.attn.query,
                self.attn.key,
                self.attn.value,
                self.attn.out,
            ):
                layer.dot_general = nnx.data(Fp8DotGeneral(a))
        self.mlp = nnx.Linear(D, D, rngs=rngs, **fp8(m))
        self.mix = nnx.Einsum(
            "bld,dhk->blhk", (D, 2, 4), (2, 4), rngs=rngs, **fp8(e, Fp8Einsum)
        )

    def __call__(self, x):
        x = x + self.attn(x)
        return x + self.mix(self.mlp(x)).reshape(x.shape)


class Model(nnx.Module):
    def __init__(self, a=None, m=None, e=None, h=None):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs, a, m, e) for _ in range(2)])
        self.head = nnx.LinearGeneral(D, (5,), rngs=rngs, **fp8(h))
        self.again = self.head

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.again(2 * x)


RULES = [
    ("again", A),
    ("head", None),
    (r"blocks/\d/attn/.*", A),
    (r"blocks/\d/mlp", B),
    (".*/mix", A),
    (".*", B),
]


def x(seed=0):
    return normal(4, 3, D, seed=seed)


def state_of(model):
    return nnx.to_pure_dict(nnx.state(model, jaxfp8.nnx.trainable))


@nnx.jit
def step(model, x):
    def loss(model):
        y = model(x)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = jaxfp8.nnx.value_and_grad(
        loss, has_aux=True, argnums=nnx.DiffState(0, jaxfp8.nnx.trainable)
    )(model)
    return y, nnx.to_pure_dict(gradients)


def compare(quantized, hand):
    """State, output, gradients and next state of both: every bit."""
    assert_same(state_of(quantized), state_of(hand), "state")
    assert_same(step(quantized, x()), step(hand, x()), "step")


def test_trains_as_the_model_edited_by_hand():
    """`head` is the layer that `again` shares: it has the first of the two names."""
    model = Model()
    assert quantize(model, RULES) is model
    compare(model, Model(A, B, A, A))


class Experts(nnx.Module):
    """Products that a module holds itself, by name."""

    def __init__(self, up=None, down=None):
        self.up = Fp8Einsum(up)
        self.down = Fp8Einsum(down)


def test_products_that_modules_hold():
    """A rule names a product by its own path, or by that of the module."""
    quantized, hand = (nnx.Dict(experts=Experts(*recipes)) for recipes in ((), (A, B)))
    assert_same(
        state_of(quantize(quantized, [("experts/down", B), ("experts", A)])),
        state_of(hand),
    )


class Parameters(nnx.Module):
    """Parameters that are no plain arrays: sharded by name, a pair, a Python number,
    None.
    """

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        self.kernel = nnx.Param(init(rngs(), (D, D)), eager_sharding=False)
        self.pair = nnx.Param((jnp.ones(D), jnp.ones((D, D))))
        self.number = nnx.Param(1.0)
        self.nothing = nnx.Param(None)
        self.mlp = nnx.Linear(D, D, rngs=rngs)


def test_parameters_that_are_no_arrays():
    with pytest.warns(jaxfp8.FP8StateWarning, match="as with 'kernel 8x8': where"):
        quantize(Parameters(nnx.Rngs(0)), [(".*", A)])


def test_attention_that_shares_a_product():
    """Its layers get their own; the shared one is not kept, nor its state."""
    shared = nnx.MultiHeadAttention(
        2, D, decode=False, qkv_dot_general=Fp8DotGeneral(B), rngs=nnx.Rngs(0)
    )
    quantize(shared, [("query", A), ("key|value", None)])
    assert shared.qkv_dot_general is None
    assert list(state_of(shared)["query"]) == ["bias", "dot_general", "kernel"]
    assert len(jax.tree.leaves(nnx.state(shared, OverwriteWithGradient))) == 6
    part = nnx.MultiHeadAttention(
        2, D, decode=False, qkv_dot_general=Fp8DotGeneral(B), rngs=nnx.Rngs(0)
    )
    quantize(part, [("query", A)])
    assert part.qkv_dot_general is part.key.dot_general


def test_own_layers():
    make = lambda recipe: jaxfp8.nnx.GatedMLP(D, 16, recipe=recipe, rngs=nnx.Rngs(0))  # noqa: E731
    compare(quantize(make(B), [(".*", A)]), make(A))
    off = quantize(make(B), [("wi", None), ("wo", A)])
    assert list(state_of(off)["wi"]) == ["kernel"]
    assert off.wi.dot_general.recipe == jaxfp8.HighPrecision()
    compare(quantize(off, [(".*", A)]), make(A))  # and on again


def stacked(recipe=None):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Block(rngs, recipe, recipe, recipe)

    return make(nnx.Rngs(0))


def test_stacked_layers():
    quantized = quantize(stacked(), [(".*", A)])
    hand = stacked(A)
    assert_same(state_of(quantized), state_of(hand))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(block, x):
        return block(x)

    assert_same(run(quantized, x()), run(hand, x()))


def through_pure_dicts(model):
    """As a checkpoint would: numpy in nested dicts, into a module that was never
    initialized.
    """
    stored = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: quantize(Model(), RULES)))
    nnx.replace_by_pure_dict(abstract, stored)
    return nnx.merge(graphdef, abstract)


COPIES = {name: copy for name, copy in LINEN_COPIES.items() if name != "protocol 0"} | {
    "clone": nnx.clone,
    "split and merge": lambda model: nnx.merge(*nnx.split(model, nnx.Param, ...)),
    "pure dicts": through_pure_dicts,
}


@each_row("copy", COPIES)
def test_copies(copy):
    """In the middle of training: state that is not as it was made."""
    model = quantize(Model(), RULES)
    gradients = jaxfp8.nnx.grad(lambda model: jnp.sum(model(x())))(model)
    jaxfp8.nnx.update_state(model, gradients)
    copied = copy(model)
    assert type(copied) is Model and hash(copied) != hash(model)
    assert nnx.graphdef(copied) == nnx.graphdef(model)
    assert copied.fp8_rules == model.fp8_rules
    compare(copied, model)
    assert str(jaxfp8.report(copied)) == str(jaxfp8.report(model))


def test_a_recipe_that_raises_leaves_the_model_alone():
    """The recipe of a later rule may raise where its state is made."""

    class Unlucky(jaxfp8.Float8CurrentScaling):
        def quantizers(self):
            raise RuntimeError("no state")

    for make in (Model, lambda: Model(B, B, B, B)):
        model = make()
        before = nnx.graphdef(make())
        with pytest.raises(RuntimeError, match="no state"):
            quantize(model, [("again", A), (r"blocks/0/.*", A), (".*", Unlucky())])
        assert nnx.graphdef(model) == before


def test_errors_name_a_layer_that_is_the_model():
    stacked = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs), out_axes=1)(
        nnx.Rngs(0).fork(split=3)
    )
    with pytest.raises(
        ValueError,
        match=(
            r"nnx.quantize: model: expected a kernel \[8, 8\], .* first axis, got "
            r"\[8, 3, 8\]"
        ),
    ):
        quantize(stacked, [(".*", A)])
    current = quantize(
        nnx.Linear(D, D, rngs=nnx.Rngs(0)), [(".*", jaxfp8.Float8CurrentScaling())]
    )
    frozen = jaxfp8.freeze(current, jnp.ones((2, D)))
    assert np.isnan(frozen.kernel[...]).all()
    with pytest.raises(
        ValueError, match="nnx.quantize: model: jaxfp8.freeze left codes"
    ):
        quantize(frozen, [(".*", A)])
