"""Models with FP8 layers of every kind, and what they are called with; calibrated and
frozen, once each.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from draws import normal
from flax import nnx
from mesh.cases import ROWS_BY_COLUMNS as ROWS_BY_COLUMNS
from programs.linen import STACKED
from promotion import as_users_have_jax

import jaxfp8
import jaxfp8.nnx

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
B, L, K, N = 2, 8, 32, 48
X = normal(B, L, K)
BF16 = {"dtype": jnp.bfloat16}


def fp8(recipe=RECIPE):
    return jaxfp8.make_dot_general_cls(recipe)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.relu(nn.Dense(N, dot_general_cls=fp8(), **BF16)(x))
        return x + nn.Dense(K, dot_general_cls=fp8(), **BF16)(h).astype(x.dtype), None


class Scanned(nn.Module):
    axis: int = 0
    block: type = Block

    @nn.compact
    def __call__(self, x):
        options = STACKED | {"variable_axes": {"params": self.axis, OWG: 0}}
        return nn.scan(self.block, **options, length=3)()(x, None)[0]


class Members(nn.Module):
    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            Block,
            in_axes=0,
            **STACKED,
        )
        return members()(x)[0]


class Tied(nn.Module):
    """A kernel that is looked up as well, and one in high precision: both stay."""

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.normal(), (K, N))
        y = jaxfp8.Fp8DotGeneral(recipe=RECIPE)(x, table, ROWS_BY_COLUMNS)
        return nn.Dense(4)(y + table[0])


def quantized(model, recipe=RECIPE):
    return jaxfp8.linen.quantize(model, [(".*", recipe)])


_ATTENTION = {
    "num_heads": 4,
    "qkv_dot_general_cls": fp8(),
    "out_dot_general_cls": fp8(),
}
LINEN = {
    "Dense, bf16": lambda: nn.Dense(N, dot_general_cls=fp8(), **BF16),
    "own Dense": lambda: jaxfp8.linen.Dense(N, recipe=RECIPE, **BF16),
    "GatedMLP": lambda: jaxfp8.linen.GatedMLP(N, recipe=RECIPE, **BF16),
    "NormDense": lambda: jaxfp8.linen.NormDense((3, N), recipe=RECIPE, **BF16),
    "DenseGeneral": lambda: nn.DenseGeneral(
        (4, 16), axis=(-1, -2), dot_general_cls=fp8()
    ),
    "DenseGeneral, batch": lambda: nn.DenseGeneral(
        N, batch_dims=(0,), dot_general_cls=fp8()
    ),
    "attention": lambda: nn.MultiHeadDotProductAttention(**_ATTENTION, **BF16),
    "Einsum": lambda: quantized(nn.Einsum((2, N, K), "bik,bnk->bin", use_bias=False)),
    "rules": lambda: quantized(nn.Dense(N, **BF16)),
    "scan": Scanned,
    "scan along 1": lambda: Scanned(axis=1),
    "rules, scan of remat": lambda: quantized(Scanned(block=nn.remat(Block))),
    "vmap": Members,
    "tied": Tied,
    "current": lambda: quantized(nn.Dense(N, **BF16), jaxfp8.Float8CurrentScaling()),
    "row-wise": lambda: quantized(nn.Dense(N, **BF16), jaxfp8.Float8RowwiseScaling()),
    "block, GatedMLP": lambda: jaxfp8.linen.GatedMLP(
        N, recipe=jaxfp8.Float8BlockScaling(), **BF16
    ),
    "MXFP8, DenseGeneral": lambda: quantized(
        nn.DenseGeneral(N, axis=(-1, -2)), jaxfp8.MXFP8BlockScaling()
    ),
}


def product(recipe=RECIPE):
    return jaxfp8.nnx.Fp8DotGeneral(recipe)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(K, N, dot_general=product(), rngs=rngs)
        self.down = nnx.Linear(N, K, dot_general=product(), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class NNXScanned(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=3)(
            nnx.vmap(NNXBlock, in_axes=0, out_axes=0)
        )(rngs)

    def __call__(self, x):
        return nnx.scan(
            lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )(x, self.blocks)


def _nnx_attention(rngs):
    """One object for three layers: they share state, and each kernel gets codes of its
    own.
    """
    return nnx.MultiHeadAttention(
        4,
        K,
        qkv_dot_general=product(),
        out_dot_general=product(),
        decode=False,
        rngs=rngs,
        **BF16,
    )


NNX = {
    "Linear, bf16": lambda rngs: nnx.Linear(
        K, N, dot_general=product(), rngs=rngs, **BF16
    ),
    "own Linear": lambda rngs: jaxfp8.nnx.Linear(
        K, N, recipe=RECIPE, rngs=rngs, **BF16
    ),
    "GatedMLP": lambda rngs: jaxfp8.nnx.GatedMLP(
        K, N, recipe=RECIPE, rngs=rngs, **BF16
    ),
    "NormDense": lambda rngs: jaxfp8.nnx.NormDense(
        K, (3, N), recipe=RECIPE, rngs=rngs, **BF16
    ),
    "LinearGeneral": lambda rngs: nnx.LinearGeneral(
        (L, K), (4, 16), axis=(-2, -1), dot_general=product(), rngs=rngs
    ),
    "Einsum": lambda rngs: nnx.Einsum(
        "bld,hdk->blhk",
        (4, K, 16),
        (4, 16),
        einsum_op=jaxfp8.nnx.Fp8Einsum(RECIPE),
        rngs=rngs,
    ),
    "attention": _nnx_attention,
    "scan": NNXScanned,
    "MXFP8": lambda rngs: nnx.Linear(
        K, N, dot_general=product(jaxfp8.MXFP8BlockScaling()), rngs=rngs
    ),
}


def frozen(model, x):
    """`(model, calibrated variables, frozen variables)`."""
    with as_users_have_jax():
        variables = model.init(jax.random.key(1), x)
        if OWG in variables:
            variables = jaxfp8.calibrate(model, variables, [x, 2 * x])
        return model, variables, jaxfp8.freeze(model, variables, x)


@functools.cache
def linen(name):
    return frozen(LINEN[name](), X)


def run(model, variables, x=X):
    with as_users_have_jax():
        return jax.jit(model.apply)(variables, x)


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
