"""Layers as Flax's lm1b has them, with what it puts around them: logical partitioning,
dropout, `sow`, a shared embedding, and blocks in `nn.scan` of `nn.remat`.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8
from jaxfp8 import OVERWRITE_WITH_GRADIENT as OWG

VOCABULARY, LENGTH, WIDTH = 32, 8, 16
RULES = [(".*", jaxfp8.DelayedScaling(amax_history_len=4))]
BF16 = {"dtype": jnp.bfloat16}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_have_jax")]


def boxed(*names):
    return {
        "kernel_init": nn.with_logical_partitioning(
            nn.initializers.xavier_uniform(), names
        )
    }


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        options = {
            "dropout_rate": 0.1,
            "deterministic": deterministic,
            **boxed("embed", "kv"),
            **BF16,
        }
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4, use_bias=False, name="attention", **options
        )
        x = x + attention(nn.LayerNorm(**BF16)(x))
        hidden = nn.relu(
            nn.Dense(2 * WIDTH, name="up", **boxed("embed", "mlp"), **BF16)(
                nn.LayerNorm(**BF16)(x)
            )
        )
        hidden = nn.Dropout(0.1)(hidden, deterministic=deterministic)
        self.sow("intermediates", "norm", jnp.linalg.norm(x.astype(jnp.float32)))
        return x + nn.Dense(WIDTH, name="down", **boxed("mlp", "embed"), **BF16)(
            hidden
        ), None


class Model(nn.Module):
    is_scan: bool = False

    @nn.compact
    def __call__(self, tokens, deterministic=False):
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens).astype(jnp.bfloat16)
        if self.is_scan:
            axes = {"params": 0, OWG: 0, "intermediates": 0}
            options = {
                "in_axes": nn.broadcast,
                "length": 2,
                "metadata_params": {nn.PARTITION_NAME: "layers"},
            }
            block = nn.remat(Block, prevent_cse=False, static_argnums=(2,))
            stack = nn.scan(
                block,
                variable_axes=axes,
                split_rngs={"params": True, "dropout": True},
                **options,
            )
            x, _ = stack(name="blocks")(x, deterministic)
        else:
            for i in range(2):
                x, _ = Block(name=f"block{i}")(x, deterministic)
        return embed.attend(x.astype(jnp.float32)) / np.sqrt(WIDTH)


def batch(step):
    return jnp.asarray(np.random.default_rng(step).integers(1, VOCABULARY, (4, LENGTH)))


def init(model):
    variables = jax.jit(model.init)(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch(0)
    )
    return {name: tree for name, tree in variables.items() if name != "intermediates"}


def train(model, variables, steps=2):
    """Losses, and the last variables, of steps that lm1b's `train_step` takes too:
    dropout by step, adam.
    """
    state = jaxfp8.linen.TrainState.create(
        apply_fn=model.apply, params=variables, tx=optax.adam(1e-2)
    )

    @jax.jit
    def step(state, tokens):
        def loss(variables):
            key = jax.random.fold_in(jax.random.key(1), state.step)
            logits = state.apply_fn(variables, tokens[:, :-1], rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            ).mean()

        value, grads = jaxfp8.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for i in range(steps):
        state, loss = step(state, batch(i))
        losses.append(float(loss))
    return losses, state.params


def test_boxes_of_logical_partitioning():
    """Parameters keep their boxes and get their shardings; state has none, so it is
    whole on every device.
    """
    model = jaxfp8.linen.quantize(Model(), RULES)
    variables = init(model)
    specs = nn.logical_to_mesh(
        nn.get_partition_spec(variables),
        [("embed", None), ("mlp", "tensor"), ("kv", "tensor")],
    )
    assert specs["params"]["block0"]["up"]["kernel"] == jax.P(None, "tensor")
    assert set(jax.tree.leaves(specs[OWG], is_leaf=lambda x: isinstance(x, jax.P))) == {
        jax.P()
    }
    losses, trained = train(model, variables)
    unboxed_losses, unboxed = train(model, nn.meta.unbox(variables))
    assert isinstance(
        trained["params"]["block0"]["up"]["kernel"], nn.LogicallyPartitioned
    )
    assert losses == unboxed_losses
    chex.assert_trees_all_equal(nn.meta.unbox(trained), unboxed)


def test_scan_over_blocks():
    """State is stacked, and each row is that of its block in the model without a
    scan.
    """
    plain, scanned = (
        jaxfp8.linen.quantize(Model(is_scan), RULES) for is_scan in (False, True)
    )
    variables = init(plain)
    of_scan = init(scanned)
    assert of_scan["params"]["blocks"]["up"]["kernel"].names == (
        "layers",
        "embed",
        "mlp",
    )
    params = nn.meta.unbox(variables["params"])
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(params[f"block{i}"] for i in range(2))
    )
    stacked = {
        "params": {"blocks": stacked, "embed": params["embed"]},
        OWG: of_scan[OWG],
    }

    def state_of(model, variables):
        def loss(variables):
            y, aside = model.apply(
                variables, batch(0), deterministic=True, mutable=["intermediates"]
            )
            return jnp.mean(y**2), aside["intermediates"]

        gradient, aside = jax.jit(jax.grad(loss, has_aux=True))(variables)
        return jaxfp8.update_state(variables, gradient)[OWG], aside

    (got, aside) = state_of(scanned, stacked)
    (wanted, _) = state_of(plain, nn.meta.unbox(variables))
    assert aside["blocks"]["norm"][0].shape == (2,)
    for i in range(2):
        # amaxes of bf16 values, which may round to either neighbour: 2**-8 each way
        for name in ("input", "kernel"):
            leaf = f"{name}_amax_history"
            of_block = wanted[f"block{i}"]["up"]["Fp8DotGeneral_0"][leaf]
            np.testing.assert_allclose(
                got["blocks"]["up"]["Fp8DotGeneral_0"][leaf][i], of_block, rtol=2**-7
            )
