"""report: what it says of each layer is what runs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.nnx
from jaxfp8 import linen

A = jaxfp8.DelayedScaling(amax_history_len=3)
CURRENT = jaxfp8.Float8CurrentScaling()
X = jax.ShapeDtypeStruct((2, 6, 8), jnp.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, *, train=False):
        if train:
            x = nn.Conv(8, (3,), name="conv")(x)
        x = nn.MultiHeadDotProductAttention(2, name="attn")(
            nn.LayerNorm(name="norm")(x)
        )
        x = nn.Einsum((8, 8), "bld,df->blf", name="mix")(linen.Dense(8, name="own")(x))
        x = nn.Dense(8, name="code", dot_general_cls=jaxfp8.Fp8DotGeneral)(x)
        return nn.Embed(4, 8, name="embed").attend(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(8, 8, 3, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.mix = nnx.Einsum("bld,df->blf", (8, 8), rngs=rngs)
        self.own = jaxfp8.nnx.Linear(8, 8, rngs=rngs)
        self.code = nnx.Linear(8, 8, dot_general=jaxfp8.nnx.Fp8DotGeneral(), rngs=rngs)
        self.embed = nnx.Embed(4, 8, rngs=rngs)


SCORES = (
    "skipped: attention scores have no FP8 product; its query, key, value and out are "
    "layers (rule 2 'mix|attn|"
)
RULES = [("attn/(query|key)", A), ("own", None), ("mix|attn|conv|embed|norm", CURRENT)]


def by_layer(report):
    return {row["layer"]: row for row in report.rows}


def expect(rows, wanted):
    """`wanted`: layer -> (kind, kernel, recipe, the beginning of why)."""
    assert set(rows) == set(wanted)
    for layer, (kind, kernel, recipe, why) in wanted.items():
        row = rows[layer]
        assert (row["kind"], row["kernel"], row["recipe"]) == (kind, kernel, recipe), (
            row
        )
        assert row["why"].startswith(why), row


def wanted(attention, general, dense, einsum):
    return {
        "attn": (attention, None, None, SCORES),
        "attn/query": (general, (8, 2, 4), A, "rule 0 'attn/(query|key)'"),
        "attn/key": (general, (8, 2, 4), A, "rule 0"),
        "attn/value": (general, (8, 2, 4), None, "no rule"),
        "attn/out": (general, (2, 4, 8), None, "no rule"),
        "conv": ("Conv", (3, 8, 8), None, "skipped: convolutions"),
        "mix": (einsum, (8, 8), CURRENT, "rule 2"),
        "own": (dense, (8, 8), None, "rule 1 'own'"),
        "code": (
            dense if dense == "Linear" else "Dense",
            (8, 8),
            jaxfp8.DelayedScaling(),
            "default",
        ),
        "embed": ("Embed", (4, 8), None, "skipped: an embedding"),
    }  # fmt: skip


def test_linen(capsys):
    report = jaxfp8.report(linen.quantize(Linen(), RULES), X, train=True)
    rows = by_layer(report)
    expect(
        rows, wanted("MultiHeadDotProductAttention", "DenseGeneral", "Dense", "Einsum")
    )
    assert rows["attn/out"]["input"] == (2, 6, 2, 4)
    assert rows["mix"]["input"] == (
        2,
        6,
        8,
    )
    assert report.unused == []
    assert not capsys.readouterr().out and repr(report) == str(report)
    line = next(
        line for line in str(report).splitlines() if line.startswith("attn/key")
    )
    assert line.split() == [
        "attn/key",
        "DenseGeneral",
        "2x6x8",
        "8x2x4",
        "DelayedScaling(amax_history_len=3)",
    ] + ["rule", "0", "'attn/(query|key)'"]


def test_nnx_layers_that_are_not_called():
    """A published model reads `qkv.kernel` by itself: with arguments the row says so,
    and has the shapes of inputs.
    """

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.qkv, self.out, self.plain = (
                nnx.Linear(8, 8, rngs=rngs) for _ in range(3)
            )
            self.mix = nnx.Einsum("md,df->mf", (8, 8), rngs=rngs)

        def __call__(self, x):
            return self.mix(self.out(x @ self.qkv.kernel[...]))

    model = jaxfp8.quantize(Model(nnx.Rngs(0)), [("qkv|out|mix", A)])
    before = nnx.split(model)[0]
    for x in (jnp.ones((4, 8)), jax.ShapeDtypeStruct((4, 8), jnp.float32)):
        rows = by_layer(jaxfp8.report(model, x))
        assert {name: row["input"] for name, row in rows.items()} == {
            "qkv": None,
            "out": (4, 8),
            "mix": (4, 8),
            "plain": None,
        }
        assert [
            name for name, row in rows.items() if row["why"].endswith("; not called")
        ] == ["qkv"]
    assert nnx.split(model)[0] == before, "the model is read, not changed"
    assert "not called" not in str(jaxfp8.report(model))


@pytest.mark.parametrize(
    "block, rules",
    [
        (nn.Dense, []),
        (nn.remat(nn.Dense), []),
        (nn.Dense, [("qkv|out.*", A)]),
        (nn.jit(nn.Dense), [("qkv|out.*", A)]),
    ],
    ids=["code", "remat", "rules", "jit"],
)
def test_linen_layers_that_init_alone_calls(block, rules):
    """A model that makes parameters by a layer, and reads them by itself; blocks that
    nn.jit runs as one program, which Flax has in the second report.
    """

    class Model(nn.Module):
        def setup(self):
            self.qkv, self.out = (
                block(8, dot_general_cls=jaxfp8.Fp8DotGeneral) for _ in range(2)
            )

        def __call__(self, x, scale, *, train=False):
            if self.is_initializing():
                self.qkv(x)
            x = self.out(x @ self.qkv.variables["params"]["kernel"])
            return x * scale if train else x

    model = linen.quantize(Model(), rules) if rules else Model()
    rows, again = (
        by_layer(jaxfp8.report(model, jnp.ones((4, 8)), 2.0, train=True))
        for _ in range(2)
    )
    assert set(rows) == {"qkv", "out"} and again == rows
    assert all(row["recipe"] for row in rows.values())
    assert rows["qkv"]["why"].endswith("; not called")
    assert not rows["out"]["why"].endswith("; not called")


def test_a_model_whose_apply_takes_other_arguments():
    attention = nn.MultiHeadDotProductAttention(
        2, decode=True, qkv_dot_general_cls=jaxfp8.Fp8DotGeneral
    )
    rows = by_layer(jaxfp8.report(attention, jnp.ones((1, 4, 8))))
    assert rows["query"]["why"] == "default"


def test_nnx():
    model = Nnx(nnx.Rngs(0))
    model.attn.cached_key = nnx.Cache(jnp.zeros((2, 6, 2, 4)))  # no parameter
    rows = by_layer(jaxfp8.report(jaxfp8.nnx.quantize(model, RULES)))
    expect(rows, wanted("MultiHeadAttention", "LinearGeneral", "Linear", "Einsum"))


def test_models_without_rules():
    rows = by_layer(jaxfp8.report(Linen(), X))
    assert {layer: row["recipe"] for layer, row in rows.items() if row["recipe"]} == {
        "own": jaxfp8.DelayedScaling(),
        "code": jaxfp8.DelayedScaling(),
    }
    assert "conv" not in rows and "embed" not in rows
    for cls, recipe, why in (
        (jaxfp8.make_dot_general_cls(A), A, "own recipe"),
        (nn.Fp8DotGeneral, None, "own Fp8DirectDotGeneralOp"),
    ):
        (row,) = jaxfp8.report(nn.Dense(3, dot_general_cls=cls), X).rows
        assert row["recipe"] == recipe and row["why"].startswith(why)
    nnx_rows = by_layer(jaxfp8.report(Nnx(nnx.Rngs(0))))
    assert nnx_rows["code"]["why"] == "default" and nnx_rows["mix"]["why"] == "no rule"


def test_autocast():
    for model, args in both(RULES):
        with jaxfp8.autocast(CURRENT):
            rows = by_layer(jaxfp8.report(model, *args))
        assert (rows["code"]["recipe"], rows["code"]["why"]) == (CURRENT, "autocast")
        assert rows["attn/key"]["recipe"] == A and rows["own"]["recipe"] is None
        with jaxfp8.autocast(enabled=False):
            rows = by_layer(jaxfp8.report(model, *args))
        for layer in ("code", "mix", "attn/key"):
            row = rows[layer]
            assert (row["recipe"], row["why"]) == (None, "autocast is off")


def test_a_product_that_was_made_where_fp8_is_off():
    with jaxfp8.autocast(enabled=False):
        model = Nnx(nnx.Rngs(0))
    row = by_layer(jaxfp8.report(model))["code"]
    assert (row["recipe"], row["why"]) == (None, "default")


def test_a_product_that_two_layers_share():
    product = jaxfp8.nnx.Fp8DotGeneral(A)
    layers = nnx.List(
        [nnx.Linear(8, 8, dot_general=product, rngs=nnx.Rngs(0)) for _ in range(2)]
    )
    assert ["shares" in row["why"] for row in jaxfp8.report(layers).rows] == [
        False,
        True,
    ]


def both(rules):
    """The models with these rules, and what a report of each takes."""
    yield linen.quantize(Linen(), rules), [X]
    yield jaxfp8.nnx.quantize(Nnx(nnx.Rngs(0)), rules), []


def test_unused_rules():
    rules = [("own", A), ("own", None), ("nothing", A)]
    for model, args in both(rules):
        with pytest.warns(
            UserWarning,
            match="rules that decide nothing: rule 1 'own'; rule 2 'nothing'",
        ):
            report = jaxfp8.report(model, *args)
        assert report.unused == ["rule 1 'own'", "rule 2 'nothing'"]
        assert str(report).endswith("unused: rule 1 'own'\nunused: rule 2 'nothing'")
        with pytest.raises(ValueError, match="decide nothing.*rule 2 'nothing'"):
            jaxfp8.report(model, *args, strict=True)
