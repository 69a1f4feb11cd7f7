"""Rules that reach no product: one FP8StateWarning, and none where there is nothing to
say.
"""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from draws import KEY
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx

CURRENT = jaxfp8.Float8CurrentScaling()
DELAYED = jaxfp8.DelayedScaling(amax_history_len=3)
ALL = [(".*", DELAYED)]
X = jnp.ones((4, 8))


def said(function) -> list[str]:
    """Return the texts of the FP8StateWarnings of a call."""
    with warnings.catch_warnings(record=True, action="always") as found:
        function()
    assert all(w.filename == __file__ for w in found), (
        "a warning points at the line of the user"
    )
    return [str(w.message) for w in found if w.category is jaxfp8.FP8StateWarning]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


class Model(nn.Module):
    block: type[nn.Module] = Block

    def setup(self):
        self.body, self.head = self.block(), nn.Dense(8)

    def __call__(self, x):
        return self.head(self.body(x))

    def decode(self, x):
        return self.head(x)


def test_rules_that_match_nothing():
    """Linen says so where the model runs."""
    variables = Model().init(KEY, X)
    for path in ("Dense", "body"):
        model = jaxfp8.quantize(Model(), [(path, DELAYED), ("other", None)])
        (text,) = said(lambda model=model: jax.eval_shape(model.apply, variables, X))
        assert (
            f"none of ['{path}'] gives a layer of Model FP8" in text
            and "'body/Dense_0', 'head'" in text
        )
    cell = nn.OptimizedLSTMCell(8)  # it multiplies arrays itself
    rnn = jaxfp8.quantize(nn.RNN(cell), [(".*", DELAYED)])
    variables = rnn.init(KEY, X[None])
    (text,) = said(lambda: jax.eval_shape(rnn.apply, variables, X[None]))
    assert "The layers are none" in text
    linear = lambda: nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))  # noqa: E731
    (text,) = said(lambda: jaxfp8.quantize(linear(), [("Linear", DELAYED)]))
    assert (
        "none of ['Linear'] gives a layer of Sequential FP8" in text
        and "'layers/0'" in text
    )
    assert said(lambda: jaxfp8.quantize(linear(), [("layers/0", DELAYED)])) == []
    assert said(lambda: jaxfp8.quantize(linear(), [(".*", None)])) == []


@pytest.mark.parametrize("block", [Block, nn.jit(Block)], ids=["plain", "nn.jit"])
def test_rules_that_say_nothing(block):
    """A method that runs a part of the model; a block that nn.jit has kept, which runs
    unseen; a submodule.
    """
    variables = Model(block).init(KEY, X)
    model = jaxfp8.quantize(Model(block), [("body/.*", DELAYED), ("head", None)])
    assert said(lambda: model.apply(variables, X, method="decode")) == []
    for _ in range(2):
        assert said(lambda: model.init(KEY, X)) == []
    assert said(lambda: model.bind(variables).head(X)) == []
    off = jaxfp8.quantize(Model(block), [(".*", None)])
    assert said(lambda: off.apply(variables, X)) == []


def test_one_rule_of_a_list_matches_nothing():
    """The rule is named once: in Linen where the whole model's variables are, in NNX by
    quantize.
    """
    variables = Model().init(KEY, X)
    model = jaxfp8.quantize(
        Model(), [("heda", None), ("body", DELAYED), ("head|body/.*", DELAYED)]
    )
    assert said(lambda: model.init(KEY, X)) == []
    (text,) = said(lambda: model.apply(variables, X, method="decode"))
    assert (
        "no layer of Model matches 'heda': a regex" in text
        and "'head'" in text
        and "'body/Dense_0'" in text
    )
    assert said(lambda: model.apply(variables, X)) == []
    (text,) = said(
        lambda: jaxfp8.quantize(
            nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), [("a", None), *ALL]
        )
    )
    assert (
        "no layer of Sequential matches 'a': a regex" in text and "'layers/0'" in text
    )
    holder = nnx.Sequential(jaxfp8.nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    assert said(lambda: jaxfp8.quantize(holder, ALL)) == []


@pytest.mark.parametrize(
    "paths, idle",
    [
        (["embed", "block/conv", "block/norm"], []),
        ([".*embed|.*norm"], []),
        (["block"], ["block"]),  # a container: its layers are "block/..."
        (["block/out/dot_general", "norm"], ["block/out/dot_general", "norm"]),
    ],
)
def test_rules_that_keep_what_has_no_product_in_high_precision(paths, idle):
    rngs = nnx.Rngs(0)
    conv = nnx.Conv(8, 8, (3,), rngs=rngs)
    norm = nnx.LayerNorm(8, rngs=rngs)
    out = nnx.Linear(8, 8, rngs=rngs)
    model = nnx.Dict(
        embed=nnx.Embed(16, 8, rngs=rngs), block=nnx.Dict(conv=conv, norm=norm, out=out)
    )
    rules = [*((path, None) for path in paths), *ALL]
    texts = said(lambda: jaxfp8.quantize(model, rules))
    assert len(texts) == bool(idle) and all(
        f"no layer of Dict matches {', '.join(map(repr, idle))}:" in text
        for text in texts
    )
    assert isinstance(out.dot_general, jaxfp8.nnx.Fp8DotGeneral)


@pytest.mark.parametrize(
    "block",
    [Block, nn.jit(Block), nn.remat(Block)],
    ids=["plain", "nn.jit", "nn.remat"],
)
def test_lists_whose_rules_all_match_something(block):
    """A rule that an earlier one shadows, a product by the path of its holder, and an
    einsum.
    """

    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jaxfp8.linen.Dense(8, recipe=CURRENT, name="ours")(
                Model(block, name="model")(x)
            )
            return nn.Einsum((8, 8), "bi,io->bo", name="mix")(x)

    rules = [
        ("ours", DELAYED),
        ("model/body/Dense_0", DELAYED),
        ("mix", DELAYED),
        *ALL,
        ("model/head", None),
    ]
    model = jaxfp8.quantize(Mixed(), rules)
    variables = model.init(KEY, X)
    assert said(lambda: [model.apply(variables, X) for _ in range(2)]) == []
    assert (
        said(lambda: jax.jit(jaxfp8.quantize(Mixed(), rules).apply)(variables, X)) == []
    )


class OwnProducts(nn.Module):
    """A model whose code multiplies its parameters, and adds one of them."""

    is_embedding: bool = False
    has_product: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal()
        x = nn.Conv(8, (3,))(x) + self.param("position", init, (1, 8))
        if not self.is_embedding:
            x = (
                x
                @ self.param("small", init, (8, 8))
                @ self.param("large", init, (8, 16))
            )
        if self.has_product:
            kernel = self.param("kernel", init, (8, 16))
            x = jaxfp8.linen.Fp8Einsum()("bi,io->bo", x, kernel)
        return nn.Dense(8)(x + self.param("pos_embedding", init, (4, x.shape[-1])))


class OwnProductsNnx(nnx.Module):
    def __init__(self):
        self.w, self.bias = nnx.Param(jnp.ones((8, 8))), nnx.Param(jnp.ones(8))
        self.conv = nnx.Conv(8, 8, (3,), rngs=nnx.Rngs(0))
        self.embed = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def test_products_of_a_modules_own_code():
    """Named once, the largest first; convolutions, embeddings and what is kept in high
    precision are not.
    """

    def runs(model):
        return lambda: model.apply(model.init(KEY, X), X)

    (text,) = said(runs(jaxfp8.quantize(OwnProducts(), ALL)))
    assert "as with 'large 8x16', 'small 8x8': where these are multiplied" in text
    assert "use jaxfp8.linen.Fp8Einsum" in text
    assert said(runs(jaxfp8.quantize(OwnProducts(), [("", None), *ALL]))) == []
    assert said(runs(jaxfp8.quantize(OwnProducts(is_embedding=True), ALL))) == []
    (text,) = said(lambda: jaxfp8.quantize(nnx.List([OwnProductsNnx()]), ALL))
    assert "as with '0/w 8x8': where" in text and "jaxfp8.nnx.Fp8Einsum" in text
    for rules in ([("0/out", DELAYED)], [("0", None), *ALL]):
        assert (
            said(
                lambda rules=rules: jaxfp8.quantize(nnx.List([OwnProductsNnx()]), rules)
            )
            == []
        )
    # A module that holds an FP8 product multiplies its parameters by that product.
    assert said(runs(jaxfp8.quantize(OwnProducts(True, True), ALL))) == []
    held = OwnProductsNnx()
    held.product = jaxfp8.nnx.Fp8Einsum(DELAYED)
    assert said(lambda: jaxfp8.quantize(nnx.List([held]), ALL)) == []
    # what has no product may be said to stay as it is
    for path in ("Conv_0", "Conv_0|Other"):
        assert (
            said(runs(jaxfp8.quantize(OwnProducts(True), [(path, None), *ALL]))) == []
        )
