"""What a transformer of 2 layers sends in one training step on 8 devices: in bf16, in jaxfp8 and in Flax's FP8.

`pytest -s` prints the table. XLA's CPU compiler widens bf16 to f32 and the FP8 that it sees to f16 before it sends
them, so bytes are counted as if it had not: 2 a number in bf16, 1 in FP8.
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
ARMS = {"bf16": None, "jaxfp8": jaxfp8.Fp8DotGeneral, "flax": nn.Fp8DirectDotGeneralOp}
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
        query, key, value = jnp.unstack(qkv, axis=2)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
        x = by_batch(x + dense(WIDTH, name="out")(attended))
        hidden = nn.gelu(by_batch(dense(4 * WIDTH, name="up")(norm()(x))))
        return by_batch(x + dense(WIDTH, name="down")(hidden)), None


class Blocks(nn.Module):
    dot_general_cls: Any
    is_scan: bool

    @nn.compact
    def __call__(self, x):
        if self.is_scan:
            axes = {"params": 0, OWG: 0}
            block = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
            return block(self.dot_general_cls)(x, None)[0]
        for _ in range(LAYERS):
            x, _ = Block(self.dot_general_cls)(x, None)
        return x


@functools.cache
def compiled(arm, layout, is_scan=False) -> str:
    """A training step; `layout` is "dp", or "fsdp" with all kernels cut along their rows."""
    mesh, model = cases.mesh(), Blocks(ARMS[arm], is_scan)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P(cases.AXES)))

    def placed(path, leaf):
        is_cut = layout == "fsdp" and path[-1].key == "kernel"
        spec = P(*[None] * (leaf.ndim - 2), cases.AXES) if is_cut else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def step(variables, x):
        def loss(variables):
            return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

        value, gradient = jax.value_and_grad(loss)(variables)
        new = {"params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradient["params"])}
        if arm == "jaxfp8":
            new[OWG] = jaxfp8.update_state(variables, gradient)[OWG]
        elif arm == "flax":
            new[OWG] = gradient[OWG]
        return new, value

    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        shapes = jax.eval_shape(model.init, jax.random.key(0), x)
        variables = jax.tree_util.tree_map_with_path(placed, shapes)
        results = jax.tree.map(lambda leaf: leaf.sharding, variables), NamedSharding(mesh, P())
        return jax.jit(step, out_shardings=results).lower(variables, x).compile(hlo.QUICKLY).as_text()


def gathers(arm, *options) -> list:
    return [c for c in hlo.collectives(compiled(arm, *options)) if c.kind == "all-gather"]


def amaxes(arm, *options) -> list:
    return [c for c in hlo.collectives(compiled(arm, *options)) if c.is_amax]


def gathered_bytes(arm, *options) -> int:
    widened = {"f32": 2, "f16": 2, "u8": 1}  # to what XLA's CPU compiler sends for bf16, for FP8, and for bytes
    return sum(c.bytes // widened[c.results[0][0]] for c in gathers(arm, *options))


LAYOUTS = pytest.mark.parametrize("layout", [pytest.param("dp", marks=pytest.mark.slow), "fsdp"])


@LAYOUTS
def test_one_amax_reduction_a_step(layout):
    """Of all layers; Flax's are one too, in a program as simple as this."""
    table(layout)
    (ours,) = amaxes("jaxfp8", layout)
    of_each = 3 if layout == "fsdp" else 2  # whole kernels need none
    assert ours.results == (("f32", (1,)),) * of_each * PRODUCTS
    assert ours.groups == (frozenset(range(8)),)
    assert len(amaxes("flax", layout)) == 1 and not amaxes("bf16", layout)


@LAYOUTS
def test_nothing_else_is_sent(layout):
    """Beside the amaxes: the sums of gradients, of the bytes they have in bf16; kernels as codes, none if whole."""
    sums = {
        arm: [
            (c.kind, c.bytes)
            for c in hlo.collectives(compiled(arm, layout))
            if c.kind != "all-gather" and not c.is_amax
        ]
        for arm in ARMS
    }
    assert sums["jaxfp8"] == sums["bf16"] == sums["flax"] and len(sums["bf16"]) == 1
    assert {dtype for c in gathers("jaxfp8", layout) for dtype, _ in c.results} == (
        {"u8"} if layout == "fsdp" else set()
    )


def test_gathered_kernels():
    """On CPUs each kernel is gathered for fprop and again for dgrad; on GPUs once: `aot/test_meshes.py`."""
    assert len(gathers("bf16", "fsdp")) == PRODUCTS
    assert len(gathers("jaxfp8", "fsdp")) == 2 * PRODUCTS
    assert gathered_bytes("jaxfp8", "fsdp") == gathered_bytes("bf16", "fsdp")


@pytest.mark.slow
def test_in_a_scan_over_layers():
    """One reduction in the body of the forward and one in that of the backward, and half of the bytes of bf16."""
    table("fsdp", True)
    text = compiled("jaxfp8", "fsdp", True)
    inside = hlo.loop_bodies(text)
    where = [c.computation for c in amaxes("jaxfp8", "fsdp", True)]
    assert len(where) == len(set(where)) == 2 and set(where) <= inside
    assert sorted(len(c.results) for c in amaxes("jaxfp8", "fsdp", True)) == [4, 8]  # of grad; of x and kernel
    assert len(amaxes("flax", "fsdp", True)) == 2
    assert len(gathers("jaxfp8", "fsdp", True)) == len(gathers("bf16", "fsdp", True)) == 2 * PRODUCTS // LAYERS
    assert 2 * gathered_bytes("jaxfp8", "fsdp", True) == gathered_bytes("bf16", "fsdp", True)


def table(*options):
    """Prints what each arm sends; in a scan what the program says, not how often it runs."""
    print()
    for arm in ARMS:
        found = hlo.collectives(compiled(arm, *options))
        sent = {
            "collectives": len(found),
            "of amaxes": len(amaxes(arm, *options)),
            "gathers": len(gathers(arm, *options)),
            "bytes gathered": gathered_bytes(arm, *options),
            "bytes reduced": sum(c.bytes for c in found if c.kind == "all-reduce"),
        }
        print(f"{arm:7}", *options, *(f"{what}: {count:<8}" for what, count in sent.items()))
