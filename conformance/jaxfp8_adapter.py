"""jaxfp8 as check.py calls it: every function takes numpy arrays and returns numpy
arrays by name.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8
from jaxfp8 import ops

DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def codes_of(array):
    return np.asarray(array).view(np.uint8)


def quantize(x, scale, format):
    codes, amax = ops.quantize(x, scale, DTYPES[format])
    return {"codes": codes_of(codes), "amax": np.asarray(amax).reshape(())}


def dequantize(codes, scale_inv, format):
    return {
        "values": np.asarray(
            ops.dequantize(codes.view(DTYPES[format]), scale_inv, jnp.float32)
        )
    }


def delayed_scaling(x, amax_history, scale_inv, format, margin):
    formats = {"e4m3": jaxfp8.Format.E4M3, "e5m2": jaxfp8.Format.E5M2}
    recipe = jaxfp8.DelayedScaling(
        amax_history_len=len(amax_history), margin=margin, fp8_format=formats[format]
    )
    quantizer = recipe.quantizers()[0]
    state = jaxfp8.recipes.QuantizerState(
        jnp.asarray(amax_history), jnp.asarray(scale_inv).reshape(1)
    )
    q, after = quantizer.quantize(jnp.asarray(x), state)
    return {
        "codes": codes_of(q.data),
        "amax_history": np.asarray(after.amax_history),
        "scale_inv": np.asarray(after.scale).reshape(()),
    }


def quantize_blocks(x, format, block, scale, rounding):
    codes, scales = ops.quantize_blocks(
        x, DTYPES[format], block=tuple(block), scale=scale, rounding=rounding
    )
    return {
        "codes": codes_of(codes),
        "scales": codes_of(scales) if scale == "e8m0" else np.asarray(scales),
    }


def scaled_matmul(a, b, a_scale_inv, b_scale_inv, formats):
    a, b = (
        codes.view(DTYPES[name]) for codes, name in zip((a, b), formats, strict=True)
    )
    return {
        "y": np.asarray(
            ops.scaled_matmul(a, b, a_scale_inv, b_scale_inv, out_dtype=jnp.float32)
        )
    }


def train_step(x, kernel, grad, **state):
    names = ("input", "kernel", "output_grad")
    leaves = [
        (state[f"{name}_amax_history"], state[f"{name}_scale_inv"].reshape(1))
        for name in names
    ]
    before = jaxfp8.DotGeneralState(
        *(jaxfp8.recipes.QuantizerState(*map(jnp.asarray, pair)) for pair in leaves)
    )
    recipe = jaxfp8.DelayedScaling(amax_history_len=len(leaves[0][0]))

    def product(x, kernel, state):
        return jaxfp8.dot_general(
            x, kernel, (((1,), (0,)), ((), ())), recipe=recipe, state=state
        )

    y, backward = jax.vjp(product, jnp.asarray(x), jnp.asarray(kernel), before)
    x_grad, kernel_grad, after = backward(jnp.asarray(grad))
    result = {
        "y": np.asarray(y),
        "x_grad": np.asarray(x_grad),
        "kernel_grad": np.asarray(kernel_grad),
    }
    for name in names:
        quantizer = getattr(after, name)
        result[f"{name}_amax_history"] = np.asarray(quantizer.amax_history)
        result[f"{name}_scale_inv"] = np.asarray(quantizer.scale).reshape(())
    return result
