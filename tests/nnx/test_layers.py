"""Fp8DotGeneral and Fp8Einsum in NNX's layers: shared instances, frozen kernels,
copies, what is refused, sharding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from cpu_mesh import mesh_of
from draws import normal
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import Fp8DotGeneral, Fp8Einsum, OverwriteWithGradient

from .cases import (
    RECIPE,
    H,
    K,
    M,
    N,
    assert_state,
    operands,
    use,
)


def test_the_type_is_registered():
    """So that `nnx.bridge` makes such variables of the collection, and the other way
    round.
    """
    assert (
        nnx.variable_type_from_name("_overwrite_with_gradient") is OverwriteWithGradient
    )
    assert (
        nnx.variable_name_from_type(OverwriteWithGradient)
        == jaxfp8.OVERWRITE_WITH_GRADIENT
    )


def test_frozen_kernel():
    """LoRA: the gradient is of the low-rank part and of the FP8 state; the kernel
    stays, the state moves.
    """
    layer = nnx.LoRALinear(
        K,
        N,
        lora_rank=2,
        use_bias=False,
        dot_general=Fp8DotGeneral(RECIPE),
        rngs=nnx.Rngs(0),
    )
    (x,), (grad,) = operands(0, 1)
    kernel = np.asarray(layer.kernel.get_value())
    wrt = nnx.Any(nnx.LoRAParam, OverwriteWithGradient)
    optimizer = jaxfp8.nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.LoRAParam)
    optimizer.update(
        layer, jaxfp8.nnx.grad(use, argnums=nnx.DiffState(0, wrt))(layer, x, grad)
    )
    assert_state(
        layer.dot_general,
        oracle.dense_step(x, kernel, grad, oracle.LayerState.init(H)).state,
        "frozen",
    )
    assert layer.lora.lora_b.get_value().any()
    assert np.array_equal(layer.kernel.get_value(), kernel)


# ------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "cls", [Fp8DotGeneral, lambda: Fp8DotGeneral(RECIPE)], ids=["class", "function"]
)
def test_dot_general_cls_is_refused(cls):
    """NNX calls it in each forward pass: the state would be new each time, and silently
    of no use.
    """
    layer = nnx.LinearGeneral(K, N, dot_general_cls=cls, rngs=nnx.Rngs(0))
    for forward in (
        layer,
        nnx.jit(lambda x: layer(x)),
        jax.grad(lambda x: layer(x).sum()),
    ):
        with pytest.raises(
            TypeError, match="dot_general_cls.*dot_general=Fp8DotGeneral"
        ):
            forward(jnp.ones((M, K)))


def test_a_class_is_refused():
    """What works in Linen, where `dot_general_cls` is the argument."""
    linear = nnx.Linear(K, N, dot_general=Fp8DotGeneral, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError,
        match=r"^Fp8DotGeneral: .*give it an instance, Fp8DotGeneral\(recipe\)",
    ):
        linear(jnp.ones((M, K)))
    einsum = nnx.Einsum("mk,kn->mn", (K, N), einsum_op=Fp8Einsum, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError, match=r"^Fp8Einsum: .*give it an instance, Fp8Einsum\(recipe\)"
    ):
        einsum(jnp.ones((M, K)))


def test_einsum_out_sharding():
    """On a mesh with explicit axes, as Gemma asks for it: the kernel's labels come
    before and after x's.
    """
    mesh = mesh_of("Explicit", data=2, model=2)
    x = normal(4, 3, 8)

    def make():
        product = Fp8Einsum(RECIPE)
        return nnx.Einsum(
            "btd,sndh->sbtnh", (3, 2, 8, 4), einsum_op=product, rngs=nnx.Rngs(0)
        )

    layer = make()
    wanted = layer(jnp.asarray(x))
    with jax.set_mesh(mesh):
        put = make()
        put.kernel.set_value(jax.device_put(layer.kernel.get_value(), P(None, "model")))
        y = put(
            jax.device_put(x, P("data")), out_sharding=P(None, "data", None, "model")
        )
        empty = put(jnp.ones((0, 3, 8)), out_sharding=P(None, "data"))
    assert y.sharding.spec == P(None, "data", None, "model", None)
    assert empty.shape == (3, 0, 3, 2, 4) and empty.sharding.spec[1] == "data"
    np.testing.assert_array_equal(y, wanted)


def test_tabulate():
    """Flax traces each public method of a module that runs, and prints its arguments,
    but no recipe.
    """
    model = nnx.Sequential(
        nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0)),
        nnx.Einsum("bi,io->bo", (32, 32), rngs=nnx.Rngs(0)),
        jaxfp8.nnx.Linear(32, 32, rngs=nnx.Rngs(0)),
    )
    jaxfp8.quantize(model, [(".*", RECIPE)])
    table = nnx.tabulate(model, jnp.ones((32, 32)), console_kwargs={"width": 200})
    assert "Sequential Summary" in table and "float32" in table
