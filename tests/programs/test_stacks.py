"""A loop stacks bytes for its backward, and no FP8, which XLA converts to float16 and
back on a CPU.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from draws import KEY
from parametrize import each_row

import jaxfp8
from jaxfp8.ops import _ffi
from programs.cases import MATMUL
from programs.linen import Stack

LAYERS, ROWS, WIDTH = 5, 32, 64
RECIPES = {
    "delayed": jaxfp8.DelayedScaling(),
    "delayed, margin": jaxfp8.DelayedScaling(margin=1),
    "current": jaxfp8.Float8CurrentScaling(),
    "row-wise": jaxfp8.Float8RowwiseScaling(),
    "block": jaxfp8.Float8BlockScaling(),
    "MXFP8": jaxfp8.MXFP8BlockScaling(),
    "by product": jaxfp8.ByProduct(
        jaxfp8.StaticScaling(224.0, 224.0, 1.0),
        jaxfp8.DelayedScaling(),
        jaxfp8.Float8CurrentScaling(),
    ),
}
FP8 = {"float8_e4m3fn"}
POLICIES = {
    "no remat": None,
    "codes saved": jaxfp8.checkpoint_policies.save_fp8_residuals,
}


def compiled(layer, policy=None, max_grad=True) -> str:
    """The program of a training step of layers in a scan."""
    layer = (
        layer if policy is None else nn.remat(layer, policy=policy, prevent_cse=False)
    )
    model, x = Stack(layer, LAYERS), jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    variables = model.init(KEY, x)

    def loss(variables, x):
        return jnp.sum(
            model.apply(
                jaxfp8.max_grad(variables) if max_grad else variables, x
            ).astype(jnp.float32)
            ** 2
        )

    return jax.jit(jax.grad(loss)).lower(variables, x).compile().as_text()


def dense(recipe):
    return functools.partial(
        jaxfp8.linen.Dense, WIDTH, recipe=recipe, use_bias=False, dtype=jnp.bfloat16
    )


def assert_no_stack_is_converted(program):
    assert (
        f"[{LAYERS},{ROWS},{WIDTH}]" in program
        or f"[{LAYERS},{WIDTH},{ROWS}]" in program
    ), "nothing is kept"
    for dtype in ("f16", "f8e4m3fn", "f8e5m2", "f8e8m0fnu"):
        assert f" {dtype}[{LAYERS}," not in program, dtype


@pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="needs the CPU library")
@each_row("policy", POLICIES)
@each_row("recipe", RECIPES)
def test_recipes(recipe, policy):
    assert_no_stack_is_converted(compiled(dense(recipe), policy))


@pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="needs the CPU library")
def test_state_that_the_loop_reads():
    assert_no_stack_is_converted(compiled(dense(RECIPES["delayed"]), max_grad=False))


@pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="needs the CPU library")
@pytest.mark.parametrize("fp8_residuals", [False, True])
def test_gated_mlp(fp8_residuals):
    recipe = jaxfp8.DelayedScaling(fp8_residuals=fp8_residuals)
    mlp = functools.partial(
        jaxfp8.linen.GatedMLP, 2 * WIDTH, recipe=recipe, norm="rms", dtype=jnp.bfloat16
    )
    assert_no_stack_is_converted(compiled(mlp))


@pytest.mark.parametrize(
    ("platform", "dtypes"), {"cpu": {"uint8"}, "gpu": FP8, "tpu": FP8}.items()
)
@pytest.mark.parametrize(
    "recipe", [jaxfp8.Float8CurrentScaling(), jaxfp8.Float8RowwiseScaling()], ids=str
)
def test_other_platforms_keep_fp8(recipe, platform, dtypes, monkeypatch):
    """There a mesh would gather a kernel's codes twice, once as bytes."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x = jnp.ones((16, 16))
    product = functools.partial(
        jaxfp8.dot_general, dimension_numbers=MATMUL, recipe=recipe
    )
    _, backward = jax.eval_shape(lambda *operands: jax.vjp(product, *operands), x, x)
    assert {
        str(leaf.dtype)
        for leaf in jax.tree.leaves(backward)
        if leaf.dtype.itemsize == 1
    } == dtypes
