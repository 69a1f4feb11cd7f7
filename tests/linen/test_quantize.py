"""linen.quantize: the model edited by hand is the reference, and every comparison with it is bitwise."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8.linen import quantize
from jaxfp8.recipes import _rules

from . import probes

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
A, B = (jaxfp8.DelayedScaling(amax_history_len=h) for h in (3, 5))
BATCH, D = 4, 8


def fp8(recipe):
    return None if recipe is None else functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)


class Block(nn.Module):
    """Compact; with attention, whose projections are its own modules. `a` and `m` are the edit by hand."""

    a: object = None
    m: object = None

    @nn.compact
    def __call__(self, x):
        attend = nn.MultiHeadDotProductAttention(
            2, name="attn", qkv_dot_general_cls=fp8(self.a), out_dot_general_cls=fp8(self.a)
        )
        x = x + attend(x)
        return x + nn.DenseGeneral(D, name="mlp", dot_general_cls=fp8(self.m))(x)


class Model(nn.Module):
    """setup; blocks in a list, the first under remat; a layer that comes from outside and runs twice."""

    a: object = None
    m: object = None
    h: object = None
    shared: nn.Module | None = None

    def setup(self):
        self.blocks = [nn.remat(Block)(self.a, self.m), Block(self.a, self.m)]
        self.head = nn.Dense(5, dot_general_cls=fp8(self.h))

    def encode(self, x):
        for block in self.blocks:
            x = self.shared(block(x))
        return x

    def __call__(self, x):
        return self.head(self.encode(x))


def model(a=None, m=None, h=None, shared=None):
    return Model(a, m, h, nn.Dense(D, dot_general_cls=fp8(shared), parent=None))


RULES = [("head", None), (r"blocks_\d/attn/.*", A), (r"blocks_\d/mlp", B), ("shared", A), (".*", B)]


def by_rules():
    return quantize(model(), RULES)


def by_hand():
    return model(A, B, None, A)


def x(seed=0):
    return np.random.default_rng(seed).standard_normal((BATCH, 3, D)).astype(np.float32)


def assert_same(got, wanted, what=""):
    """Trees of the same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted), what
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        oracle.assert_bitwise(np.asarray(a), np.asarray(b), f"{what} {jax.tree_util.keystr(path)}")


def step(module):
    """`variables, x -> (y, gradients)`, jitted; gradients of state are the next state."""

    @jax.jit
    def run(variables, *x):
        def loss(variables):
            y = module.apply(variables, *x)
            return jnp.sum(jnp.sin(y)), y

        (_, y), gradients = jaxfp8.value_and_grad(loss, has_aux=True)(variables)
        return y, gradients

    return run


def compare_training(quantized, hand, *x, steps=2):
    """Variables, and some steps of training, of both: every bit."""
    variables = quantized.init(jax.random.key(0), *x)
    assert_same(variables, hand.init(jax.random.key(0), *x), "init")
    run, run_hand = step(quantized), step(hand)
    for i in range(steps):
        got, wanted = run(variables, *x), run_hand(variables, *x)
        assert_same(got, wanted, f"step {i}")
        _, gradients = got
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients["params"])
        variables = {"params": params} | ({OWG: gradients[OWG]} if OWG in gradients else {})


def compare_programs(quantized, hand, *x):
    """The variables and the training step of both, traced: the same operations."""
    variables = jax.eval_shape(quantized.init, jax.random.key(0), *x)
    wanted = jax.eval_shape(hand.init, jax.random.key(0), *x)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), variables) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), wanted
    )
    programs = (str(jax.make_jaxpr(step(module))(variables, *x)) for module in (quantized, hand))
    got, wanted = (re.sub(r"0x[0-9a-f]+", "0x", program) for program in programs)
    assert got == wanted


def test_trains_as_the_model_edited_by_hand():
    compare_training(by_rules(), by_hand(), x())


def test_is_not_what_it_was_without_rules():
    variables = by_rules().init(jax.random.key(0), x())
    plain = model().apply({"params": variables["params"]}, x())
    assert np.any(np.asarray(by_rules().apply(variables, x())) != np.asarray(plain))


def test_checkpoints_interchange():
    variables = by_hand().init(jax.random.key(3), x())
    assert_same(by_rules().apply(variables, x()), by_hand().apply(variables, x()))


@pytest.mark.parametrize(
    "method",
    [None, "encode", Model.encode, Model.__call__, lambda m, x: m.encode(x), lambda m, x: m.blocks[0](x)],
)
def test_every_way_to_call(method):
    variables = by_hand().init(jax.random.key(0), x())
    got = by_rules().apply(variables, x(), method=method)
    assert_same(got, by_hand().apply(variables, x(), method=method))
    plain = model().apply({"params": variables["params"]}, x(), method=method)
    assert np.any(np.asarray(got) != np.asarray(plain))


def test_the_plain_class_s_method():
    """Layers that a compact method makes, called through the class that knows of no rules."""
    variables = Block(A, B).init(jax.random.key(0), x())
    got = quantize(Block(), [("attn/.*", A), ("mlp", B)]).apply(variables, x(), method=Block.__call__)
    assert_same(got, Block(A, B).apply(variables, x()))


def test_bound_models():
    variables = by_hand().init(jax.random.key(0), x())
    hand = by_hand().bind(variables)
    assert_same(by_rules().bind(variables)(x()), hand(x()))
    assert_same(by_rules().bind(variables).encode(x()), hand.encode(x()))
    assert_same(by_rules().bind(variables).blocks[1](x()), hand.blocks[1](x()))  # before setup has run
    assert_same(by_rules().bind(variables).shared(x()), hand.shared(x()))
    assert_same(nn.apply(Model.encode, by_rules())(variables, x()), hand.encode(x()))
    unbound, _ = by_rules().bind(variables).unbind()
    assert unbound == by_rules()


def test_is_a_module_like_its_model():
    quantized = by_rules()
    assert isinstance(quantized, Model) and type(quantized).__name__ == "Model"
    assert quantized == by_rules() and hash(quantized) == hash(by_rules())
    assert quantized != model() and quantized != quantize(model(), RULES[1:])
    assert quantized.clone(h=A) != quantized and quantized.clone(h=A).h == A
    assert_same(quantized.clone().init(jax.random.key(0), x()), by_hand().init(jax.random.key(0), x()))
    assert "MultiHeadDotProductAttention" in quantized.tabulate(jax.random.key(0), x(), console_kwargs={"width": 300})
    assert repr(quantized) == repr(model())


def test_other_rules_are_traced_anew():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(module, params, x):
        traces.append(module)
        return module.apply({"params": params}, x)

    params = model().init(jax.random.key(0), x())["params"]
    outputs = [np.asarray(apply(m, params, x())) for m in (model(), by_rules(), by_rules(), model())]
    assert len(traces) == 2
    assert np.array_equal(outputs[0], outputs[3]) and np.array_equal(outputs[1], outputs[2])
    assert not np.array_equal(outputs[0], outputs[1])


# ------------------------------------------------------------------------------------------- which rule, and None


def compare_which_rule():
    """First match, as a whole, and None: raises AssertionError at the first difference."""
    compare_programs(quantize(model(), [("head", A), ("head", B), (".*", None)]), model(h=A), x())
    compare_programs(
        quantize(model(), [("mlp", A), ("attn", A), ("blocks_0", A), ("ead", A), ("hea", A)]), model(), x()
    )
    compare_programs(quantize(by_hand(), [(r"blocks_\d/mlp", None)]), model(A, None, None, A), x())


def test_which_rule():
    compare_which_rule()


def test_no_match_leaves_the_code_as_it_is():
    compare_programs(quantize(by_hand(), []), by_hand(), x())


def last_match(rules, paths, op):
    return next((i for i, rule in reversed(list(enumerate(rules))) if rule.matches(paths, op)), None)


def search(self, paths, op):
    del op
    return any(_rules.re.search(self.path, path) for path in paths)


@pytest.mark.parametrize("mutant", ["last match", "search", "None is no rule"])
def test_mutants_are_caught(monkeypatch, mutant):
    from jaxfp8.linen import _quantize

    original = _quantize.decision

    def without_none(module):
        decided = original(module)
        return None if decided is not None and decided.rule.recipe is None else decided

    patch = {
        "last match": (_quantize, "first_match", last_match),
        "search": (_rules.Rule, "matches", search),
        "None is no rule": (_quantize, "decision", without_none),
    }
    monkeypatch.setattr(*patch[mutant])
    with pytest.raises(AssertionError):
        compare_which_rule()


@pytest.mark.slow
def test_none_leaves_existing_state_alone():
    variables = by_hand().init(jax.random.key(0), x())
    _, gradients = step(by_hand())(variables, x())
    variables = variables | {OWG: gradients[OWG]}
    off = quantize(by_hand(), [(".*", None)])
    y, gradients = step(off)(variables, x())
    assert_same(y, model().apply({"params": variables["params"]}, x()))
    assert_same(jaxfp8.update_state(variables[OWG], gradients[OWG]), variables[OWG])
    assert OWG not in off.init(jax.random.key(0), x())


def test_rules_on_rules():
    """The later rules are asked first; a model in a model has its own paths, and the outer rules come first."""
    twice = quantize(quantize(model(), [("head", A), ("shared", A)]), [("head", B)])
    compare_programs(twice, model(h=B, shared=A), x())
    inner = quantize(model(), [("head", A), ("shared", A)])
    outer = quantize(nn.Sequential([inner]), [("layers_0/head", B)])
    compare_programs(outer, nn.Sequential([model(h=B, shared=A)]), x())


# ------------------------------------------------------------------------------------------------- layers


def test_own_layers():
    for layer, rules, wanted in (
        (jaxfp8.linen.Dense(5), [("", A)], jaxfp8.linen.Dense(5, recipe=A)),
        (jaxfp8.linen.GatedMLP(16, recipe=B), [(".*", A)], jaxfp8.linen.GatedMLP(16, recipe=A)),
        (jaxfp8.linen.NormDense(5), [("dense", A)], jaxfp8.linen.NormDense(5, recipe=A)),
        (jaxfp8.linen.Dense(5), [("Fp8DotGeneral_0", A)], jaxfp8.linen.Dense(5, recipe=A)),
    ):
        compare_programs(quantize(layer, rules), wanted, x())


def test_own_layers_in_high_precision():
    mlp = quantize(jaxfp8.linen.GatedMLP(16), [("wi", None)])
    variables = mlp.init(jax.random.key(0), x())
    assert set(variables[OWG]) == {"wo"}
    both = quantize(jaxfp8.linen.GatedMLP(16), [("w[io]", None)])
    assert OWG not in both.init(jax.random.key(0), x())
    wi, wo = (np.float64(variables["params"][name]["kernel"]) for name in ("wi", "wo"))
    hidden = np.einsum("bld,dgh->gblh", np.float64(x()), wi)
    exact = (hidden[0] / (1 + np.exp(-hidden[0])) * hidden[1]) @ wo
    # f32 products of length 8 and 16 and a few roundings; FP8 would be 2**-4 off.
    np.testing.assert_allclose(both.apply(variables, x()), exact, rtol=0, atol=2.0**-16 * np.abs(exact).max())


class EditedEinsum(nn.Module):
    """nn.Einsum with an FP8 product, by hand."""

    bias: bool

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.linear.default_kernel_init, (D, 2, 4))
        bias = self.param("bias", nn.initializers.zeros_init(), (2, 4)) if self.bias else None
        y = jaxfp8.linen.Fp8Einsum(recipe=A)("bld,dhk->blhk", x, kernel)
        return y if bias is None else y + bias[None, None]


@pytest.mark.parametrize("bias", [True, False])
def test_einsum(bias):
    plain = nn.Einsum((D, 2, 4), "bld,dhk->blhk", use_bias=bias)
    compare_training(quantize(plain, [("", A)]), EditedEinsum(bias), x())
    variables = plain.init(jax.random.key(0), x())
    assert_same(quantize(plain, [("", None)]).apply(variables, x()), plain.apply(variables, x()))


class Experts(nn.Module):
    """Products that a module holds itself, by name."""

    up: object = None
    down: object = None

    @nn.compact
    def __call__(self, x):
        up = self.param("up_kernel", nn.initializers.normal(), (D, 16))
        down = self.param("down_kernel", nn.initializers.normal(), (16, D))
        hidden = jaxfp8.linen.Fp8Einsum(recipe=self.up, name="up")("bld,dh->blh", x, up)
        return jaxfp8.linen.Fp8Einsum(recipe=self.down, name="down")("blh,hd->bld", hidden, down)


def test_products_that_modules_hold():
    compare_programs(quantize(Experts(), [("down", B), ("", A)]), Experts(A, B), x())


def scanned(recipe=None, collections=("params", OWG)):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(D, name="dense", dot_general_cls=fp8(recipe))(x), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = dict.fromkeys(collections, 0)
            scan = nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=3)
            return scan(name="blocks")(x, None)[0]

    return Scanned()


def mapped(recipe=None):
    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.vmap(nn.Dense, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True})
            return dense(5, name="heads", dot_general_cls=fp8(recipe))(x)

    return Mapped()


def test_scan_and_vmap():
    compare_training(quantize(scanned(), [("blocks/dense", A)]), scanned(A), x())
    compare_programs(quantize(mapped(), [("heads", A)]), mapped(A), x())
    compare_programs(quantize(nn.remat(nn.Dense)(5), [("", A)]), nn.remat(nn.Dense)(5, dot_general_cls=fp8(A)), x())


def test_scan_without_state():
    """State that nothing carries is an error where it is made, with rules and without; some recipes have none."""
    for model in (quantize(scanned(collections=("params",)), [("blocks/.*", A)]), scanned(A, ("params",))):
        with pytest.raises(ValueError, match=r"^blocks/dense/.*: DelayedScaling keeps state, .*variable_axes"):
            model.init(jax.random.key(0), x())
    current = jaxfp8.Float8CurrentScaling()
    plain = scanned(collections=("params",))
    compare_training(quantize(plain, [(".*", current)]), scanned(current, ("params",)), x())


def test_nn_jit_is_refused():
    jitted = nn.Sequential([nn.jit(Block)(), nn.jit(Block)()])
    jitted.init(jax.random.key(0), x())  # the program that a cache could find
    with pytest.raises(ValueError, match="layers_0/attn/query is inside nn.jit"):
        quantize(jitted, [("layers_1/.*", A)]).init(jax.random.key(0), x())


class OldLayer(nn.Module, kw_only=True):
    """Any module with a field `dot_general_cls` is a layer."""

    width: int = 5
    dot_general_cls: object = None

    def setup(self):
        self.product = self.dot_general_cls() if self.dot_general_cls else jax.lax.dot_general
        self.kernel = self.param("kernel", nn.initializers.normal(), (D, self.width))

    def __call__(self, x):
        return self.product(x, self.kernel, (((x.ndim - 1,), (0,)), ((), ())))


def test_layers_by_their_field():
    compare_programs(quantize(OldLayer(), [("", A)]), OldLayer(dot_general_cls=fp8(A)), x())


def test_state_of_training_is_the_oracles():
    """Against numpy, not against another model: the probe's Dense gets its recipe from a rule."""

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, total, use):
            dense = nn.Dense(probes.N, use_bias=False, name="dense")
            for i in range(probes.USES):
                total = total + jnp.vdot(dense(use[0][i]), use[1][i])
            return total, None

    probes.train(quantize(Plain(), [("dense", probes.RECIPE)]), None)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (Model, TypeError, "linen.quantize: model: expected an instance"),
        (3, TypeError, "linen.quantize: model: expected an instance"),
    ],
)
def test_errors(bad, error, message):
    with pytest.raises(error, match=message):
        quantize(bad, RULES)


def test_bound_model_is_an_error():
    with pytest.raises(ValueError, match="linen.quantize: model: expected an unbound module"):
        quantize(model().bind(model().init(jax.random.key(0), x())), RULES)
