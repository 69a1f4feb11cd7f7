"""FP8 that is asked for and reaches no product: one FP8StateWarning, and none where there is nothing to say."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8.recipes import _warning

CURRENT, DELAYED = jaxfp8.Float8CurrentScaling(), jaxfp8.DelayedScaling(amax_history_len=3)
ALL = [(".*", DELAYED)]
X = jnp.ones((4, 8))


def said(function) -> list[str]:
    """Return the texts of the FP8StateWarnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    assert all(w.filename == __file__ for w in found), "a warning points at the line of the user"
    return [str(w.message) for w in found if w.category is jaxfp8.FP8StateWarning]


class OwnProduct(nn.Module):
    """A layer that calls lax.dot_general itself, as those of FlaxGPT2 do."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        return jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())))


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


@pytest.fixture(autouse=True)
def _recipes_that_reached_no_layer(monkeypatch):
    monkeypatch.setattr(_warning, "_reached", set())


def in_region(function, *args, **kwargs):
    def run():
        with jaxfp8.autocast(*args, **kwargs):
            return function()

    return run


PARAMS = OwnProduct().init(jax.random.key(0), X)
FP8 = nn.Dense(8, use_bias=False, dot_general_cls=jaxfp8.Fp8DotGeneral)


def plain():
    return OwnProduct().apply(PARAMS, X)


def test_a_region_without_fp8():
    step = jax.jit(lambda params: OwnProduct().apply(params, X + 1))
    (text,) = said(in_region(lambda: step(PARAMS)))
    assert text.startswith("autocast: no product in this region is in FP8")
    assert said(in_region(lambda: step(PARAMS))) == []  # compiled: nothing is traced
    assert len(said(in_region(plain, CURRENT))) == 1
    assert len(said(in_region(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))(X), CURRENT))) == 1


def raises():
    plain()
    raise KeyError


def test_regions_that_say_nothing():
    def trains():
        FP8.init(jax.random.key(0), X)

    def own_recipe():
        dimension_numbers = (((1,), (0,)), ((), ()))
        return plain(), jaxfp8.dot_general(X, jnp.ones((8, 8)), dimension_numbers, recipe=CURRENT)

    def builds():
        return plain(), jaxfp8.nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def nested():
        return plain(), in_region(own_recipe, DELAYED)()

    assert said(plain) == said(in_region(plain, enabled=False)) == []
    assert said(in_region(plain, jaxfp8.HighPrecision())) == []
    assert said(in_region(in_region(plain, enabled=False), CURRENT)) == []
    assert said(in_region(lambda: jnp.sum(X), CURRENT)) == []
    for function in (own_recipe, builds, nested, trains):
        _warning._reached.clear()
        assert said(in_region(function, CURRENT)) == [], function
    assert said(in_region(plain, CURRENT)) == []  # as beside a call of a compiled function with layers
    with pytest.raises(KeyError):
        assert said(in_region(raises, jaxfp8.MXFP8BlockScaling())) == []


RAW = {"w": jnp.eye(8)}
GRADIENTS = {
    "dot_general": lambda p: jnp.sum(jax.lax.dot_general(X, p["w"], (((1,), (0,)), ((), ())))),
    "matmul": lambda p: jnp.sum(X @ p["w"]),  # a jitted function of JAX, whose trace is kept
    "vmap": lambda p: jnp.sum(jax.vmap(lambda x: x @ p["w"])(X)),
    "scan": lambda p: jax.lax.scan(_scanned, X, jnp.stack([p["w"]] * 2))[0].sum(),
    "checkpoint": lambda p: jnp.sum(jax.checkpoint(jnp.matmul)(X, p["w"])),
}


def _scanned(x, w):
    return x @ w, None


def _fp8(params, x):
    return jnp.sum(FP8.apply(params, x))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("loss", GRADIENTS)
def test_a_second_model_without_fp8(loss, jit):
    """Its recipe has reached layers before, and JAX may know its functions: a gradient tells a model from a metric."""
    variables = FP8.init(jax.random.key(0), X)
    assert said(in_region(lambda: jax.grad(_fp8)(variables, X), CURRENT)) == []
    for _ in range(2):
        step = jit(jax.grad(lambda p: GRADIENTS[loss](p)))
        (text,) = said(in_region(lambda step=step: step(RAW), CURRENT))
        assert text.startswith("autocast: no product in this region is in FP8") and "enabled=False" in text


def test_beside_a_model_with_fp8():
    """Programs with products of their own, in regions of a recipe that has reached the model before."""
    variables, kernel = FP8.init(jax.random.key(0), X), jnp.eye(8)
    blocks = {"jit": jax.jit(_fp8), "checkpoint": jax.checkpoint(_fp8)}

    def scanned(variables, x):
        return jax.lax.scan(_step, variables, x[None])[1].sum()

    def train(block):
        return jax.grad(lambda kernel, variables: block(variables, X @ kernel), argnums=(0, 1))(kernel, variables)

    def evaluate():
        return FP8.apply(variables, X) @ kernel

    def orthogonalize():  # an optimizer with products, as muon
        return kernel @ kernel.T @ kernel

    for block in (*blocks.values(), scanned):
        for _ in range(3):  # JAX has kept the trace of the block, and the layer in it is not heard again
            assert said(in_region(lambda block=block: train(block), CURRENT)) == []
            assert said(in_region(lambda block=block: jax.jit(lambda: train(block))(), CURRENT)) == []
    for function in (evaluate, orthogonalize, jax.jit(evaluate), jax.jit(orthogonalize)):
        assert said(in_region(function, CURRENT)) == []
    generate = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x @ kernel, x))
    assert said(in_region(lambda: generate(X), CURRENT)) == []


def _step(variables, x):
    return variables, _fp8(variables, x)


def test_rules_that_match_nothing():
    """Linen says so where the model runs."""
    variables = Model().init(jax.random.key(0), X)
    for path in ("Dense", "body"):
        model = jaxfp8.quantize(Model(), [(path, DELAYED), ("other", None)])
        (text,) = said(lambda model=model: jax.eval_shape(model.apply, variables, X))
        assert f"none of ['{path}'] gives a layer of Model FP8" in text and "'body/Dense_0', 'head'" in text
    cell = nn.OptimizedLSTMCell(8)  # it multiplies arrays itself
    rnn = jaxfp8.quantize(nn.RNN(cell), [(".*", DELAYED)])
    (text,) = said(lambda: jax.eval_shape(rnn.init, jax.random.key(0), X[None]))
    assert "The layers that ran are none" in text
    linear = lambda: nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))  # noqa: E731
    (text,) = said(lambda: jaxfp8.quantize(linear(), [("Linear", DELAYED)]))
    assert "none of ['Linear'] gives a layer of Sequential FP8" in text and "'layers/0'" in text
    assert said(lambda: jaxfp8.quantize(linear(), [("layers/0", DELAYED)])) == []
    assert said(lambda: jaxfp8.quantize(linear(), [(".*", None)])) == []


@pytest.mark.parametrize("block", [Block, nn.jit(Block)], ids=["plain", "nn.jit"])
def test_rules_that_say_nothing(block):
    """A method that runs a part of the model; a block that nn.jit has kept, which runs unseen; a submodule."""
    variables = Model(block).init(jax.random.key(0), X)
    model = jaxfp8.quantize(Model(block), [("body/.*", DELAYED), ("head", None)])
    assert said(lambda: model.apply(variables, X, method="decode")) == []
    for _ in range(2):
        assert said(lambda: model.init(jax.random.key(0), X)) == []
    assert said(lambda: model.bind(variables).head(X)) == []
    off = jaxfp8.quantize(Model(block), [(".*", None)])
    assert said(lambda: off.apply(variables, X)) == []


@pytest.mark.parametrize("quantize", [jaxfp8.quantize, jaxfp8.linen.quantize], ids=["quantize", "linen.quantize"])
def test_a_quantized_model_that_is_thrown_away(quantize):
    rules = [("head", DELAYED)]

    def dropped():
        quantize(Model(), rules)

    def kept():
        model = quantize(Model(), rules)
        return model, quantize(model, rules), [quantize(Model(), rules)]

    (text,) = said(dropped)
    assert "the quantized model was thrown away" in text
    assert said(kept) == said(lambda: quantize(Model(), rules)) == []


def test_one_rule_of_a_list_matches_nothing():
    """The rule is named once: in Linen where the whole model's variables are, in NNX by quantize."""
    variables = Model().init(jax.random.key(0), X)
    model = jaxfp8.quantize(Model(), [("heda", None), ("body", DELAYED), ("head|body/.*", DELAYED)])
    assert said(lambda: model.init(jax.random.key(0), X)) == []
    (text,) = said(lambda: model.apply(variables, X, method="decode"))
    assert "no layer of Model matches 'heda': a regex" in text and "'head'" in text and "'body/Dense_0'" in text
    assert said(lambda: model.apply(variables, X)) == []
    (text,) = said(lambda: jaxfp8.quantize(nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), [("a", None), *ALL]))
    assert "no layer of Sequential matches 'a': a regex" in text and "'layers/0'" in text
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
    conv, norm, out = nnx.Conv(8, 8, (3,), rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
    model = nnx.Dict(embed=nnx.Embed(16, 8, rngs=rngs), block=nnx.Dict(conv=conv, norm=norm, out=out))
    rules = [*((path, None) for path in paths), *ALL]
    texts = said(lambda: jaxfp8.quantize(model, rules))
    assert len(texts) == bool(idle) and all(
        f"no layer of Dict matches {', '.join(map(repr, idle))}:" in text for text in texts
    )
    assert isinstance(out.dot_general, jaxfp8.nnx.Fp8DotGeneral)


@pytest.mark.parametrize("block", [Block, nn.jit(Block), nn.remat(Block)], ids=["plain", "nn.jit", "nn.remat"])
def test_lists_whose_rules_all_match_something(block):
    """A rule that an earlier one shadows, a product by the path of its holder, and an einsum."""

    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jaxfp8.linen.Dense(8, recipe=CURRENT, name="ours")(Model(block, name="model")(x))
            return nn.Einsum((8, 8), "bi,io->bo", name="mix")(x)

    rules = [("ours", DELAYED), ("model/body/Dense_0", DELAYED), ("mix", DELAYED), *ALL, ("model/head", None)]
    model = jaxfp8.quantize(Mixed(), rules)
    variables = model.init(jax.random.key(0), X)
    assert said(lambda: [model.apply(variables, X) for _ in range(2)]) == []
    assert said(lambda: jax.jit(jaxfp8.quantize(Mixed(), rules).apply)(variables, X)) == []
