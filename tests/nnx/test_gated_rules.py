"""Rules that make the named layers of an NNX module a GatedMLP: the numbers of
GatedMLP under the user's names, in place, copied and stacked.
"""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import normal
from equality import assert_same_bits as assert_same
from flax import nnx

import jaxfp8
from jaxfp8.nnx import GatedMLP, quantize

RECIPE = jaxfp8.DelayedScaling(amax_history_len=3)
D, HIDDEN = 6, 8
X = normal(4, D)


class MLP(nnx.Module):
    """Three layers, a dropout behind them, and a count of calls."""

    def __init__(self, rngs, activation="silu"):
        def linear(k, n):
            return nnx.Linear(k, n, dtype=jnp.bfloat16, rngs=rngs)

        self.gate_proj, self.up_proj = linear(D, HIDDEN), linear(D, HIDDEN)
        self.down_proj = linear(HIDDEN, D)
        self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)
        self.activation, self.calls = activation, nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        gate, up = self.gate_proj(x), self.up_proj(x)
        hidden = getattr(nnx, self.activation)(gate) * up
        return self.dropout(self.down_proj(hidden))


class Model(nnx.Module):
    def __init__(self, rngs, make=MLP):
        self.blocks = nnx.List([make(rngs)])
        self.mlp = make(rngs)

    def __call__(self, x):
        x = x.astype(jnp.bfloat16)
        for block in self.blocks:
            x += block(x)
        return x + self.mlp(x)


class Stack(nnx.Module):
    """A scan over stacked models."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(lambda rngs: Model(rngs))(rngs.split(2))

    def __call__(self, x):
        step = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return step(x.astype(jnp.bfloat16), self.layers)


def rule(**options):
    options = {"gate": "gate_proj", "up": "up_proj", "recipe": RECIPE} | options
    return r"(.*/)?(mlp|blocks/\d)", GatedMLP.of(down="down_proj", **options)


def own(model):
    """The model of GatedMLP with the parameters of `model`."""

    def make(rngs):
        return GatedMLP(
            D, HIDDEN, recipe=RECIPE, use_bias=True, dtype=jnp.bfloat16, rngs=rngs
        )

    result = Model(nnx.Rngs(1), make)
    for new, mlp in zip(mlps(result), mlps(model), strict=True):
        for axis, name in (1, "kernel"), (0, "bias"):
            pair = [getattr(mlp.gate_proj, name)[...], getattr(mlp.up_proj, name)[...]]
            getattr(new.wi, name)[...] = jnp.stack(pair, axis)
            getattr(new.wo, name)[...] = getattr(mlp.down_proj, name)[...]
    return result


def mlps(model):
    return [*model.blocks, model.mlp]


def loss(model):
    return jnp.sum(jnp.sin(model(X).astype(jnp.float32)))


@nnx.jit
def step(model, optimizer):
    value, gradients = jaxfp8.nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def states(linear):
    return nnx.to_pure_dict(nnx.state(linear, jaxfp8.nnx.OverwriteWithGradient))


def test_numbers_are_those_of_gated_mlp():
    """Over two steps; the module's own code runs once a step, and the report names the
    rule.
    """
    model = Model(nnx.Rngs(0))
    before = set(nnx.to_flat_state(nnx.state(model, nnx.Param)).paths)
    quantize(model, [rule()])
    assert before == set(nnx.to_flat_state(nnx.state(model, nnx.Param)).paths)
    fused = own(model)
    optimizers = [
        jaxfp8.nnx.Optimizer(each, optax.sgd(0.01)) for each in (model, fused)
    ]
    for _ in range(2):
        losses = [step(*each) for each in zip((model, fused), optimizers, strict=True)]
        assert_same(*losses)
        for mlp, right in zip(mlps(model), mlps(fused), strict=True):
            assert_same(mlp.up_proj.kernel[...], right.wi.kernel[:, 1])
            assert_same(states(mlp.gate_proj), states(right.wi))
            assert_same(states(mlp.up_proj), states(right.wi))
            assert_same(states(mlp.down_proj), states(right.wo))
    assert model.mlp.calls[...] == 2
    report = jaxfp8.report(model, X)
    assert not report.unused
    rows = report.rows
    assert len(rows) == 6
    for row in rows:
        assert row["recipe"] == RECIPE and row["why"].endswith(" as a GatedMLP")


def test_copies_and_stacks():
    model = quantize(Model(nnx.Rngs(0)), [rule()])
    y = model(X)
    copies = [
        nnx.merge(*nnx.split(model)),
        nnx.clone(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for each in copies:
        assert isinstance(each.mlp, MLP) and type(each.mlp) is type(model.mlp)
        assert_same(each(X), y)
    stack = quantize(Stack(nnx.Rngs(0)), [rule()])
    step(stack, jaxfp8.nnx.Optimizer(stack, optax.sgd(0.01)))
    for mlp in mlps(stack.layers):
        assert_same(states(mlp.up_proj), states(mlp.gate_proj))
        assert np.all(mlp.down_proj.dot_general.input_amax_history[:, 0] > 0)


def test_later_rules_and_frozen_layers_run_apart():
    model = quantize(Model(nnx.Rngs(0)), [rule()])
    step(model, jaxfp8.nnx.Optimizer(model, optax.sgd(0.01)))
    plain = quantize(nnx.clone(model), [(".*", None)])
    y = model(X).astype(jnp.float32)
    frozen = jaxfp8.freeze(nnx.clone(model), X)(X).astype(jnp.float32)
    # layers round their kernels to bfloat16 first: some codes differ by one
    assert 0 < np.linalg.norm(frozen - y) < 0.1 * np.linalg.norm(y)
    assert not jax.tree.leaves(states(plain))
    rules = [(".*up_proj", RECIPE)], [rule(), (".*", RECIPE)], [(".*", RECIPE)]
    models = [quantize(Model(nnx.Rngs(0)), each) for each in rules[1:]]
    together, apart = (each(X) for each in models)
    assert not np.array_equal(together, apart)
    assert_same(quantize(models[0], rules[0])(X), apart)


def test_what_does_not_fit_is_refused():
    gelu = Model(nnx.Rngs(0), lambda rngs: MLP(rngs, "gelu"))
    quantize(gelu, [rule()])
    for run in (loss, jaxfp8.nnx.value_and_grad(loss), nnx.jit(loss)):
        with pytest.raises(ValueError, match="down_proj to be 'silu' of gate_proj"):
            run(gelu)
    with pytest.raises(ValueError, match="expected layers gate, .*no kernel of 'gate'"):
        quantize(Model(nnx.Rngs(0)), [rule(gate="gate")])(X)
    with pytest.raises(ValueError, match="model: expected a module in an attribute"):
        quantize(MLP(nnx.Rngs(0)), [("", rule()[1])])
