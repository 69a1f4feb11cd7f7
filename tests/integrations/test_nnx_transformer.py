"""The layers of Flax's Gemma in NNX, trained as its `train.py` does: einsums whose result has the kernel's dimensions
first, an output sharding for each, gradients of a split model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jaxfp8
import jaxfp8.nnx

WIDTH, HEADS, KV_HEADS, HEAD = 16, 4, 2, 4
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)


@pytest.fixture(autouse=True)
def promotion_as_clients_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Model(nnx.Module):
    """One block: grouped attention by einsums, and a gated MLP. `sharded` for a mesh with axes fsdp and tp."""

    def __init__(self, sharded=False):
        rngs = nnx.Rngs(0)
        spec = (lambda *axes: P(*axes)) if sharded else (lambda *axes: None)
        self.acts = {"q": spec("fsdp", None, "tp"), "kv": spec(None, "fsdp", None, "tp"), "y": spec("fsdp", None, "tp")}

        def einsum(eqn, shape, *axes):
            return nnx.Einsum(eqn, shape, dtype=jnp.bfloat16, kernel_metadata={"out_sharding": spec(*axes)}, rngs=rngs)

        self.q_einsum = einsum("BTD,NDH->BTNH", (HEADS, WIDTH, HEAD), "tp", "fsdp")
        self.kv_einsum = einsum("BTD,CKDH->CBTKH", (2, KV_HEADS, WIDTH, HEAD), None, "tp", "fsdp")
        self.out_einsum = einsum("BTNH,NHD->BTD", (HEADS, HEAD, WIDTH), "tp", None, "fsdp")
        up = {"out_sharding": spec("fsdp", "tp")}
        self.up = nnx.Linear(WIDTH, 32, dtype=jnp.bfloat16, use_bias=False, kernel_metadata=up, rngs=rngs)

    def __call__(self, x):
        query = self.q_einsum(x, out_sharding=self.acts["q"])
        key, value = self.kv_einsum(x, out_sharding=self.acts["kv"])
        query = query.reshape((*query.shape[:2], KV_HEADS, HEADS // KV_HEADS, HEAD))
        probabilities = jax.nn.softmax(jnp.einsum("BTKGH,BSKH->BTKGS", query, key), axis=-1)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", probabilities, value)
        x = x + self.out_einsum(encoded.reshape((*x.shape[:2], HEADS, HEAD)), out_sharding=self.acts["y"])
        return self.up(x, out_sharding=self.acts["y"])


def train(sharded, steps=2):
    """The loss of each step, and the FP8 state after the last."""
    model = jaxfp8.nnx.quantize(Model(sharded), [(".*", RECIPE)])
    optimizer = jaxfp8.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        graphdef, params, rest = nnx.split(model, jaxfp8.nnx.trainable, ...)
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(nnx.merge(graphdef, params, rest)(x) ** 2))(params)
        optimizer.update(model, grads)
        return loss

    losses = []
    for i in range(steps):
        x = jax.random.normal(jax.random.key(i), (4, 8, WIDTH), jnp.bfloat16)
        x = jax.device_put(x, P("fsdp", None, "tp")) if sharded else x
        losses.append(float(step(model, optimizer, x)))
    return losses, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, jaxfp8.nnx.OverwriteWithGradient)))


@pytest.mark.slow
def test_an_explicit_mesh_is_as_one_device():
    losses, state = train(False)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharded_losses, sharded_state = train(True)
    # Other orders of sums round other bf16 values: 2**-8 of each, averaged; amaxes are single values, a few of them on.
    np.testing.assert_allclose(sharded_losses, losses, rtol=2**-6)
    assert set(state) == {"q_einsum", "kv_einsum", "out_einsum", "up"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-4), sharded_state, state)
    for history in (state["kv_einsum"]["einsum_op"][f"{name}_amax_history"] for name in ("input", "kernel")):
        assert (history > 0).tolist() == [True, False, False, True]
