"""Rules that make named layers a GatedMLP: the numbers and the products of GatedMLP,
under the user's names, in any transform; errors where a module is another function.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import KEY, normal
from equality import assert_same_bits as assert_same
from flax.traverse_util import flatten_dict
from parametrize import each_row
from programs.cases import sgd
from programs.linen import STACKED, Stack

import jaxfp8
from jaxfp8.linen import GatedMLP, NormDense, quantize
from jaxfp8.ops import ClampedSwiGLU
from jaxfp8.recipes import checked_rules

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
DELAYED = jaxfp8.DelayedScaling(amax_history_len=3)
D, HIDDEN = 6, 8
X = normal(4, 5, D)
CLAMPED = ClampedSwiGLU(limit=7.0, alpha=1.702, offset=1.0)


def clamped_swiglu(gate, up):
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * nn.sigmoid(1.702 * gate) * (up + 1.0)


ACTIVATIONS = {
    "silu": lambda gate, up: nn.silu(gate) * up,
    "gelu": lambda gate, up: up * nn.gelu(gate),
    CLAMPED: clamped_swiglu,
}


class MLP(nn.Module):
    """Three layers, and what a user may have around them."""

    function: object = ACTIVATIONS["silu"]
    use_bias: bool = False
    dtype: object = jnp.bfloat16
    up: object = nn.Dense
    up_bias: bool | None = None

    def setup(self):
        options = {"use_bias": self.use_bias, "dtype": self.dtype}
        self.gate_proj = nn.Dense(HIDDEN, **options)
        up_bias = self.use_bias if self.up_bias is None else self.up_bias
        self.up_proj = self.up(HIDDEN, **options | {"use_bias": up_bias})
        self.down_proj = nn.Dense(D, **options)
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x, deterministic=True):
        hidden = self.function(self.gate_proj(x), self.up_proj(x))
        self.sow("intermediates", "hidden", hidden)
        return x.astype(self.dtype) + self.dropout(
            self.down_proj(hidden), deterministic
        )


class Decorated(nn.Module):
    """The same in a transform by a decorator; its layers are in one method."""

    @nn.remat
    @nn.compact
    def __call__(self, x):
        gate, up = (
            nn.Dense(HIDDEN, False, jnp.bfloat16, name=f"{name}_proj")(x)
            for name in ("gate", "up")
        )
        hidden = jax.ad_checkpoint.checkpoint_name(nn.silu(gate) * up, "hidden")
        y = nn.Dense(D, False, jnp.bfloat16, name="down_proj")(hidden)
        return x.astype(y.dtype) + y


class Own(nn.Module):
    """What an MLP with the rule has to be."""

    options: tuple

    @nn.compact
    def __call__(self, x):
        y = GatedMLP(HIDDEN, **dict(self.options), name="mlp")(x)
        return x.astype(y.dtype) + y


class Model(nn.Module):
    mlp: nn.Module

    def __call__(self, x):
        return self.mlp(x)


FORMS = {
    "module": lambda: Model(MLP()),
    "decorated": lambda: Model(Decorated()),
    "remat": lambda: Model(nn.remat(MLP)()),
    "jit": lambda: Model(nn.jit(Decorated)()),
    "scan and remat": lambda: Stack(nn.remat(MLP)),
    "vmap": lambda: Model(nn.vmap(MLP, **STACKED)()),
}


def named(**options):
    return GatedMLP.of(gate="gate_proj", up="up_proj", down="down_proj", **options)


def with_rule(model, **options):
    """The model with the rule; its MLP is the model, or in it."""
    return quantize(model, [(".*", named(**{"recipe": DELAYED} | options))])


def as_own(variables):
    """The variables of a Model as those of Own."""
    found = {}
    for collection, tree in variables.items():
        tree = tree["mlp"]
        wi = tree["gate_proj"]
        if collection == "params":
            axes = {"kernel": 1, "bias": 0}
            wi = {
                name: jnp.stack([leaf, tree["up_proj"][name]], axes[name])
                for name, leaf in wi.items()
            }
        found[collection] = {"mlp": {"wi": wi, "wo": tree["down_proj"]}}
    return found


def step(model, variables):
    """The gradient, and y."""

    def loss(variables):
        y = model.apply(variables, X)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    return jax.jit(jaxfp8.grad(loss, has_aux=True))(variables)


CASES = {
    "delayed": {},
    "bias, gelu": {"activation": "gelu", "use_bias": True},
    "clamped, float32, without state": {
        "activation": CLAMPED,
        "dtype": jnp.float32,
        "recipe": jaxfp8.Float8CurrentScaling(),
    },
}


@each_row("options", CASES)
def test_numbers_are_those_of_gated_mlp(options):
    """Over two steps; the state is that of GatedMLP, under both layers."""
    options = {
        "activation": "silu",
        "use_bias": False,
        "dtype": jnp.bfloat16,
        "recipe": DELAYED,
    } | options
    rule = {name: options[name] for name in ("activation", "recipe")}
    mlp = MLP(ACTIVATIONS[options["activation"]], options["use_bias"], options["dtype"])
    model, own = with_rule(Model(mlp), **rule), Own(tuple(options.items()))
    apart = quantize(Model(mlp), [(".*_proj", options["recipe"])])
    variables = model.init(KEY, X)
    assert_same(variables, apart.init(KEY, X))
    for _ in range(2):
        grads, y = step(model, variables)
        assert_same((as_own(grads), y), step(own, as_own(variables)))
        if OWG in grads:
            state = grads[OWG]["mlp"]
            assert_same(state["up_proj"], state["gate_proj"])
        params = sgd(variables["params"], grads["params"], 0.01)
        variables = jaxfp8.update_state(variables | {"params": params}, grads)


@each_row("make", FORMS)
def test_any_transform(make):
    """Every state moves; gate and up, whose kernels differ, record one amax of both."""
    model = with_rule(make())
    variables = model.init(KEY, X)
    state = flatten_dict(step(model, variables)[0][OWG])
    for path, leaf in state.items():
        assert np.all(np.max(leaf, axis=-1) > 0), path
        if "up_proj" in path:
            gate = tuple(name.replace("up_proj", "gate_proj") for name in path)
            assert_same(leaf, state[gate])


def test_inner_values_are_those_of_the_layers():
    """What modules tell of them."""
    model = with_rule(Model(MLP(dtype=jnp.float32)))
    variables = model.init(KEY, X)
    _, told = model.apply(variables, X, capture_intermediates=True)
    told = told["intermediates"]["mlp"]
    (hidden,), gate, up = (
        told["hidden"],
        *(told[f"{name}_proj"]["__call__"][0] for name in ("gate", "up")),
    )
    assert_same(hidden, ACTIVATIONS["silu"](gate, up))
    for name, value in {"gate_proj": gate, "up_proj": up}.items():
        exact = X @ variables["params"]["mlp"][name]["kernel"]
        assert np.max(np.abs(value - exact)) < 0.1 * np.max(np.abs(exact))


def test_inference():
    """Frozen layers run apart, with the same codes; so do layers without state, which
    take the scales at hand.
    """
    model = with_rule(Model(MLP(dtype=jnp.float32)))
    variables = model.init(KEY, X)
    variables = jaxfp8.update_state(variables, step(model, variables)[0])
    y = model.apply(variables, X)
    frozen = jaxfp8.freeze(model, variables, X)
    assert frozen["params"]["mlp"]["up_proj"]["Fp8DotGeneral_0"]["kernel"].shape
    # the activation in float32 either way; a code of hidden may differ by one
    y_frozen = model.apply(frozen, X)
    assert np.mean(np.abs(y_frozen - y)) < 2.0**-8 * np.mean(np.abs(y - X))
    without = {"params": variables["params"]}
    own = Own((("recipe", DELAYED),))
    assert_same(model.apply(without, X), own.apply(as_own(without), X))


def two_inputs(mlp, x):
    return mlp.down_proj(nn.silu(mlp.gate_proj(x)) * mlp.up_proj(x + 1))


def without_up(mlp, x):
    return mlp.down_proj(nn.silu(mlp.gate_proj(x)))


def with_dropout(mlp, x):
    hidden = nn.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    return mlp.down_proj(mlp.dropout(hidden, deterministic=False))


def with_softmax(mlp, x):
    return mlp.down_proj(nn.softmax(mlp.gate_proj(x)) * mlp.up_proj(x))


def of_method(forward):
    forward.__name__ = "__call__"
    return type("Other", (MLP,), {"__call__": forward, "__annotations__": {}})


def function(function):
    return MLP(lambda gate, up: function(gate, up))


silu = nn.silu
MISTAKES = {
    "activation": (function(lambda g, u: nn.relu(g) * u), "'silu' of gate_proj times"),
    "slightly": (function(lambda g, u: 1.001 * silu(g) * u), "got .* for gate .* not "),
    "swapped": (function(lambda g, u: g * silu(u)), "got .* for gate .* and up"),
    "offset": (function(lambda g, u: silu(g) * u + 0.1), "got 0.1 for gate"),
    "bias": (MLP(up_bias=True), "gate_proj, up_proj to have all a bias, or none"),
    "class": (MLP(up=NormDense), "no kernel of 'up_proj'|up_proj to be a .*NormDense"),
    "x": (of_method(two_inputs)(), "all with the same x, .* call of up_proj"),
    "calls": (of_method(without_up)(), "no kernel of 'up_proj'|a call of each of"),
    "softmax": (of_method(with_softmax)(), "not of each element|reads another value"),
    "dropout": (of_method(with_dropout)(), "not of each element|reads another value"),
}


@each_row(("mlp", "message"), MISTAKES)
def test_another_function_is_refused(mlp, message):
    """Where a step is traced; the message names the module."""
    model, rngs = with_rule(Model(mlp)), {"params": KEY, "dropout": KEY}
    apart = quantize(Model(mlp), [("mlp/.*", DELAYED)])
    variables = jax.eval_shape(apart.init, rngs, X)
    apply = functools.partial(model.apply, rngs=rngs)
    with pytest.raises(ValueError, match=f"mlp: as a GatedMLP: expected .*{message}"):
        jax.eval_shape(apply, variables, X)


def test_activations_in_the_dtype_of_the_module():
    """A cast in the module rounds its constants too; exact GELU is another function."""
    cast = function(lambda g, u: nn.gelu(g.astype(jnp.bfloat16)) * u)
    model = with_rule(Model(cast), activation="gelu")
    variables = model.init(KEY, X)
    model.apply(variables, X)
    exact = function(lambda g, u: nn.gelu(g, approximate=False) * u)
    with pytest.raises(ValueError, match="'gelu' of gate_proj"):
        with_rule(Model(exact), activation="gelu").apply(variables, X)


def test_a_rule_is_for_its_layers_alone():
    (rule,) = checked_rules("quantize", [(".*mlp", named())])
    assert rule.matches(["block/mlp/up_proj"])
    for path in ("block/mlp", "block/mlp/router", "block/up_proj", "up_proj"):
        assert not rule.matches([path])


def test_rules_that_do_not_fit():
    off = (".*/down_proj", None)  # another rule decides: each layer runs apart
    model = quantize(Model(MLP()), [off, ("mlp", named(recipe=DELAYED))])
    apart = quantize(Model(MLP()), [off, ("mlp/.*", DELAYED)])
    variables = apart.init(KEY, X)
    assert_same(model.apply(variables, X), apart.apply(variables, X))
    with pytest.raises(ValueError, match=r"two or more, got \('a', 'b', 'a'\)"):
        GatedMLP.of(gate="a", up="b", down="a")
    with pytest.raises(ValueError, match='GatedMLP.of: activation: expected "silu"'):
        named(activation="relu")
    with pytest.raises(TypeError, match="GatedMLP.of: recipe: "):
        named(recipe="delayed")
