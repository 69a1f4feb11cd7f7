"""Policy: what it casts and leaves alone, its grammar, and the table of what stays in
float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY
from flax import linen as nn, nnx

import jaxfp8
from jaxfp8.mixed_precision import Policy

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
HALF = Policy.parse("params=float32,compute=float16,output=float32")
FLOATS = [np.float16, oracle.BF16, np.float32, np.float64]

# ------------------------------------------------------------------------------ grammar

PARSED = {
    "params=float32,compute=float16,output=float32": ("float32", "float16", "float32"),
    " output=float32, params = bfloat16,compute=float64": (
        "bfloat16",
        "float64",
        "float32",
    ),
}


@pytest.mark.parametrize("text", PARSED)
def test_parse(text):
    policy = Policy.parse(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == tuple(
        map(jnp.dtype, PARSED[text])
    )
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "float16",
        "params=float32,compute=float16",
        "params=float32,compute=float16,params=float16",
        "params=float32,compute=float16,output=float16,output=float32",
        "params=float32,compute=float16,output=float16,x=float32",
        "params=float32,compute=f8,output=float32",
        "params=float32,compute=float8_e4m3fn,output=float32",
    ],
)
def test_bad_text_is_named(text):
    with pytest.raises(ValueError, match="Policy.parse: .*expected .*got "):
        Policy.parse(text)


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn, "nonsense", None])
def test_bad_dtypes_are_named(field, dtype):
    with pytest.raises(
        ValueError,
        match=f"Policy: {field}: expected float16, bfloat16, float32 or float64, got ",
    ):
        Policy(**{field: dtype})


# -------------------------------------------------------------------------------- casts


@pytest.mark.parametrize("to", ["param", "compute", "output"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_cast(to, dtype):
    policy = Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    array = np.linspace(-3, 3, 50).astype(dtype)
    got = getattr(policy, f"cast_to_{to}")({"a": [array]})["a"][0]
    wanted = getattr(policy, f"{to}_dtype")
    # float64 is float32 in JAX before anything else.
    oracle.assert_bitwise(
        got,
        (array.astype(np.float32) if dtype == np.float64 else array).astype(wanted),
        to,
    )


# Its source alone is a value.
QTENSOR = jaxfp8.QTensor(
    jnp.ones((2, 2), jnp.float8_e4m3fn), jnp.ones(1), source=jnp.ones((2, 2))
)
NO_PARAMETERS = {
    OWG: {"Dense_0": {"input_amax_history": jnp.ones(2), "input_scale": jnp.ones(1)}},
    "own": {OWG: {"linear_input_amax": jnp.ones(2)}},
    "plain": jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=3)),
    "e5m2": jnp.ones(2, jnp.float8_e5m2),
    "ints": jnp.arange(2),
    "flag": np.bool_(True),
    "key": KEY,
    "nothing": None,
    "complex": jnp.ones(2, jnp.complex64),
    "number": 1.5,
    "text": "relu",
}


@pytest.mark.parametrize("to", ["param", "compute", "output"])
def test_all_else_stays(to):
    """FP8 state, codes, integers, keys, whatever they are named and however deep."""
    given = NO_PARAMETERS | {"q": QTENSOR}
    got = getattr(Policy(*["float16"] * 3), f"cast_to_{to}")(given)
    q = got.pop("q")
    assert jax.tree.structure(got) == jax.tree.structure(NO_PARAMETERS)
    leaves = zip(*map(jax.tree.leaves, (got, NO_PARAMETERS)), strict=True)
    assert all(leaf is before for leaf, before in leaves)
    assert q.data is QTENSOR.data and q.scale_inv is QTENSOR.scale_inv
    assert q.source.dtype == jnp.float16


# -------------------------------------------------------------------------------- table


NORMS = ["LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm"]
PRODUCTS = ["Dense", "DenseGeneral", "Linear", "LinearGeneral", "Einsum", "Conv"]


def test_layers_by_the_name_of_their_class():
    for name in NORMS:
        assert hasattr(nnx, name) and hasattr(nn, name)
        by_function = HALF.dtype_of(name.replace("Norm", "_norm").lower())
        assert HALF.dtype_of(name) == by_function == jnp.float32
    assert {HALF.dtype_of(name) for name in PRODUCTS} == {jnp.dtype("float16")}


@pytest.mark.parametrize(
    "function, like",
    [(jax.nn.softmax, None), (jnp.sum, None), (lambda x: jnp.sum(x**2), "loss")],
)
def test_f32_operations(function, like):
    """Of float16 inputs, whose sum float16 does not hold."""
    x = np.ones(70000, np.float16)
    oracle.assert_bitwise(
        HALF.op(function, like)(x), function(x.astype(np.float32)), "f32"
    )


def test_widest_operations():
    half = np.ones(3, np.float16)
    bf16 = np.ones(3, oracle.BF16)
    full = np.ones(3, np.float32)
    for function in (jnp.add, jnp.multiply):
        assert HALF.op(function)(half, full).dtype == jnp.float32
        assert HALF.op(function)(half, half).dtype == jnp.float16
        assert HALF.op(function)(half, bf16).dtype == jnp.float32
    assert HALF.op(jnp.concatenate)([half, full]).dtype == jnp.float32
    assert HALF.op(jnp.add)(1, 2) == 3


@pytest.mark.parametrize(
    "function, like",
    [(jnp.cos, None), (functools.partial(jnp.sum), None), (jnp.cos, "cosine")],
)
def test_unknown_operations_are_named(function, like):
    with pytest.raises(
        ValueError, match="Policy: operation: expected one of .*'softmax'.*got"
    ):
        HALF.op(function, like)
    with pytest.raises(ValueError, match="expected one of"):
        HALF.dtype_of("cosine")
