"""Products, codes, optimizers and trees in a wrong place: an error of ours, with the
argument and what to do.
"""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops

import jaxfp8
import jaxfp8.nnx

RECIPE = jaxfp8.DelayedScaling(amax_history_len=2)
X = jnp.ones((1, 2, 8))
DENSE = nn.Dense(8, dot_general_cls=jaxfp8.make_dot_general_cls(RECIPE))
VARIABLES = DENSE.init(jax.random.key(0), X)
PARAMS, STATE = VARIABLES["params"], VARIABLES[jaxfp8.OVERWRITE_WITH_GRADIENT]


def nnx_linear(**fields):
    nnx.Linear(8, 8, **fields, rngs=nnx.Rngs(0))(X)


def linen(layer, *args, **fields):
    layer(*args, **fields).init(jax.random.key(0), X)


def dense(**fields):
    linen(nn.Dense, 8, **fields)


def linen_attention(einsum):
    fields = {
        "qk_attn_weights_einsum_cls": einsum,
        "attn_weights_value_einsum_cls": einsum,
    }
    linen(nn.MultiHeadDotProductAttention, 2, **fields)


def plain_gradient():
    model = nnx_model()
    with warnings.catch_warnings(action="ignore", category=jaxfp8.FP8StateWarning):
        gradients = nnx.grad(lambda model: jnp.sum(model(X)))(model)
    jaxfp8.nnx.Optimizer(model, optax.adam(1e-3)).update(model, gradients)


FILLED = {
    "params": PARAMS,
    jaxfp8.OVERWRITE_WITH_GRADIENT: jax.tree.map(jnp.ones_like, STATE),
}


def runs_frozen(cast=lambda leaf: leaf, model=DENSE):
    return model.apply(jax.tree.map(cast, jaxfp8.freeze(DENSE, FILLED, X)), X)


def frozen_kernel():
    return jaxfp8.freeze(DENSE, FILLED, X)["params"]["kernel"]


def nnx_model():
    return jaxfp8.nnx.Linear(8, 8, recipe=RECIPE, rngs=nnx.Rngs(0))


def frozen_nnx_model():
    return jaxfp8.freeze(jaxfp8.calibrate(nnx_model(), [X]), X)


def scales_as_bfloat16(leaf):
    return leaf.astype(jnp.bfloat16) if leaf.shape == (1,) else leaf


UNBOUND = (
    r"Fp8DotGeneral: expected a call from a Linen module.* takes "
    r"dot_general=jaxfp8\.nnx\.Fp8DotGeneral\(recipe\)"
)
INSTANCE = (
    r"{}: expected a call with operands.* in Linen pass the class, "
    r"dot_general_cls=jaxfp8\.linen\.Fp8DotGeneral, for einsums "
    r"jaxfp8\.linen\.Fp8Einsum; in NNX pass the instance as dot_general="
)
EINSUM = nn.Einsum((8, 8), "abi,io->abo")
FP8_EINSUM = jaxfp8.quantize(EINSUM, [(".*", jaxfp8.Float8CurrentScaling())])
NO_ARRAY = (
    r"frozen kernel: expected an array, got the placeholder .* give the input to that "
    r"product"
)
FROZEN = (
    r"Dense.*: params: expected the kernel of a layer in high precision, got "
    r"variables of jaxfp8\.freeze"
)
CODES = r"QTensor \[8, 8\]: expected a product of jaxfp8, got an operation on arrays"


def in_flax_max_dtype():
    state = jax.tree.map(lambda leaf: leaf.astype(fp8_ops.fp32_max_grad), STATE)
    return DENSE.apply({"params": PARAMS, jaxfp8.OVERWRITE_WITH_GRADIENT: state}, X)


FLAX_MAX = r"expected float32 leaves, got fp8_meta32"
CASES = {
    "state in Flax's max dtype": (in_flax_max_dtype, FLAX_MAX),
    "instance in nnx.Linear": (
        lambda: nnx_linear(dot_general=jaxfp8.Fp8DotGeneral()),
        UNBOUND,
    ),
    "class in nnx.Linear": (
        lambda: nnx_linear(dot_general=jaxfp8.Fp8DotGeneral),
        "jaxfp8.nnx.Fp8DotGeneral",
    ),
    "recipe in nnx.Linear": (
        lambda: nnx_linear(dot_general=RECIPE),
        r"nnx.Fp8DotGeneral\(DelayedScaling",
    ),
    "instance of NNX as a class in nn.Dense": (
        lambda: dense(dot_general_cls=jaxfp8.nnx.Fp8DotGeneral()),
        INSTANCE.format("Fp8DotGeneral"),
    ),
    "instance as a class in nn.Dense": (
        lambda: dense(dot_general_cls=jaxfp8.Fp8DotGeneral()),
        INSTANCE.format("Fp8DotGeneral"),
    ),
    "instance as a class of scores": (
        lambda: linen_attention(jaxfp8.linen.Fp8Einsum()),
        INSTANCE.format("Fp8Einsum"),
    ),
    "product as a class of scores": (
        lambda: linen_attention(jaxfp8.Fp8DotGeneral()),
        INSTANCE.format("Fp8DotGeneral"),
    ),
    "class as a product in nn.Dense": (
        lambda: dense(dot_general=jaxfp8.Fp8DotGeneral),
        "dot_general_cls",
    ),
    "class of NNX in nn.Dense": (
        lambda: dense(dot_general_cls=jaxfp8.nnx.Fp8DotGeneral),
        "jaxfp8.linen.Fp8Dot",
    ),
    "product of NNX in nn.Dense": (
        lambda: dense(dot_general=jaxfp8.nnx.Fp8DotGeneral()),
        "jaxfp8.linen.Fp8Dot",
    ),
    "recipe in nn.Dense": (
        lambda: dense(dot_general_cls=RECIPE),
        "make_dot_general_cls",
    ),
    "class of a recipe as a class": (
        lambda: dense(dot_general_cls=jaxfp8.DelayedScaling),
        "make_dot_general_cls|partial",
    ),
    "features of 4.0": (
        lambda: linen(jaxfp8.linen.Dense, 4.0),
        "features: expected an int",
    ),
    "out_features of 4.0": (
        lambda: jaxfp8.nnx.Linear(8, 4.0, rngs=nnx.Rngs(0)),
        "out_features: expected an int",
    ),
    "x without dimensions": (
        lambda: jaxfp8.linen.Dense(4).init(jax.random.key(0), jnp.float32(1)),
        r"x: expected .*\[\]",
    ),
    "gradient of nnx.grad": (plain_gradient, "jaxfp8.nnx.grad"),
    "codes in nn.Dense": (
        lambda: nn.Dense(8).apply(
            {"params": jaxfp8.quantize_params(PARAMS, STATE, RECIPE)}, X
        ),
        CODES,
    ),
    "where": (
        lambda: jaxfp8.quantize_params(PARAMS, STATE, RECIPE, where="ker"),
        "quantize_params: where: no kernel matches 'ker' as a whole; paths are "
        "'kernel'",
    ),
    "frozen in nn.Dense": (lambda: runs_frozen(model=nn.Dense(8)), FROZEN),
    "frozen in nn.Einsum": (
        lambda: EINSUM.apply(
            jaxfp8.freeze(FP8_EINSUM, FP8_EINSUM.init(jax.random.key(0), X), X), X
        ),
        FROZEN.replace("Dense", "Einsum"),
    ),
    "frozen kernel of Linen as an array": (
        lambda: jnp.dot(X, frozen_kernel()),
        NO_ARRAY,
    ),
    "frozen kernel of NNX as an array": (
        lambda: X @ frozen_nnx_model().kernel,
        NO_ARRAY,
    ),
    "frozen, and a rule says None": (
        lambda: runs_frozen(model=jaxfp8.quantize(DENSE, [(".*", None)])),
        FROZEN,
    ),
    "frozen, and another recipe": (
        lambda: runs_frozen(
            model=jaxfp8.quantize(DENSE, [(".*", jaxfp8.MXFP8BlockScaling())])
        ),
        "frozen product: the recipe here is MXFP8BlockScaling",
    ),
    "rules for a frozen NNX model": (
        lambda: jaxfp8.nnx.quantize(frozen_nnx_model(), [(".*", RECIPE)]),
        "nnx.quantize: model: jaxfp8.freeze left codes of its kernel alone",
    ),
    "frozen scales that were cast": (
        lambda: runs_frozen(scales_as_bfloat16),
        r"frozen product: .*'kernel_scale_inv': 'float32\[1\]'}, but the frozen arrays "
        r".*'bfloat16\[1\]'} are of another recipe, or were cast",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_ours(case):
    function, message = CASES[case]
    with pytest.raises((TypeError, ValueError), match=message):
        function()


GRADIENTS_OF_INPUTS = {
    "linen": lambda: jax.grad(lambda x: jnp.sum(DENSE.apply(FILLED, x)))(X),
    "linen in jit": lambda: jax.jit(
        jax.vmap(jax.grad(lambda x: jnp.sum(DENSE.apply(FILLED, x))))
    )(X),
    "nnx": lambda: nnx.grad(lambda model, x: jnp.sum(model(x)), argnums=1)(
        nnx_model(), X
    ),
    "nnx in jit": lambda: nnx.jit(
        nnx.grad(lambda model, x: jnp.sum(model(x)), argnums=1)
    )(nnx_model(), X),
    "nnx, ours": lambda: jaxfp8.nnx.grad(lambda model, x: jnp.sum(model(x)), argnums=1)(
        nnx_model(), X
    ),
}


@pytest.mark.parametrize("run", GRADIENTS_OF_INPUTS.values(), ids=GRADIENTS_OF_INPUTS)
def test_a_gradient_of_the_input_alone_is_silent(run):
    with warnings.catch_warnings(action="error", category=jaxfp8.FP8StateWarning):
        run()
