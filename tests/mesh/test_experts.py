"""Experts on the devices of a mesh axis: one device's bits, but for the gradient of
tokens, which travels as codes; and what is sent.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from draws import normal
from equality import assert_same_bits
from flax import nnx
from jax.sharding import PartitionSpec as P
from linen.expert_cases import COUNT, F32, WIDTH, case, loop
from linen.test_experts import (
    GATED,
    HIGH,
    KEY,
    OWG,
    RECIPE,
    RELU,
    next_states,
    tokens,
    used_variables,
    variables_of,
)
from nnx.cases import of_nnx
from recipes.cases import RECIPES

from mesh import hlo

BF16 = oracle.BF16
SPECS = {"params": P("e"), OWG: P()}
E5M2_MAX, E5M2_SMALLEST = 57344, 2.0**-16


def cut(run, axes, variables, check_vma=True, specs=SPECS):
    """`run(variables, *tokens) -> (results of tokens, like variables)` on a mesh with
    the axis `e`; all its axes cut the tokens.
    """
    specs = {name: specs[name] for name in variables}
    cut = P(tuple(axes))
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh_of(**axes),
            in_specs=(specs, *[cut] * 4),
            out_specs=(cut, specs),
            check_vma=check_vma,
        )
    )


def gradients(apply, grad=jax.grad):
    """A step: `{y, gradients of x and weights}`, and the gradient of variables."""

    def run(variables, x, expert, weights, ct):
        def loss(variables, x, weights):
            y = apply(variables, x, expert, weights)
            return jnp.sum(y.astype(F32) * ct), y

        (dvariables, dx, dweights), y = grad(loss, argnums=(0, 1, 2), has_aux=True)(
            variables, x, weights
        )
        return {"y": y, "x": dx, "weights": dweights}, dvariables

    return run


@pytest.mark.parametrize(
    "axes, dtype, check_vma",
    [
        ({"data": 2, "e": 2}, BF16, True),
        ({"e": 2}, None, False),
    ],
)
def test_a_loop_over_experts(axes, dtype, check_vma):
    """Operands are exact in FP8: all but the gradient of x is the loop's to the bit."""
    c = case("no expert")
    recipe = RECIPE
    if not check_vma:
        recipe = dataclasses.replace(RECIPE, pipeline_axes=())
    layer = RELU.clone(recipe=recipe, dtype=dtype, expert_axis="e")
    # `init` outside of the shard_map makes all experts
    variables = variables_of(layer, c)
    dtype = np.dtype(dtype or F32)
    run = cut(gradients(layer.apply), axes, variables, check_vma)
    results, dvariables = run(variables, c.x.astype(dtype), c.expert, c.weights, c.grad)
    results |= {name: tree["kernel"] for name, tree in dvariables["params"].items()}
    wanted = loop(c)
    dx, wanted_dx = (np.asarray(r.pop("x"), np.float64) for r in (results, wanted))
    for name, expected in wanted.items():
        np.testing.assert_array_equal(results[name].astype(F32), expected, name)
    state = {name: tree["Fp8RaggedDot_0"] for name, tree in dvariables[OWG].items()}
    assert_same_bits(state, next_states(c), "state")
    # The gradient of each row is rounded to two bits, and in bfloat16 once more, and
    # once in the sum of a token's rows.
    rows = [
        loop(
            dataclasses.replace(
                c, expert=c.expert[:, i : i + 1], weights=c.weights[:, i : i + 1]
            )
        )["x"]
        for i in range(2)
    ]
    smallest = np.max(np.abs(rows)) / E5M2_MAX * E5M2_SMALLEST
    bound = np.sum(np.abs(rows), axis=0) * (2.0**-3 + 2.0**-7) + smallest
    assert (np.abs(dx - wanted_dx) <= bound).all()


def operands(seed=0, chosen=2, dtype=F32):
    ct = normal(24, WIDTH, seed=seed + 1)
    return *tokens(24, seed=seed, chosen=chosen, dtype=dtype), ct


@functools.cache
def of_linen():
    """The operands of a step in which a token has one row, and its results on four
    devices.
    """
    # The largest gradient of a result rounds up: its codes have a larger amax.
    args = operands(seed=5, chosen=1)
    variables = used_variables(GATED, *args[:3])
    run = gradients(GATED.clone(expert_axis="e").apply)
    return variables, args, cut(run, {"e": 4}, variables)(variables, *args)


def test_one_device():
    """The gradient of x arrives in e5m2, with the scale of its own amax over all
    devices. It is no sum where a token has one row.
    """
    variables, args, (got, dvariables) = of_linen()
    wanted, dwanted = jax.jit(gradients(GATED.apply))(variables, *args)
    assert_same_bits(dvariables, dwanted, "variables")
    assert_same_bits(got["y"], wanted["y"], "y")
    dx = np.asarray(wanted["x"])
    scale = F32(E5M2_MAX) / oracle.amax(dx)
    codes, _ = oracle.quantize(dx, scale, oracle.E5M2)
    oracle.assert_bitwise(got["x"], oracle.dequantize(codes, 1 / scale, F32), "x")
    # A sum of WIDTH products, in an order that XLA chooses.
    atol = 4 * 2.0**-23 * np.abs(wanted["weights"]).max()
    np.testing.assert_allclose(got["weights"], wanted["weights"], rtol=0, atol=atol)


@pytest.mark.parametrize("recipe", [HIGH, RECIPES["mx"][0]], ids=["high", "mx"])
def test_other_recipes(recipe):
    """Scales of blocks go along with their rows."""
    layer = GATED.clone(recipe=recipe, expert_axis="e", dtype=BF16)
    args = operands(dtype=BF16)
    variables = used_variables(layer, *args[:3])

    def run(variables, x, expert, weights, _):
        return layer.apply(variables, x, expert, weights), variables

    got, _ = cut(run, {"e": 4}, variables)(variables, *args)
    wanted = jax.jit(layer.apply)(variables, *args[:3])
    assert_same_bits(got, wanted, "y")


def test_nnx_has_the_bits_of_linen():
    variables, args, wanted = of_linen()
    graphdef, state = nnx.split(of_nnx(GATED.clone(expert_axis="e"), WIDTH))

    def apply(variables, *args):
        leaves = {
            name: {
                "kernel": variables["params"][name]["kernel"],
                "ragged_dot": variables[OWG][name]["Fp8RaggedDot_0"],
            }
            for name in ("wi", "wo")
        }
        own = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(own, leaves)
        return nnx.merge(graphdef, own)(*args)

    got = cut(gradients(apply), {"e": 4}, variables)(variables, *args)
    assert_same_bits(got, wanted, "nnx")


def test_what_is_sent():
    """Codes there, and of both gradients; results in the compute dtype; and the sizes
    of groups.
    """
    layer = GATED.clone(expert_axis="e", dtype=BF16)
    args = operands(dtype=BF16)
    variables = used_variables(layer, *args[:3])
    step = cut(gradients(layer.apply), {"e": 4}, variables)
    text = step.lower(variables, *args).compile(hlo.QUICKLY).as_text()
    found = hlo.collectives(text)
    sent = [c for c in found if c.kind == "all-to-all"]
    by_dtype = {
        dtype: sum(c.bytes for c in sent if {d for d, _ in c.results} == {dtype})
        for dtype in ("u8", "f32", "s32")
    }
    # XLA's CPU compiler sends bfloat16 as float32. Each of 4 devices has room for all
    # rows of each.
    slots = 4 * 2 * 24 // 4
    assert by_dtype == {
        "u8": 3 * slots * WIDTH,
        "f32": 4 * slots * WIDTH,
        "s32": 4 * COUNT,
    }
    assert sum(c.bytes for c in sent) == sum(by_dtype.values())
    # the amaxes of six quantizers, and that of the gradient of rows
    assert [c.bytes for c in found if c.is_amax] == [4 * 7]


def test_capacity():
    """Rows above it have no expert: those of the last experts and tokens. Specs are
    those of an initializer with axes.
    """
    args, capacity = operands(), 8
    init = nn.with_partitioning(GATED.kernel_init, ("e", None, None))
    layer = GATED.clone(expert_axis="e", capacity=capacity, kernel_init=init)
    variables = used_variables(layer, *args[:3])
    specs = nn.get_partition_spec(variables)
    variables = nn.meta.unbox(variables)

    def run(variables, x, expert, weights, _):
        y = layer.apply(variables, x, expert, weights)
        return (y, layer.dropped_rows(expert)[None]), variables

    (got, dropped), _ = cut(run, {"e": 2}, variables, specs=specs)(variables, *args)
    x, expert, weights, _ = args
    kept = expert.copy()
    for device in range(2):
        mine = kept[12 * device : 12 * (device + 1)].reshape(-1)
        for there in range(2):
            rows = [r for r in np.argsort(mine, kind="stable") if mine[r] // 2 == there]
            mine[rows[capacity:]] = -1
        assert dropped[device] == np.sum((kept != expert)[12 * device :][:12])
    wanted = jax.jit(GATED.apply)(variables, x, kept, weights)
    assert_same_bits(got, wanted, "y")


@pytest.mark.parametrize("axis, count, message", [
    ("x", COUNT, r"expert_axis: expected an axis of the mesh, .*\('e',\), got 'x'"),
    ("e", 6, "count: expected a multiple of 4, .*'e', got 6"),
])  # fmt: skip
def test_bad_axes(axis, count, message):
    layer = GATED.clone(expert_axis=axis, count=count)
    args = operands()
    variables = jax.eval_shape(layer.init, KEY, *args[:3])
    run = cut(
        gradients(layer.apply), {"e": 4}, variables, specs=dict.fromkeys(SPECS, P())
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, variables, *args)


def test_other_errors():
    layer = GATED.clone(expert_axis="e")
    args = operands()[:3]
    with pytest.raises(ValueError, match="capacity: expected at least 1 row"):
        layer.clone(capacity=0).dropped_rows(args[1])
    init = jax.shard_map(
        lambda *args: layer.init(KEY, *args),
        mesh=mesh_of(e=4),
        in_specs=P("e"),
        out_specs=P("e"),
    )
    with pytest.raises(ValueError, match=r"init: .* outside of shard_map"):
        init(*args)
