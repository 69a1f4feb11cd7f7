"""QTensors as qwix and jax.nn.scaled_matmul have them: the same buffers, and the
numbers that those libraries read.
"""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8.convert import from_qarray, from_scaled_matmul, to_qarray, to_scaled_matmul

from .cases import E8M0, QArray, qtensor


@pytest.fixture(autouse=True)
def qwix(monkeypatch):
    """A stand-in: qwix need not be installed."""
    monkeypatch.setitem(sys.modules, "qwix", types.SimpleNamespace(QArray=QArray))


def dequantize(array):
    """The value of qwix: scales repeated along each dimension."""
    scale = np.asarray(array.scale)
    for axis, size in enumerate(array.qvalue.shape):
        assert size % scale.shape[axis] == 0
        scale = np.repeat(scale, size // scale.shape[axis], axis)
    return np.asarray(array.qvalue, np.float32) * scale


SHAPES = {
    # name: (QTensor, shape of qwix's scales, the same again from qwix)
    "one scale": (qtensor((8, 64), None), (1, 1), True),
    "rows": (qtensor((8, 64), (1, None)), (8, 1), True),
    "blocks": (qtensor((256, 384), (128, 128)), (2, 3), True),
    "smaller than a block": (qtensor((96, 256), (128, 128)), (1, 2), False),
    "MX": (qtensor((4, 64), (1, 32), dtype=E8M0), (4, 2), False),
    "E8M0, blocks of 16": (qtensor((4, 64), (1, 16), dtype=E8M0), (4, 4), False),
    "experts": (qtensor((3, 128, 256), (128, 128), batch=1), (3, 1, 2), True),
    "merged rows": (qtensor((2, 256, 128), (128, 128)), (2, 2, 1), True),
    "merged columns": (qtensor((4, 2, 64), (1, 32), cols=2), (4, 2, 2), False),
    "a block over dimensions": (
        qtensor((2, 4, 8, 64), (16, None)),
        (2, 2, 1, 1),
        False,
    ),
    "a scale for each column": (qtensor((4, 6, 8), (None, 1)), (1, 1, 8), False),
    "without block": (
        dataclasses.replace(qtensor((8, 64), (2, 16)), block=None),
        (4, 4),
        False,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_qarray(name):
    q, shape, is_same = SHAPES[name]
    array = to_qarray(q)
    assert array.qvalue.unsafe_buffer_pointer() == q.data.unsafe_buffer_pointer()
    assert array.scale.shape == shape
    assert array.scale.dtype == jnp.float32
    assert array.zero_point is None
    np.testing.assert_array_equal(dequantize(array), q.dequantize(jnp.float32))
    assert (array.qtype == "mxfp8") == (name == "MX")
    back = from_qarray(array, batch=1 if name == "experts" else 0)
    assert back.data.unsafe_buffer_pointer() == q.data.unsafe_buffer_pointer()
    np.testing.assert_array_equal(
        back.dequantize(jnp.float32), q.dequantize(jnp.float32)
    )
    assert back.power_2_scale == (name == "MX")
    if is_same:
        np.testing.assert_array_equal(back.scale_inv, q.scale_inv)
        assert back.block == q.block and back.scale_inv.dtype == q.scale_inv.dtype


def test_nothing_is_computed():
    """Under jit, scales of f32 are reshaped, and codes are what came."""
    q = SHAPES["merged rows"][0]

    def there_and_back(data, scale_inv):
        array = to_qarray(dataclasses.replace(q, data=data, scale_inv=scale_inv))
        back = from_qarray(array)
        operand = to_scaled_matmul(
            dataclasses.replace(
                q, data=data, scale_inv=jnp.ones((512, 4)), block=(1, 32)
            )
        )
        return back.data, back.scale_inv, *operand

    jaxpr = jax.make_jaxpr(there_and_back)(q.data, q.scale_inv).jaxpr
    # the ones
    assert {eqn.primitive.name for eqn in jaxpr.eqns} == {"reshape", "broadcast_in_dim"}
    assert jaxpr.outvars[0] is jaxpr.invars[0]


def scaled_matmul(a, b, a_scales, b_scales):
    """`jax.nn.scaled_matmul` by its documentation, in float64; JAX has it on GPUs
    alone.
    """
    assert jax.eval_shape(jax.nn.scaled_matmul, a, b, a_scales, b_scales).shape == (
        len(a),
        a.shape[1],
        b.shape[1],
    )
    a, b, a_scales, b_scales = (
        np.asarray(v).astype(np.float64) for v in (a, b, a_scales, b_scales)
    )
    a, b = (
        v * np.repeat(s, v.shape[-1] // s.shape[-1], -1)
        for v, s in ((a, a_scales), (b, b_scales))
    )
    return np.einsum("BMK,BNK->BMN", a, b)


@pytest.mark.parametrize(
    "recipe", [jaxfp8.MXFP8BlockScaling(), jaxfp8.Float8RowwiseScaling()]
)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_scaled_matmul(recipe, batch):
    """Of what our quantizers give, the product of our dot_general."""
    rng = np.random.default_rng(1)
    x, kernel = (
        jnp.asarray(rng.standard_normal((*batch, *size)).astype(np.float32))
        for size in ((6, 64), (8, 64))
    )
    quantize = [lambda v, q=q: q.quantize(v, None)[0] for q in recipe.quantizers()[:2]]
    quantize = [jax.vmap(f) if batch else f for f in quantize]
    (a, a_scales), (b, b_scales) = (
        to_scaled_matmul(f(v)) for f, v in zip(quantize, (x, kernel), strict=True)
    )
    y = scaled_matmul(a, b, a_scales, b_scales).reshape(*batch, 6, 8)
    numbers = ((len(batch) + 1,), (len(batch) + 1,)), (tuple(range(len(batch))),) * 2
    ours = jaxfp8.dot_general(x, kernel, numbers, recipe=recipe)
    # (K + 5) roundings of float32, as block_scaled_matmul says.
    absolute = scaled_matmul(
        *(jnp.abs(v.astype(jnp.float32)) for v in (a, b, a_scales, b_scales))
    ).reshape(y.shape)
    assert (np.abs(ours - y) <= 69 * 2.0**-24 * absolute).all()
    back = from_scaled_matmul(a, a_scales)
    assert back.data is a
    assert back.scale_inv is a_scales
    assert back.power_2_scale == (a_scales.dtype == E8M0)
    np.testing.assert_array_equal(
        back.dequantize(jnp.float32).reshape(x.shape),
        quantize[0](x).dequantize(jnp.float32),
    )
