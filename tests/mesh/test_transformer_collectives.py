"""What a transformer of 2 layers sends in one FSDP training step on 8 devices, in bf16 and in jaxfp8.

XLA's CPU compiler widens bf16 to f32 before it sends it, so bytes are counted as if it had not: 2 a number.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8
from mesh import cases, hlo

LAYERS, WIDTH, HEADS, BATCH, LENGTH = 2, 64, 2, 8, 16
PRODUCTS = 4 * LAYERS
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT


def by_batch(x):
    """Cut as data is; without this XLA also cuts activations like the kernels they meet."""
    return lax.with_sharding_constraint(x, P(cases.AXES))


class Block(nn.Module):
    """Pre-norm attention and MLP, in the form of a scan's body."""

    dot_general_cls: Any

    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.dot_general_cls)
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
        qkv = dense(3 * WIDTH, name="qkv")(norm()(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        attended = jax.nn.dot_product_attention(*jnp.unstack(qkv, axis=2), is_causal=True).reshape(x.shape)
        x = by_batch(x + dense(WIDTH, name="out")(attended))
        hidden = nn.gelu(by_batch(dense(4 * WIDTH, name="up")(norm()(x))))
        return by_batch(x + dense(WIDTH, name="down")(hidden)), None


class Blocks(nn.Module):
    dot_general_cls: Any
    is_scan: bool

    @nn.compact
    def __call__(self, x):
        if self.is_scan:
            block = nn.scan(Block, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True}, length=LAYERS)
            return block(self.dot_general_cls)(x, None)[0]
        for _ in range(LAYERS):
            x, _ = Block(self.dot_general_cls)(x, None)
        return x


@functools.cache
def compiled(dot_general_cls, is_scan) -> str:
    """A training step with all kernels cut along their rows."""
    mesh, model = cases.mesh(), Blocks(dot_general_cls, is_scan)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P(cases.AXES)))

    def placed(path, leaf):
        spec = P(*[None] * (leaf.ndim - 2), cases.AXES) if path[-1].key == "kernel" else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def step(variables, x):
        def loss(variables):
            return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

        value, gradient = jax.value_and_grad(loss)(variables)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, variables, gradient)
        return (new | {OWG: jaxfp8.update_state(variables, gradient)[OWG]} if OWG in new else new), value

    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        shapes = jax.eval_shape(model.init, jax.random.key(0), x)
        variables = jax.tree_util.tree_map_with_path(placed, shapes)
        results = jax.tree.map(lambda leaf: leaf.sharding, variables), NamedSharding(mesh, P())
        return jax.jit(step, out_shardings=results).lower(variables, x).compile(hlo.QUICKLY).as_text()


@pytest.mark.parametrize("is_scan", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["layers", "scan"])
def test_a_training_step(is_scan):
    """All amaxes in one reduction, in a scan one a body; kernels gathered as codes; beside them what bf16 sends."""
    text = compiled(jaxfp8.Fp8DotGeneral, is_scan)
    sent, in_bf16 = hlo.collectives(text), hlo.collectives(compiled(None, is_scan))
    amaxes = [c for c in sent if c.is_amax]
    assert sorted(len(c.results) for c in amaxes) == ([4, 8] if is_scan else [3 * PRODUCTS])  # of grad; of x and kernel
    assert not is_scan or {c.computation for c in amaxes} <= hlo.loop_bodies(text)
    assert {group for c in amaxes for group in c.groups} == {frozenset(range(8))}

    gathers, wide = ([c for c in all_of if c.kind == "all-gather"] for all_of in (sent, in_bf16))
    assert {dtype for c in gathers for dtype, _ in c.results} == {"u8"}
    # On CPUs a kernel is gathered for fprop and again for dgrad; on GPUs once: `aot/test_meshes.py`.
    assert len(gathers) == (len(wide) if is_scan else 2 * len(wide)) == 2 * PRODUCTS // (LAYERS if is_scan else 1)
    widened = {"f32": 2, "f16": 1}  # what a number of bf16 has
    as_bf16 = sum(c.bytes // widened[c.results[0][0]] for c in wide)
    assert sum(c.bytes for c in gathers) * (2 if is_scan else 1) == as_bf16

    rest, others = (
        [(c.kind, c.bytes) for c in all_of if c.kind != "all-gather" and not c.is_amax] for all_of in (sent, in_bf16)
    )
    assert rest == others and (is_scan or len(rest) == 1)
