"""linen.GatedMLP, NormDense and Dense of several dimensions: parameters, dtypes, and
the products they are made of.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY, normal
from equality import assert_same_bits
from flax.traverse_util import flatten_dict
from parametrize import each_row
from programs.known_amax import RECIPES, packed
from recipes.cases import KINDS

import jaxfp8
from jaxfp8.linen import Dense, GatedMLP, NormDense
from jaxfp8.ops import ClampedSwiGLU
from linen.test_experts import used_variables

RECIPE, OWG = RECIPES["delayed"].recipe, jaxfp8.OVERWRITE_WITH_GRADIENT

ROWS, WIDTH, HIDDEN = 5, 6, 8
F32, BF16, F16 = np.dtype(np.float32), oracle.BF16, oracle.F16
FEATURES = (3, 2, 4)
OPTIONS = {"recipe": RECIPE, "use_bias": True, "bias_init": nn.initializers.normal(0.5)}
NORM = {
    "scale_init": nn.initializers.normal(1.0),
    "norm_bias_init": nn.initializers.normal(0.5),
    "epsilon": 0.25,
}
LAYERS = {
    "dense": Dense(FEATURES, **OPTIONS),
    "silu mlp": GatedMLP(HIDDEN, **OPTIONS),
    "gelu mlp": GatedMLP(HIDDEN, features=7, activation="gelu", **OPTIONS),
    "norm mlp": GatedMLP(
        HIDDEN,
        norm="layer",
        activation=ClampedSwiGLU(0.5, alpha=1.702, offset=1.0),
        **OPTIONS,
        **NORM,
    ),
    "rms dense": NormDense(FEATURES, kind="rms", **OPTIONS, **NORM),
    "layer dense": NormDense(7, kind="layer", **OPTIONS, **NORM),
}


CASES = [("delayed", dtype) for dtype in (F32, BF16, F16)] + [
    (name, F32) for name in KINDS
]


def inputs(dtype=F32, rows=(ROWS,)):
    return normal(*rows, WIDTH).astype(dtype)


def product(x, variables, path, recipe, dtype, **options):
    """What a Dense is: one product, from its parameters and state."""
    params = functools.reduce(dict.__getitem__, path, variables["params"])
    state = None
    if OWG in variables:
        state = packed(
            functools.reduce(
                dict.__getitem__, (*path, "Fp8DotGeneral_0"), variables[OWG]
            )
        )
    options |= {
        "recipe": recipe,
        "state": state,
        "bias": params["bias"],
        "preferred_element_type": dtype,
    }
    return jaxfp8.dot_general(
        x, params["kernel"], (((len(x.shape) - 1,), (0,)), ((), ())), **options
    )


def written_out(layer, variables, x, dtype):
    """The layer by its definition."""
    options = layer.recipe, dtype
    params = variables["params"]
    if norm := getattr(layer, "norm", None) or getattr(layer, "kind", None):
        x = jaxfp8.normalized(
            x,
            params["scale"],
            params.get("norm_bias"),
            kind=norm,
            epsilon=layer.epsilon,
        )
    if isinstance(layer, GatedMLP):
        activation = layer.activation
        if isinstance(activation, str):
            activation += "_gated"
        h = product(x, variables, ("wi",), *options, activation=activation)
        return product(h, variables, ("wo",), *options)
    if isinstance(layer, NormDense):
        return product(x, variables, ("dense",), *options)
    return product(x, variables, (), *options)


@pytest.mark.parametrize("recipe, dtype", CASES, ids=str)
@each_row("layer", LAYERS)
def test_values_and_gradients(layer, recipe, dtype):
    """Those of the functions, which dot/test_fused_values.py compares with formulas; no
    state in some recipes.
    """
    recipe = RECIPES[recipe].recipe
    layer = layer.clone(recipe=recipe, dtype=dtype)
    x = inputs(dtype)
    variables = used_variables(layer, x)

    def loss(variables, x, apply):
        y = apply(variables, x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    def step(apply):
        return jax.jit(
            lambda *a: jax.grad(loss, argnums=(0, 1), has_aux=True)(*a, apply)
        )(variables, x)

    assert (OWG in variables) == (recipe == RECIPE)
    got = step(layer.apply)
    assert_same_bits(
        got, step(lambda variables, x: written_out(layer, variables, x, dtype)), "layer"
    )
    (of_variables, dx), y = got
    assert y.dtype == dx.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(of_variables)} == {F32}
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got)), (
        "everything has a gradient"
    )


PAIR = {
    "wi/kernel": (WIDTH, 2, HIDDEN),
    "wi/bias": (2, HIDDEN),
    "wo/kernel": (HIDDEN, WIDTH),
    "wo/bias": (WIDTH,),
}
PARAMETERS = {
    "dense": {"kernel": (WIDTH, *FEATURES), "bias": FEATURES},
    "silu mlp": PAIR,
    "gelu mlp": PAIR | {"wo/kernel": (HIDDEN, 7), "wo/bias": (7,)},
    "norm mlp": PAIR | {"scale": (WIDTH,), "norm_bias": (WIDTH,)},
    "rms dense": {
        "scale": (WIDTH,),
        "dense/kernel": (WIDTH, *FEATURES),
        "dense/bias": FEATURES,
    },
    "layer dense": {
        "scale": (WIDTH,),
        "norm_bias": (WIDTH,),
        "dense/kernel": (WIDTH, 7),
        "dense/bias": (7,),
    },
}


@pytest.mark.parametrize("layer", LAYERS)
def test_parameters(layer):
    params = LAYERS[layer].init(KEY, inputs())["params"]
    assert {
        name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()
    } == PARAMETERS[layer]


def test_kernels_are_initialized_as_those_of_one_dimension():
    """As nn.Dense and nn.DenseGeneral do for the same key; so the variance is that of
    the fan-in.
    """
    x = inputs()
    key = jax.random.key(3)
    size = int(np.prod(FEATURES))
    ours = Dense(FEATURES, recipe=RECIPE).init(key, x)["params"]["kernel"]
    oracle.assert_bitwise(
        ours.reshape(WIDTH, size),
        nn.Dense(size).init(key, x)["params"]["kernel"],
        "nn.Dense",
    )
    general = nn.DenseGeneral(FEATURES).init(key, x)["params"]["kernel"]
    oracle.assert_bitwise(ours, general, "nn.DenseGeneral")


@pytest.mark.parametrize("x_dtype, dtype, y_dtype", [
    (F32, None, F32), (BF16, None, F32), (F32, BF16, BF16), (BF16, F32, F32),
    (np.dtype(np.int32), None, F32),
])  # fmt: skip
@each_row("layer", LAYERS)
def test_compute_dtype(layer, x_dtype, dtype, y_dtype):
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), x_dtype)
    y, _ = jax.eval_shape(layer.clone(dtype=dtype).init_with_output, KEY, x)
    assert y.dtype == y_dtype
