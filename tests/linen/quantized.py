"""Models with rules, and the same models edited by hand: every comparison of the two is
bitwise.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from draws import KEY, normal
from equality import assert_same_bits as assert_same
from programs.cases import sgd

import jaxfp8
from jaxfp8.linen import quantize

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
A, B = (jaxfp8.DelayedScaling(amax_history_len=h) for h in (3, 5))
BATCH, D = 4, 8


def fp8(recipe):
    return recipe and jaxfp8.make_dot_general_cls(recipe)


class Block(nn.Module):
    """Compact; with attention, whose projections are its own modules. `a` and `m` are
    the edit by hand.
    """

    a: object = None
    m: object = None

    @nn.compact
    def __call__(self, x):
        attend = nn.MultiHeadDotProductAttention(
            2,
            name="attn",
            qkv_dot_general_cls=fp8(self.a),
            out_dot_general_cls=fp8(self.a),
        )
        x = x + attend(x)
        return x + nn.DenseGeneral(D, name="mlp", dot_general_cls=fp8(self.m))(x)


class Model(nn.Module):
    """setup; blocks in a list, the first under remat; a layer that comes from outside
    and runs twice.
    """

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


RULES = [
    ("head", None),
    (r"blocks_\d/attn/.*", A),
    (r"blocks_\d/mlp", B),
    ("shared", A),
    (".*", B),
]


def by_rules():
    return quantize(model(), RULES)


def by_hand():
    return model(A, B, None, A)


def x(seed=0):
    return normal(BATCH, 3, D, seed=seed)


def step(module):
    """`variables, x -> (y, gradients)`, jitted; gradients of state are the next
    state.
    """

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
    variables = quantized.init(KEY, *x)
    assert_same(variables, hand.init(KEY, *x), "init")
    run = step(quantized)
    run_hand = step(hand)
    for i in range(steps):
        got = run(variables, *x)
        wanted = run_hand(variables, *x)
        assert_same(got, wanted, f"step {i}")
        _, gradients = got
        params = sgd(variables["params"], gradients["params"], 0.1)
        variables = {"params": params} | (
            {OWG: gradients[OWG]} if OWG in gradients else {}
        )


def compare_programs(quantized, hand, *x):
    """The variables and the training step of both, traced: the same operations."""
    variables = jax.eval_shape(quantized.init, KEY, *x)
    wanted = jax.eval_shape(hand.init, KEY, *x)
    assert variables == wanted
    programs = (
        str(jax.make_jaxpr(step(module))(variables, *x)) for module in (quantized, hand)
    )
    got, wanted = (re.sub(r"0x[0-9a-f]+", "0x", program) for program in programs)
    assert got == wanted
