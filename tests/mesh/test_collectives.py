"""What compiled programs for 8 devices send: FP8 codes where bf16 would send tensors,
and one all-reduce of amaxes.

Bytes of bf16 programs are counted as 2 a number: XLA's CPU compiler widens bf16, and
FP8 that it sees, before it sends them.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8
from mesh import cases, hlo

AMAXES = 6  # of one step of `cases.mlp`: input, kernel and output_grad of two products


def compiled(kind, name, **options) -> str:
    mesh = cases.mesh(kind)
    layout = cases.LAYOUTS[name]
    with jax.set_mesh(mesh):
        weights, state, batches = cases.arguments(mesh, layout, **options)
        return (
            cases.jitted(mesh, layout)
            .lower(weights, state, batches[0])
            .compile(hlo.QUICKLY)
            .as_text()
        )


def compiled_in_bf16(kind, name, monkeypatch) -> str:
    def dot(x, kernel, state, recipe, out_sharding):
        del state, recipe
        kernel = kernel.astype(x.dtype)
        out = jnp.float32
        return lax.dot_general(
            x,
            kernel,
            cases.ROWS_BY_COLUMNS,
            preferred_element_type=out,
            out_sharding=out_sharding,
        )

    with monkeypatch.context() as patch:
        patch.setattr(cases, "dot", dot)
        return compiled(kind, name, with_state=False)


def quantized(layout) -> dict:
    """The shape and the PartitionSpec of each tensor that a step of `cases.mlp`
    quantizes.
    """
    inner = (cases.BATCH, cases.LENGTH, cases.WIDTH)
    hidden = (*inner[:2], cases.HIDDEN)
    return {
        "x": (inner, layout.x),
        "w1": ((cases.WIDTH, cases.HIDDEN), layout.w1),
        "h": (hidden, layout.h),
        "w2": ((cases.HIDDEN, cases.WIDTH), layout.w2),
        "grad of y": (inner, layout.y),
        "grad of h": (hidden, layout.h),
    }


def shard_size(mesh, shape, spec) -> int:
    return math.prod(NamedSharding(mesh, spec).shard_shape(shape))


def cut_over(layout) -> set:
    """The mesh axes over which a layout cuts anything."""
    entries = [
        entry
        for spec in (layout.x, layout.w1, layout.h)
        for entry in spec
        if entry is not None
    ]
    return {
        axis
        for entry in entries
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    }


def check_amaxes(text, name):
    """One all-reduce a step, of one number for each tensor that is cut, over all
    devices.
    """
    (amaxes,) = (c for c in hlo.collectives(text) if c.is_amax)
    whole = [
        spec for _, spec in quantized(cases.LAYOUTS[name]).values() if not any(spec)
    ]
    assert amaxes.results == (("f32", (1,)),) * (AMAXES - len(whole))
    # A mesh axis that cuts nothing at all may be in or out.
    size = 2 ** len(cut_over(cases.LAYOUTS[name]))
    assert all(len(group) >= size for group in amaxes.groups)


def check_work(text, name):
    """Each device quantizes its shards and computes its part of the products, both
    once.
    """
    mesh = cases.mesh()
    layout = cases.LAYOUTS[name]
    sizes = sorted(shard_size(mesh, *tensor) for tensor in quantized(layout).values())
    operands = [
        math.prod(operands[0][1])
        for operands in hlo.custom_calls(text, "jaxfp8_quantize")
    ]
    assert sorted(operands) == sizes
    # x needs no gradient
    products = 5 * cases.BATCH * cases.LENGTH * cases.WIDTH * cases.HIDDEN
    assert hlo.multiplications(text) == products // 2 ** len(cut_over(layout))


def check_gathers(text, name):
    """Only codes are gathered, and only of tensors that are cut along an axis that
    their product is not cut along.
    """
    mesh = cases.mesh()
    layout = cases.LAYOUTS[name]
    gathers = [c for c in hlo.collectives(text) if c.kind == "all-gather"]
    assert {dtype for c in gathers for dtype, _ in c.results} <= {"u8"}
    over_rows = {axis for axis in cases.AXES if axis in str(layout.x[:1])}

    def gathered_size(shape, spec):
        """With the mesh axes of the batch, or of a sequence, taken away."""
        entries = []
        for i, entry in enumerate(spec):
            axes = entry if isinstance(entry, tuple) else (entry,)
            lost = over_rows if len(shape) == 2 else {"tp"} if i == 1 else set()
            entries.append(
                tuple(axis for axis in axes if axis and axis not in lost) or None
            )
        return shard_size(mesh, shape, P(*entries))

    tensors = quantized(layout)
    wanted = {
        gathered_size(*tensors[part])
        for part in tensors
        if gathered_size(*tensors[part]) != shard_size(mesh, *tensors[part])
    }
    assert {math.prod(shape) for c in gathers for _, shape in c.results} == wanted


STEPS = [("auto", name) for name in cases.LAYOUTS] + [
    ("explicit", name) for name in ("all",)
]
STEPS += [
    pytest.param("explicit", name, marks=pytest.mark.slow) for name in ("fsdp", "sp")
]


@pytest.mark.parametrize("kind, name", STEPS)
def test_a_step_of_the_model(kind, name, monkeypatch):
    text = compiled(kind, name)
    check_amaxes(text, name)
    check_work(text, name)
    check_gathers(text, name)

    ours = [c for c in hlo.collectives(text) if not c.is_amax]
    theirs = hlo.collectives(compiled_in_bf16(kind, name, monkeypatch))
    assert {c.kind for c in ours} <= {c.kind for c in theirs}
    is_gather = lambda c: c.kind == "all-gather"  # noqa: E731
    assert sum(not is_gather(c) for c in ours) <= sum(not is_gather(c) for c in theirs)
    # A tensor that two products read may be gathered twice, 1 byte a number, where bf16
    # gathers once.
    assert sum(c.bytes for c in ours if is_gather(c)) <= sum(
        c.bytes // 2 for c in theirs if is_gather(c)
    )


def scanned(policy) -> str:
    """The compiled gradient of a scan over three layers with FSDP, in a shard_map."""
    specs = (P(None, cases.AXES), P(), P(cases.AXES))
    mesh = cases.mesh()

    def loss(kernels, states, x):
        def layer(x, kernel_and_state):
            kernel, state = kernel_and_state
            kernel = lax.all_gather(kernel, cases.AXES, axis=0, tiled=True)
            return jnp.tanh(
                jaxfp8.dot_general(
                    x, kernel, cases.MATMUL, recipe=cases.RECIPE, state=state
                )
            ), None

        layer = (
            layer
            if policy is None
            else jax.checkpoint(layer, policy=policy, prevent_cse=False)
        )
        total = jnp.sum(lax.scan(layer, x, (kernels, states))[0] ** 2)
        return lax.psum(total, cases.AXES)

    step = jaxfp8.grad(loss, argnums=(0, 1))
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2])
    states = cases.stacked(jaxfp8.init_state(cases.RECIPE), 3)
    arguments = jnp.ones((3, 64, 64)), states, jnp.ones((128, 64))
    with jax.set_mesh(mesh):
        arguments = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arguments, specs, strict=True)
        ]
        return jax.jit(step).lower(*arguments).compile(hlo.QUICKLY).as_text()


@pytest.mark.parametrize(
    "policy",
    [None, jax.checkpoint_policies.nothing_saveable],
    ids=["all saved", "none saved"],
)
def test_a_scan_in_a_shard_map(policy):
    """Devices keep the amaxes of their shards until the backward: one all-reduce for
    those of a product.
    """
    (amaxes,) = (c for c in hlo.collectives(scanned(policy)) if c.is_amax)
    assert amaxes.results == (("f32", (18,)),)
