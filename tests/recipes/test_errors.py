"""Wrong recipes, options and operands: errors that name the argument and say what to
do.
"""

import copy
import dataclasses
import functools
import inspect
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import KEY
from flax import nnx
from jax import lax
from oracle import F32
from parametrize import each_row

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from recipes.cases import MATMUL, RECIPES

X, KERNEL = np.ones((4, 6), F32), np.ones((6, 5), F32)
NO_RECIPES = {
    "string": ("mx", "got 'mx'"),
    "class": (jaxfp8.MXFP8BlockScaling, "call the class"),
    "format": (jaxfp8.Format.HYBRID, "got HYBRID"),
    "quantizer": (jaxfp8.recipes.MXFP8Quantizer(), "got MXFP8Quantizer"),
}


@each_row("recipe, says", NO_RECIPES)
def test_not_a_recipe(recipe, says):
    """Wherever a recipe is taken."""
    takers = {
        "dot_general: recipe": lambda: jaxfp8.dot_general(
            X, KERNEL, MATMUL, recipe=recipe
        ),
        "dot_general: recipe ": lambda: jaxfp8.einsum(
            "mk,kn->mn", X, KERNEL, recipe=recipe
        ),
        "ragged_dot: recipe": lambda: jaxfp8.ragged_dot(
            X, KERNEL[None], np.int32([4]), recipe=recipe
        ),
        "init_state: recipe": lambda: jaxfp8.init_state(recipe),
        "quantize_params: recipe": lambda: jaxfp8.quantize_params({}, {}, recipe),
        "layer: recipe": lambda: jaxfp8.linen.Dense(5, recipe=recipe).init(KEY, X),
        "layer: recipe ": lambda: nn.Dense(
            5, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(recipe)
        ).init(KEY, X),
        "layer: recipe  ": lambda: jaxfp8.nnx.Fp8DotGeneral(recipe),
    }
    for name, take in takers.items():
        with pytest.raises(
            TypeError, match=f"{name.strip()}: expected a recipe.*{says}"
        ):
            take()


DELAYED = jaxfp8.DelayedScaling
STATELESS = (
    jaxfp8.Float8CurrentScaling,
    jaxfp8.Float8RowwiseScaling,
    jaxfp8.Float8BlockScaling,
    jaxfp8.MXFP8BlockScaling,
    jaxfp8.StaticScaling,
)
QUANTIZERS = (
    jaxfp8.recipes.Float8CurrentScalingQuantizer,
    jaxfp8.recipes.Float8RowwiseQuantizer,
    jaxfp8.recipes.Float8BlockQuantizer,
    jaxfp8.recipes.MXFP8Quantizer,
)
EVERY, TYPE, VALUE = (DELAYED, *STATELESS), TypeError, ValueError
# Classes, option, exception, values.
OPTIONS = [
    (EVERY, "fp8_format", TYPE, ["HYBRID", None, jnp.float8_e4m3fn]),
    (EVERY, "precise", TYPE, ["fprop", None]),
    (EVERY, "precise", VALUE, [("forward",)]),
    (EVERY, "min_size", TYPE, [0.5, True]),
    (EVERY, "min_size", VALUE, [-1]),
    (EVERY, "pipeline_axes", TYPE, ["stage"]),
    (STATELESS[:3], "power_2_scale", TYPE, [1]),
    (STATELESS[3:4], "rounding", VALUE, ["nearest", None]),
    ([DELAYED], "amax_compute_algo", VALUE, ["mean", None, 3]),
    ([DELAYED], "first_step", VALUE, ["none", None]),
    ([DELAYED], "amax_history_len", (TYPE, VALUE), [0, -1, 2.5, "8", 2**31, 10**400]),
    ([DELAYED], "margin", (TYPE, VALUE), ["1", None, np.nan, np.inf]),
    ([DELAYED], "reduce_amax", VALUE, [False, None, "yes"]),
    ([DELAYED], "fp8_residuals", TYPE, [1, "fp8", None]),
    ([DELAYED], "wgrad_dtype", TYPE, ["fp8", jnp.float8_e4m3fn, np.float64, 3]),
    *[
        (STATELESS[4:], name, TYPE, ["224", True])
        for name in ("input", "kernel", "output_grad")
    ],
    *[
        (STATELESS[4:], name, VALUE, [0, -1.0, np.nan, np.inf, 1e39, 1e-50, 10**400])
        for name in ("input", "kernel", "output_grad")
    ],
    # HYBRID is two: a quantizer has one.
    (
        QUANTIZERS,
        "fp8_dtype",
        TYPE,
        [jnp.float16, "e4m3", jaxfp8.Format.HYBRID, jnp.float8_e4m3b11fnuz, None, 3],
    ),
]
ROWS = [(cls, *rest) for classes, *rest in OPTIONS for cls in classes]


@pytest.mark.parametrize(
    "cls, name, error, values",
    ROWS,
    ids=[f"{cls.__name__}-{name}" for cls, name, *_ in ROWS],
)
def test_options(cls, name, error, values):
    for value in values:
        with pytest.raises(error, match=f"{cls.__name__}: {name}: expected"):
            cls(**{name: value})
            pytest.fail(f"{value!r} is accepted")


def most_recent(history):
    return history[0]


POSITIONAL = {
    DELAYED: "margin amax_history_len amax_compute_algo fp8_format first_step",
    **dict.fromkeys(STATELESS[:3], "fp8_format power_2_scale"),
    jaxfp8.MXFP8BlockScaling: "fp8_format rounding",
    jaxfp8.StaticScaling: "input kernel output_grad fp8_format",
    jaxfp8.CustomRecipe: "qfactory",
    jaxfp8.ByProduct: "fprop dgrad wgrad",
    jaxfp8.HighPrecision: "",
}


@pytest.mark.parametrize("cls, options", POSITIONAL.items())
def test_positions_of_options(cls, options):
    """Options of a recipe keep their positions; those that all recipes share are given
    by keyword.
    """
    parameters = inspect.signature(cls).parameters.values()
    assert options.split() == [
        one.name for one in parameters if one.kind is not one.KEYWORD_ONLY
    ]
    shared = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert {"precise", "min_size", "pipeline_axes"} <= shared


STATIC = functools.partial(jaxfp8.recipes.StaticScalingQuantizer, bound=1.0)


@pytest.mark.parametrize(
    "make", [*QUANTIZERS, jaxfp8.recipes.DelayedScalingQuantizer, STATIC]
)
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, jnp.float8_e5m2])
def test_what_quantizers_refuse(make, dtype):
    """Products check their operands; a call of a user's does not come from one."""
    quantizer = make(fp8_dtype=jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match=r": x: expected .*bfloat16"):
        quantizer.quantize(jnp.zeros((4, 4), dtype), quantizer.init())


# ---------------------------------------------------------------- arguments of products

RECIPE = DELAYED(amax_history_len=2)
STATE, WITHOUT = jaxfp8.init_state(RECIPE), jaxfp8.DotGeneralState(None, None, None)
GOOD = {
    "dot_general": {
        "x": X,
        "kernel": KERNEL,
        "dimension_numbers": MATMUL,
        "recipe": RECIPE,
        "state": STATE,
    },
    "einsum": {
        "eqn": "mk,kn->mn",
        "x": X,
        "kernel": KERNEL,
        "recipe": RECIPE,
        "state": STATE,
    },
    "ragged_dot": {
        "lhs": X,
        "rhs": np.ones((2, 6, 5), F32),
        "group_sizes": np.int32([2, 1]),
        "recipe": RECIPE,
        "state": WITHOUT,
    },
}
HIGHEST, DEFAULT = lax.Precision.HIGHEST, lax.Precision.DEFAULT
BATCHES = {
    "x": np.ones((2, 4, 6), F32),
    "kernel": np.ones((3, 6, 5), F32),
    "dimension_numbers": (((2,), (1,)), ((0,), (0,))),
}
NO_NUMBERS = [
    1,
    None,
    "ab",
    ((1,), (0,)),
    ((1, 0), ((), ())),
    (((1.0,), (0,)), ((), ())),
]
# The argument, its exception and values, and a pattern; a dict changes several
# arguments.
ARGUMENTS = {
    "dot_general": [
        ("x", TYPE, [X.astype(np.float64)], ""),
        ("x", TYPE, [X.astype(">f4")], r"swapped.*\.astype\(np\.float32\)"),
        ("dimension_numbers", (TYPE, VALUE), NO_NUMBERS, r"\(\(\(1"),
        (
            "dimension_numbers",
            VALUE,
            [{"kernel": KERNEL[:5], "state": None}],
            r"kernel\(5",
        ),
        ("", VALUE, [BATCHES], "batch"),
        ("", VALUE, [{"dimension_numbers": (((2,), (0,)), ((), ()))}], "dimension"),
        ("state", VALUE, [None], r".*DotGeneralState\(None, None, None\)"),
        (
            "preferred_element_type",
            TYPE,
            [np.int32, np.float64, jnp.float8_e4m3fn, "float99"],
            "expected",
        ),
        (
            "precision",
            VALUE,
            [
                (HIGHEST, DEFAULT),
                "HIGHEST",
                3,
                lax.DotAlgorithmPreset.F32_F32_F32,
                lax.DotAlgorithm(*[F32] * 3),
            ],
            "expected",
        ),
        ("out_sharding", TYPE, ["data"], "expected"),
        ("bias", VALUE, [np.ones(4, F32)], r"expected shape \(5,\), got float32\[4\]"),
        ("bias", TYPE, [np.ones(5, np.int32)], "expected bfloat16"),
        ("activation", VALUE, ["tanh"], r"expected one of .*got 'tanh'"),
        (
            "activation",
            VALUE,
            ["gelu_gated"],
            r"the product: expected \[\.\.\., 2, n\]",
        ),
    ],
    "einsum": [
        ("eqn", TYPE, [None], "string"),
        ("eqn", VALUE, ["mk->m", "mk,kn,no->mo"], "number of operands"),
        ("eqn", VALUE, ["mk,kn->m,n"], r"equation of x\[4, 6\] and kernel\[6, 5\]"),
        ("eqn", VALUE, ["mk,kn->mn->m"], "one '->'"),
        ("eqn", VALUE, ["m.,kn->mn", "...m...,kn->mn"], "Ellipses"),
        ("eqn", VALUE, ["m,kn->mn"], "indices for operand 0"),
        ("eqn", VALUE, ["mk,kno->mn"], "indices for operand 1"),
        # twice in the output; no diagonal of a rectangle
        ("eqn", VALUE, ["mk,kn->mm", "mm,kn->mn"], "'m'"),
        ("eqn", VALUE, ["mk,kn->mo"], "'o'"),
        ("eqn", VALUE, ["km,kn->mn"], "'k'"),  # of two sizes
        ("out_sharding", TYPE, ["data"], "expected a PartitionSpec"),
        ("x", TYPE, [X.astype(np.int32)], ""),
        ("kernel", TYPE, [KERNEL.astype(np.complex64)], ""),
        (
            "",
            TYPE,
            [{"x": X[:0], "preferred_element_type": np.int32}],
            "preferred_element_type",
        ),
        ("", VALUE, [{"state": None}], "dot_general: state"),
    ],
    "ragged_dot": [
        ("lhs", TYPE, [X.astype(np.float64), X.astype(np.int32)], ""),
        ("lhs", VALUE, [X[None]], ""),
        ("rhs", TYPE, [np.ones((2, 6, 5), jnp.float8_e4m3fn)], ""),
        ("rhs", VALUE, [np.ones(s, F32) for s in ((3, 6, 5), (2, 3, 5), (6, 5))], ""),
        ("group_sizes", TYPE, [F32([2, 3])], ""),
        ("group_sizes", VALUE, [np.int32([[2, 3]])], ""),
        ("preferred_element_type", TYPE, [np.int32], ""),
        ("state", VALUE, [None, jaxfp8.init_state(DELAYED(amax_history_len=7))], ""),
        ("state", TYPE, [()], ""),
    ],
}
CALLS = [(op, *row) for op, rows in ARGUMENTS.items() for row in rows]


@pytest.mark.parametrize(
    "op, name, error, values, says",
    CALLS,
    ids=[f"{op}-{name}" for op, name, *_ in CALLS],
)
def test_arguments_of_products(op, name, error, values, says):
    getattr(jaxfp8, op)(**GOOD[op])
    for value in values:
        with pytest.raises(
            error, match=rf"(?s){op}: {name}\b.*{says}" if name else says
        ):
            getattr(jaxfp8, op)(
                **GOOD[op] | (value if isinstance(value, dict) else {name: value})
            )
            pytest.fail(f"{value!r} is accepted")


LAYERS = [
    (
        "GatedMLP",
        {"activation": "tanh"},
        'GatedMLP: activation: expected "silu" or "gelu", got \'tanh\'',
    ),
    ("GatedMLP", {"norm": "batch"}, "normalized: kind: expected one of"),
    ("NormDense", {"kind": "batch"}, "normalized: kind: expected one of"),
]


@pytest.mark.parametrize("name, options, message", LAYERS)
def test_options_of_layers(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(jaxfp8.linen, name)(7, **options).init(KEY, X)
    with pytest.raises(ValueError, match=message):
        getattr(jaxfp8.nnx, name)(6, 7, **options, rngs=nnx.Rngs(0))(X)


# -------------------------------------------------------------------- recipes as values


def test_recipes_are_values():
    """They hash and compare, so that a recipe made twice is one program."""
    for recipe, _ in RECIPES.values():
        again = dataclasses.replace(recipe)
        assert again == recipe and hash(again) == hash(recipe) and again is not recipe
    recipes = {recipe for recipe, _ in RECIPES.values()}
    changes = [
        {"margin": 1},
        {"amax_history_len": 17},
        {"amax_compute_algo": "most_recent"},
        {"amax_compute_algo": most_recent},
        {"fp8_format": jaxfp8.Format.E4M3},
        {"first_step": "current"},
    ]
    assert len(recipes | {DELAYED(**change) for change in changes}) == len(
        RECIPES
    ) + len(changes)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DELAYED().margin = 3
    defaults = {
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "fp8_format": jaxfp8.Format.HYBRID,
    }
    assert (
        DELAYED()
        == DELAYED(**defaults, first_step="unit", reduce_amax=True)
        == dataclasses.replace(DELAYED())
    )


def test_recipes_are_no_leaves():
    """They may be arguments of a jitted function: equal recipes are one program."""
    traces, recipes = [], [cls() for cls in STATELESS]

    @jax.jit
    def run(x, recipe):
        traces.append(recipe)
        return jaxfp8.dot_general(x, KERNEL, MATMUL, recipe=recipe)

    for recipe in recipes + [cls() for cls in STATELESS]:
        np.testing.assert_array_equal(
            run(X, recipe), jaxfp8.dot_general(X, KERNEL, MATMUL, recipe=recipe)
        )
    assert traces == recipes
    assert jax.tree.leaves({"a": RECIPE, "b": 1}) == [1]


def test_no_stages_and_nothing_said_are_two_recipes():
    """A warning names `pipeline_axes=()` as its cure, so no cache may take the one
    recipe for the other.
    """
    unsaid, said = jaxfp8.DelayedScaling(), jaxfp8.DelayedScaling(pipeline_axes=())
    assert (
        unsaid != said
        and unsaid == jaxfp8.DelayedScaling()
        and said == jaxfp8.DelayedScaling(pipeline_axes=[])
    )
    assert jaxfp8.make_dot_general_cls(said) is not jaxfp8.make_dot_general_cls(unsaid)
    for again in (
        pickle.loads(pickle.dumps(unsaid)),
        copy.deepcopy(unsaid),
        dataclasses.replace(unsaid),
    ):
        assert again == unsaid != said and again.pipeline_axes is None


def test_codes_without_their_source_have_no_gradient():
    """Zeros would stop the training of what the codes were made of, and say nothing."""
    codes = jnp.ones((4, 6), jnp.float8_e4m3fn)

    def decoded(scale_inv):
        q = jaxfp8.QTensor(codes, scale_inv, block=(1, 3))
        return jnp.sum(q.dequantize(jnp.float32))

    says = "QTensor.dequantize: a QTensor without its source has no gradient"
    with pytest.raises(TypeError, match=says):
        jax.grad(decoded)(jnp.ones((4, 2)))
