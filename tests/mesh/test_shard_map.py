"""Training in `shard_map`: collectives are written by hand, states are still those of
one device, bit for bit.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_mesh import mesh_of
from draws import normal
from jax import lax
from jax.sharding import PartitionSpec as P
from parametrize import each_row
from programs.cases import stack_rows

import jaxfp8
from mesh import cases, hlo
from mesh.by_hand import replicated, summed

# said, so that check_vma=False has nothing to warn of
RECIPE = dataclasses.replace(cases.RECIPE, pipeline_axes=())
CURRENT = dataclasses.replace(RECIPE, first_step="current")
CHECKED = pytest.mark.parametrize(
    "checked", [True, False], ids=["check_vma", "no check_vma"]
)
# Where what differs without is tested elsewhere.
MOSTLY_CHECKED = pytest.mark.parametrize(
    "checked",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["check_vma", "no check_vma"],
)

# ------------------------------------------------------------ the program of one device


def axes_of(*entries) -> tuple:
    """The mesh axes of entries of a PartitionSpec, or of a whole one."""
    return tuple(
        axis
        for e in entries
        if e is not None
        for axis in (e if isinstance(e, tuple) else (e,))
    )


def restricted(layout, manual) -> cases.Layout:
    """A layout as far as it concerns these axes."""

    def spec(entries):
        kept = (
            tuple(axis for axis in axes_of(entry) if axis in manual)
            for entry in entries
        )
        return P(*(axes or None for axes in kept))

    return cases.Layout(
        **{
            field.name: spec(getattr(layout, field.name))
            for field in dataclasses.fields(layout)
        }
    )


def local_loss(layout, checked, recipe=RECIPE):
    """The loss of the whole batch, from the shards of one device.

    Kernels cut along axes of the batch are gathered (FSDP), the others multiplied as
    they are (TP): the second product is then a sum over devices, which either all get
    or each gets its places of the sequence (SP).
    """
    of_batch = axes_of(layout.y[0])
    of_places = axes_of(*layout.y[1:])

    def whole(kernel, spec):
        if not checked:
            of_others = tuple(
                axis for axis in axes_of(*layout.y) if axis not in axes_of(*spec)
            )
            kernel = replicated(kernel, of_others) if of_others else kernel
        for dim, entry in enumerate(spec):
            if entry is not None and set(axes_of(entry)) <= set(of_batch):
                kernel = lax.all_gather(kernel, axes_of(entry), axis=dim, tiled=True)
        return kernel

    def total(x, axes):
        return x if not axes else lax.psum(x, axes) if checked else summed(x, axes)

    def loss(weights, state, batch):
        w1, w2 = (whole(weights[name], spec) for name, spec in layout.weights.items())
        of_sum = (
            tuple(axis for axis in axes_of(layout.w2[0]) if axis not in of_batch)
            if len(layout.w2)
            else ()
        )
        x = (
            lax.all_gather(batch.x, of_places, axis=1, tiled=True)
            if of_places
            else batch.x
        )
        h = cases.activation(cases.dot(x, w1, state["w1"], recipe), batch.size).astype(
            x.dtype
        )
        y = cases.dot(h, w2, state["w2"], recipe)
        if of_places:
            y = lax.psum_scatter(y, of_sum, scatter_dimension=1, tiled=True)
        else:
            y = total(y, of_sum)
        return total(jnp.sum(y * batch.target), axes_of(*layout.y))

    return loss


def mapped(function, mesh, layout, checked, out_specs, manual=cases.AXES):
    """`function(weights, state, batch)` on shards; state is the same on all devices."""
    in_specs = (layout.weights, P(), layout.batch)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=checked,
        axis_names=set(manual),
    )


def step_inside(mesh, layout, checked, recipe=RECIPE, loss=None, manual=cases.AXES):
    """The whole step in `shard_map`."""
    loss = loss or local_loss(layout, checked, recipe)
    return mapped(
        cases.make_step(loss), mesh, layout, checked, (layout.weights, P(), P()), manual
    )


def step_outside(mesh, layout, checked, recipe=RECIPE, around=lambda loss: loss):
    """The loss in `shard_map`, its gradient outside."""
    return cases.make_step(
        around(mapped(local_loss(layout, True, recipe), mesh, layout, checked, P()))
    )


def train(step, mesh, layout, recipe=RECIPE, with_state=True, steps=cases.STEPS):
    with jax.set_mesh(mesh):
        weights, state, batches = cases.arguments(mesh, layout, recipe, with_state)
        return cases.train(jax.jit(step), weights, state, batches[:steps])


# ---------------------------------------------------------------------------- ten steps


@pytest.mark.parametrize("name", cases.LAYOUTS)
@CHECKED
def test_gradient_inside(name, checked):
    """Ten steps; all amaxes of one, forward and backward, go in one all-reduce over all
    devices.
    """
    mesh = cases.mesh()
    layout = cases.LAYOUTS[name]
    weights, state, batches = cases.arguments(mesh, layout)
    step = (
        jax.jit(step_inside(mesh, layout, checked))
        .lower(weights, state, batches[0])
        .compile()
    )
    cases.assert_same(
        cases.train(step, weights, state, batches), cases.reference(), f"{name}, inside"
    )
    (reduction,) = (c for c in hlo.collectives(step.as_text()) if c.is_amax)
    # A replicated kernel has the same amax on all devices, and types show it.
    assert len(reduction.results) == (4 if checked and name == "dp" else 6)


@pytest.mark.parametrize("name", ["dp", "fsdp", "tp", "sp"])
def test_gradient_outside(name):
    mesh = cases.mesh()
    layout = cases.LAYOUTS[name]
    run = train(step_outside(mesh, layout, True), mesh, layout)
    cases.assert_same(run, cases.reference(), f"{name}, outside")


OTHERS = {
    "explicit mesh": ("explicit", RECIPE, True),
    # of the whole tensor, though devices see shards
    "first step current": ("auto", CURRENT, True),
    "products without state": ("auto", RECIPE, False),
}


@MOSTLY_CHECKED
@each_row("kind, recipe, with_state", OTHERS)
def test_other_programs(kind, recipe, with_state, checked):
    mesh = cases.mesh(kind)
    layout = cases.LAYOUTS["all"]
    run = train(
        step_inside(mesh, layout, checked, recipe), mesh, layout, recipe, with_state
    )
    cases.assert_same(run, cases.reference(recipe, with_state), kind)


# ----------------------------------------------------------------------- other programs


def in_microbatches(loss, count=2):
    """A scan over microbatches that closes over weights and state."""

    def total(weights, state, batch):
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]),
            batch,
        )
        return jnp.sum(lax.map(lambda part: loss(weights, state, part), parts))

    return total


def remat_in_microbatches(loss):
    return in_microbatches(
        jax.checkpoint(loss, policy=jax.checkpoint_policies.nothing_saveable)
    )


WRAPPERS = {
    "remat": jax.checkpoint,
    "microbatches": in_microbatches,
    "microbatches of remat": remat_in_microbatches,
}


def wrapped(wrap, loss):
    """State goes through `jax.checkpoint` as an argument, so it is cast at the top."""
    return lambda weights, state, batch: wrap(loss)(
        weights, jaxfp8.max_grad(state), batch
    )


@pytest.mark.parametrize("constant", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", ["x", "kernel"])
def test_constants_inside_of_the_map(name, constant):
    """An operand that is closed over knows no mesh; it is as one that every device was
    given.
    """
    operands = {"x": normal(16, 16), "kernel": np.eye(16, dtype=np.float32)}
    value = operands.pop("kernel" if name == "x" else "x")
    fixed = constant(operands[name])

    def loss(state, value, total=lambda y: y):
        x, kernel = (fixed, value) if name == "x" else (value, fixed)
        y = jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=RECIPE, state=state)
        return total(jnp.sum(y))

    def gradients(state, value):
        return jax.grad(loss, argnums=(0, 1))(
            state, value, lambda y: lax.psum(y, "data")
        )

    specs = P(), P(None, "data") if name == "x" else P("data")
    mapped = jax.shard_map(
        gradients, mesh=mesh_of(data=8), in_specs=specs, out_specs=specs
    )
    state = jaxfp8.init_state(RECIPE)
    wanted = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, value)
    cases.assert_same(jax.jit(mapped)(state, value), jax.device_get(wanted), name)


@each_row("wrap", WRAPPERS)
@pytest.mark.parametrize("where", ["check_vma", "no check_vma", "around"])
def test_wrapped(where, wrap):
    """Inside of the map, or around it."""
    mesh = cases.mesh()
    layout = cases.LAYOUTS["tp"]
    around = functools.partial(wrapped, wrap)
    if where == "around":
        step = step_outside(mesh, layout, True, around=around)
    else:
        checked = where == "check_vma"
        step = step_inside(
            mesh, layout, checked, loss=around(local_loss(layout, checked))
        )
    cases.assert_same(train(step, mesh, layout), cases.reference(), where)


@MOSTLY_CHECKED
def test_a_map_in_a_map(checked):
    """The outer map has the axis data, the inner one the others."""
    mesh = cases.mesh()
    layout = cases.LAYOUTS["dp"]
    inner, outer = (restricted(layout, axes) for axes in (("fsdp", "tp"), ("data",)))
    step = cases.make_step(local_loss(layout, checked))
    out_specs = (layout.weights, P(), P())
    step = mapped(step, None, inner, checked, out_specs, manual=("fsdp", "tp"))
    run = train(
        mapped(step, mesh, outer, checked, out_specs, manual=("data",)), mesh, layout
    )
    cases.assert_same(run, cases.reference(), "nested")


@pytest.mark.parametrize(
    "name, manual", [("fsdp+tp", ("data",)), ("all", ("data", "tp"))]
)
@CHECKED
def test_some_axes_manual(name, manual, checked):
    """XLA cuts along the other axes."""
    mesh = cases.mesh()
    layout = cases.LAYOUTS[name]
    step = step_inside(mesh, restricted(layout, manual), checked, manual=manual)
    cases.assert_same(
        train(step, mesh, layout), cases.reference(), f"{name}, manual {manual}"
    )


# -------------------------------------------------------------------- partial sums (TP)


@pytest.mark.parametrize("program", ["auto", "explicit", "check_vma", "no check_vma"])
def test_amax_of_partial_sums(program):
    """A row-parallel product is a sum over devices: the next layer sees the sum, and
    not its much larger terms.
    """
    ones = np.ones((8, 8), np.float32)
    # The sum of 7 * 8 and -6 * 8; exact at scale 1.
    operands = np.ones((8, 16), np.float32), np.concatenate([7 * ones, -6 * ones]), ones
    specs = P(None, "tp"), P("tp"), P()
    states = [jaxfp8.init_state(RECIPE) for _ in range(2)]

    def next_states(states, x, w1, w2, total=lambda y: y, **options):
        dot = functools.partial(
            jaxfp8.dot_general, dimension_numbers=cases.MATMUL, recipe=RECIPE
        )

        def loss(states):
            y = total(dot(x, w1, state=states[0], **options))
            z = dot(y, w2, state=states[1])
            return jnp.sum(z * z)

        return jax.grad(loss)(states)

    wanted = jax.device_get(jax.jit(next_states)(states, *operands))
    assert wanted[1].input.amax_history[0] == 8

    on = mesh_of("Explicit" if program == "explicit" else "Auto", tp=2)
    step = next_states
    if program == "explicit":
        step = functools.partial(next_states, out_sharding=P())
    elif program != "auto":
        checked = program == "check_vma"
        psum = lax.psum if checked else summed
        step = functools.partial(next_states, total=lambda y: psum(y, "tp"))
        step = jax.shard_map(
            step, mesh=on, in_specs=(P(), *specs), out_specs=P(), check_vma=checked
        )
    with jax.set_mesh(on):
        got = jax.jit(step)(cases.put(states, on, P()), *cases.put(operands, on, specs))
    cases.assert_same(got, wanted, program)


# ----------------------------------------------------------------- what cannot be right


@pytest.mark.parametrize("steps_before", [0, 3], ids=["at once", "in training"])
def test_unchecked_with_the_gradient_outside(steps_before):
    """JAX adds the states of all devices, and nothing inside of the map can tell:
    `update_state` raises.

    Of a first step only the scale tells, and not where an amax is FP8_MAX times a power
    of two: a current scale would look like that. So all tensors of it are three times
    as large.
    """
    mesh = cases.mesh()
    layout = cases.LAYOUTS["dp"]
    state = cases.reference(steps=steps_before).state if steps_before else cases.state()
    size = 1 if steps_before else 3
    weights, batch = jax.tree.map(
        lambda x: x * x.dtype.type(size),
        (cases.weights(), cases.batches()[steps_before]),
    )
    loss = mapped(local_loss(layout, True), mesh, layout, False, P())
    gradient = jax.jit(jax.grad(loss, argnums=1))(weights, state, batch)
    with pytest.raises(ValueError, match="8 times .* summed over uses or devices"):
        jaxfp8.update_state(state, gradient)


# Whether an amax is reduced, and whether that is said.
REDUCES = {
    cases.RECIPE: (True, True),
    RECIPE: (True, False),
    jaxfp8.StaticScaling(1, 1, 1): (False, False),
    jaxfp8.StaticScaling(1, 1): (True, True),
    jaxfp8.Float8CurrentScaling(): (True, True),
    jaxfp8.MXFP8BlockScaling(): (False, False),
    jaxfp8.ByProduct(jaxfp8.MXFP8BlockScaling(), jaxfp8.Float8CurrentScaling()): (
        True,
        True,
    ),
}


@CHECKED
@pytest.mark.parametrize(
    "recipe, expected", REDUCES.items(), ids=map(str, range(len(REDUCES)))
)
def test_unchecked_warns_where_an_amax_is_reduced(recipe, expected, checked):
    """Unless `pipeline_axes` says what a stage is, or types tell."""
    reduces, is_said = expected
    mesh = cases.mesh()

    def gradients(state, x, kernel):
        def loss(state, x):
            y = jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe, state=state)
            return jnp.sum(y)

        return jax.grad(loss, argnums=(0, 1))(state, x)

    specs = P(), P("data")
    step = jax.shard_map(
        gradients, mesh=mesh, in_specs=(*specs, P()), out_specs=specs, check_vma=checked
    )
    arguments = jaxfp8.init_state(recipe), jnp.ones((64, 128)), jnp.ones((128, 128))
    with warnings.catch_warnings(record=True, action="always") as caught:
        text = jax.jit(step).lower(*arguments).compile().as_text()
    said = [
        str(w.message) for w in caught if issubclass(w.category, jaxfp8.FP8StateWarning)
    ]
    assert (bool(said), "all-reduce" in text) == (is_said and not checked, reduces)
    for text in said:
        assert str(mesh.axis_names) in text and "pipeline_axes=()" in text


# -------------------------------------------------------------- stages of a pipeline


@pytest.mark.parametrize(
    "has_state, checked", [(True, False), (False, True), (False, False)]
)
def test_stages_scale_by_themselves(has_state, checked):
    """Each stage is as if it were alone, in its first step too. pipelines.py has steps
    with a state.
    """
    recipe = dataclasses.replace(CURRENT, pipeline_axes=("stage",))
    state = jaxfp8.init_state(recipe) if has_state else cases.stateless()["w1"]
    sizes = np.float32([1, 2, 2**12, 2**-6])
    kernels, x = normal(4, 8, 8) * sizes[:, None, None], normal(16, 8)

    def step(kernel, state):
        def product(kernel, state):
            return jaxfp8.dot_general(
                x, kernel, cases.MATMUL, recipe=recipe, state=state
            )

        y, vjp = jax.vjp(product, kernel, state)
        return y, vjp(y)

    def of_stage(*own):
        return jax.tree.map(lambda leaf: leaf[None], step(*cases.row(own, 0)))

    mapped = jax.shard_map(
        of_stage,
        mesh=mesh_of(stage=4),
        in_specs=P("stage"),
        out_specs=P("stage"),
        check_vma=checked,
    )
    got = jax.jit(mapped)(kernels, cases.stacked(state, 4))
    alone = [jax.jit(step)(kernel, state) for kernel in kernels]
    cases.assert_same(got, jax.device_get(stack_rows(alone)), "stages")


@pytest.mark.parametrize(
    "axis, checked, message",
    [
        ("fsdp", True, r"names \['fsdp'\], but the state does not vary over it"),
        # where types do not tell, a typo would reduce over the stages
        ("stages", False, ": expected axes of this shard_map.*stages"),
    ],
)
def test_bad_pipeline_axes(axis, checked, message):
    recipe = dataclasses.replace(cases.RECIPE, pipeline_axes=(axis,))
    mesh = cases.mesh()
    layout = cases.LAYOUTS["dp"]
    with pytest.raises(ValueError, match=f"pipeline_axes.?{message}"):
        train(step_inside(mesh, layout, checked, recipe), mesh, layout, steps=1)
