"""The layers of Flax's lm1b and wmt examples, with what these put around them: logical partitioning, dropout, packed
masks, logits of the shared embedding, a decode cache, `sow`, and blocks in `nn.remat` and `nn.scan`.

With `FLAX_CHECKOUT=<a checkout of google/flax>` the example's own model trains too.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8
from jaxfp8 import OVERWRITE_WITH_GRADIENT

VOCABULARY, LENGTH, WIDTH = 32, 8, 16
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
RULES = [(".*", RECIPE)]


@pytest.fixture(autouse=True)
def promotion_as_clients_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def partitioned(init, *names):
    return nn.with_logical_partitioning(init, names)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        uniform, zeros = nn.initializers.xavier_uniform(), nn.initializers.zeros
        hidden = nn.Dense(
            2 * WIDTH,
            dtype=jnp.bfloat16,
            kernel_init=partitioned(uniform, "embed", "mlp"),
            bias_init=partitioned(zeros, "mlp"),
        )(x)
        hidden = nn.Dropout(0.1)(nn.relu(hidden), deterministic=deterministic)
        return nn.Dense(WIDTH, dtype=jnp.bfloat16, kernel_init=partitioned(uniform, "mlp", "embed"))(hidden)


class Block(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x, mask, deterministic):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4,
            dtype=jnp.bfloat16,
            use_bias=False,
            dropout_rate=0.1,
            broadcast_dropout=False,
            deterministic=deterministic,
            decode=self.decode,
            kernel_init=partitioned(nn.initializers.xavier_uniform(), "embed", "kv"),
            name="attention",
        )
        x = x + attention(nn.LayerNorm(dtype=jnp.bfloat16)(x), mask=mask)
        x = x + Mlp(name="mlp")(nn.LayerNorm(dtype=jnp.bfloat16)(x), deterministic)
        self.sow("intermediates", "norm", jnp.linalg.norm(x.astype(jnp.float32)))
        return x, None


class Model(nn.Module):
    """`form` is how the two blocks are put together: "plain", "remat" or "scan" (of rematerialized blocks)."""

    form: str = "plain"
    decode: bool = False

    @nn.compact
    def __call__(self, tokens, deterministic=False):
        embed = nn.Embed(
            VOCABULARY, WIDTH, embedding_init=partitioned(nn.initializers.normal(1.0), "vocab", "embed"), name="embed"
        )
        mask = None
        if not self.decode:
            mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens))
        x = embed(tokens).astype(jnp.bfloat16)
        block = Block if self.form == "plain" else nn.remat(Block, prevent_cse=False, static_argnums=(3,))
        if self.form == "scan":
            stack = nn.scan(
                block,
                variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0, "intermediates": 0, "cache": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, nn.broadcast),
                length=2,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = stack(self.decode, name="blocks")(x, mask, deterministic)
        else:
            for i in range(2):
                x, _ = block(self.decode, name=f"block{i}")(x, mask, deterministic)
        return embed.attend(x.astype(jnp.float32)) / np.sqrt(WIDTH)


def batch(step):
    return jnp.asarray(np.random.default_rng(step).integers(1, VOCABULARY, (4, LENGTH)))


def train(model, variables, steps=3, batches=batch):
    """Losses, and the last variables, of steps that lm1b's `train_step` takes too: dropout by step, adam."""
    state = jaxfp8.linen.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))

    @jax.jit
    def step(state, tokens):
        def loss(variables):
            key = jax.random.fold_in(jax.random.key(1), state.step)
            logits = state.apply_fn(variables, tokens[:, :-1], rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jaxfp8.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for i in range(steps):
        state, loss = step(state, batches(i))
        losses.append(float(loss))
    return losses, state.params


def init(model):
    variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch(0))
    return {name: tree for name, tree in variables.items() if name != "intermediates"}


def equal(a, b):
    chex.assert_trees_all_equal(nn.meta.unbox(a), nn.meta.unbox(b))


@pytest.mark.slow
def test_boxes_of_logical_partitioning():
    """Parameters keep their boxes and get their shardings; state has none, so it is whole on every device."""
    model = jaxfp8.linen.quantize(Model(), RULES)
    variables = init(model)
    assert isinstance(variables["params"]["block0"]["mlp"]["Dense_0"]["kernel"], nn.LogicallyPartitioned)
    specs = nn.logical_to_mesh(nn.get_partition_spec(variables), [("embed", None), ("mlp", "tensor"), ("kv", "tensor")])
    assert specs["params"]["block0"]["mlp"]["Dense_0"]["kernel"] == jax.P(None, "tensor")
    assert set(jax.tree.leaves(specs[OVERWRITE_WITH_GRADIENT], is_leaf=lambda x: isinstance(x, jax.P))) == {jax.P()}
    boxed_losses, boxed = train(model, variables, steps=2)
    losses, unboxed = train(model, nn.meta.unbox(variables), steps=2)
    assert isinstance(boxed["params"]["block0"]["mlp"]["Dense_0"]["kernel"], nn.LogicallyPartitioned)
    assert boxed_losses == losses
    equal(boxed, unboxed)


@pytest.mark.slow
def test_forms():
    """Remat trains as none does; a scan over layers has their state stacked, each layer's what it is without."""
    plain = jaxfp8.linen.quantize(Model(), RULES)
    variables = init(plain)
    losses, trained = train(plain, variables)
    remat_losses, remat = train(jaxfp8.linen.quantize(Model("remat"), RULES), variables)
    # The same dropout: its keys are by path. XLA may fuse what runs again in another way, so that sums in bf16 and f32
    # round elsewhere, at most 2**-8 of each term.
    np.testing.assert_allclose(remat_losses, losses, rtol=2**-8)
    histories = remat[OVERWRITE_WITH_GRADIENT]["block1"]["mlp"]["Dense_0"]["Fp8DotGeneral_0"]["input_amax_history"]
    assert histories.shape == (4,) and (histories[:3] > 0).sum() + (histories[3] > 0) == 3

    scanned = jaxfp8.linen.quantize(Model("scan"), RULES)
    of_scan = init(scanned)
    kernel = of_scan["params"]["blocks"]["mlp"]["Dense_0"]["kernel"]
    assert kernel.names == ("layers", "embed", "mlp")
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(nn.meta.unbox(variables["params"])[f"block{i}"] for i in range(2))
    )
    params = nn.meta.unbox(of_scan["params"]) | {
        "blocks": stacked,
        "embed": nn.meta.unbox(variables["params"]["embed"]),
    }
    state = of_scan[OVERWRITE_WITH_GRADIENT]

    def loss(model, variables):
        return jnp.mean(model.apply(variables, batch(0), deterministic=True) ** 2)

    got = jax.grad(lambda v: loss(scanned, v))({"params": params, OVERWRITE_WITH_GRADIENT: state})
    wanted = jax.grad(lambda v: loss(plain, v))(nn.meta.unbox(variables))
    for i in range(2):
        for name in ("input", "kernel"):  # amaxes of bf16 values, which may round to either neighbour: 2**-8 each way
            of = [
                tree[f"{name}_amax_history"]
                for tree in (
                    got[OVERWRITE_WITH_GRADIENT]["blocks"]["mlp"]["Dense_0"]["Fp8DotGeneral_0"],
                    wanted[OVERWRITE_WITH_GRADIENT][f"block{i}"]["mlp"]["Dense_0"]["Fp8DotGeneral_0"],
                )
            ]
            np.testing.assert_allclose(of[0][i], of[1], rtol=2**-7)
