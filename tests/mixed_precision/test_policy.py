"""Policy: what it casts and leaves alone, its grammar, and the table of what stays in
float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn, nnx

import jaxfp8
from jaxfp8.mixed_precision import Policy

from . import leaves

HALF = Policy.parse("params=float32,compute=float16,output=float32")
FLOATS = [np.float16, oracle.BF16, np.float32, np.float64]

# ------------------------------------------------------------------------------ grammar

PARSED = {
    "params=float32,compute=bfloat16,output=float32": (
        "float32",
        "bfloat16",
        "float32",
    ),
    "p=f32,c=f16,o=f32": ("float32", "float16", "float32"),
    "p=f32,c=f16": ("float32", "float16", "float16"),
    "c=bf16": ("float32", "bfloat16", "bfloat16"),
    "o=bf16": ("float32", "float32", "bfloat16"),
    "p=f16": ("float16", "float16", "float16"),
    "output=float32, params = bfloat16": ("bfloat16", "bfloat16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    " f16 ": ("float16", "float16", "float16"),
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
        "int8",
        "float8_e4m3fn",
        "p=f32,p=f16",
        "p=f32,params=f16",
        "x=f32",
        "p=",
        "p=f9",
        ",",
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


@pytest.mark.parametrize("to", ["param", "compute", "output"])
def test_all_else_stays(to):
    tree = {"complex": jnp.ones(2, jnp.complex64), "number": 1.5, "text": "relu"}
    got, source = leaves.assert_others_stay(
        getattr(Policy.parse("f16"), f"cast_to_{to}"), tree
    )
    assert got["complex"] is tree["complex"]
    assert (got["number"], got["text"]) == (
        1.5,
        "relu",
    )
    assert source.dtype == jnp.float16


# -------------------------------------------------------------------------------- table


def test_state_of_nnx_models():
    model = nnx.Linear(8, 3, dot_general=jaxfp8.nnx.Fp8DotGeneral(), rngs=nnx.Rngs(0))
    model(np.ones((4, 8), np.float32))
    dtypes = {
        type(v): v.get_value().dtype
        for _, v in nnx.to_flat_state(HALF.cast_to_compute(nnx.state(model)))
    }
    assert dtypes[nnx.Param] == jnp.float16
    assert dtypes[jaxfp8.nnx.OverwriteWithGradient] == jnp.float32


LOGITS = np.linspace(-9, 9, 4096)
IN_F32 = {
    "softmax": (jax.nn.softmax, lambda x: np.exp(x) / np.exp(x).sum()),
    "log_softmax": (jax.nn.log_softmax, lambda x: x - np.log(np.exp(x).sum())),
    "sum": (jnp.sum, np.sum),
    "a loss of one's own": (lambda x: jnp.mean(x**2), lambda x: np.mean(x**2)),
}


@pytest.mark.parametrize("name", IN_F32)
def test_f32_operations(name):
    """Results of float16 inputs are f32, and the exact ones within 4096 roundings of
    f32, far below one of float16.
    """
    function, exact = IN_F32[name]
    x = LOGITS.astype(np.float16)
    got = HALF.op(
        function, like=None if name in ("softmax", "log_softmax", "sum") else "loss"
    )(x)
    assert got.dtype == jnp.float32
    wanted = exact(x.astype(np.float64))
    np.testing.assert_allclose(
        np.asarray(got, np.float64),
        wanted,
        rtol=4096 * 2.0**-24,
        atol=4096 * 9 * 2.0**-24,
    )


@pytest.mark.parametrize(
    "name", ["LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm"]
)
def test_norms_by_the_name_of_their_class(name):
    assert hasattr(nnx, name) and hasattr(nn, name)
    assert (
        HALF.dtype_of(name)
        == HALF.dtype_of(name.replace("Norm", "_norm").lower())
        == jnp.float32
    )


@pytest.mark.parametrize(
    "name",
    [
        "Dense",
        "DenseGeneral",
        "Linear",
        "LinearGeneral",
        "Einsum",
        "Conv",
        "ConvTranspose",
    ],
)
def test_products_by_the_name_of_their_class(name):
    assert HALF.dtype_of(name) == jnp.float16


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
