"""Trainers: loss scales, clipping, decay, means over devices, casts, skipped steps; what they do to state."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import dynamic_scale
from jax.sharding import AxisType, PartitionSpec as P
from reliability.test_trainers import SLIPPED

from jaxfp8 import mixed_precision

from .libraries import OWG
from .steps import amaxes, in_two_octaves, is_clean, same_bits, step_of, tally_products
from .verdict import Tally, row

M, K, N = 16, 24, 8


def operands(i, data=1.0, grads=1.0):
    return (
        in_two_octaves(3 * i, (M, K), data),
        in_two_octaves(3 * i + 1, (K, N), 1),
        in_two_octaves(3 * i + 2, (M, N), grads),
    )


def create(library, tx):
    _, kernel, _ = operands(0)
    return library.train_state.create(apply_fn=library.dense(N).apply, params=library.variables(kernel), tx=tx)


def loss(train, variables, x, grad):
    return jnp.vdot(train.apply_fn(variables, x), grad)


@jax.jit
def advance(train, x, grad):
    return train.apply_gradients(grads=jax.grad(lambda v: loss(train, v, x, grad))(train.params))


def tally_next(tally, library, variables, what, i=1):
    """The products of one more step, with the kernel as it is."""
    x, _, grad = operands(i)
    kernel = np.asarray(variables["params"]["kernel"])
    tally_products(tally, step_of(library, N)(variables, x, grad), (x, kernel, grad), what)


@row("DynamicScale")
def flax_dynamic_scale(library):
    """Flax's own loss scaling, which divides the whole tree of gradients by 65536; three steps in the library's
    TrainState. The stored state must be that of the gradients that the layer saw."""
    train, scaler, tally = create(library, optax.sgd(1e-3)), dynamic_scale.DynamicScale(scale=65536.0), Tally()

    @jax.jit
    def step(train, scaler, x, grad):
        scaler, _, _, grads = scaler.value_and_grad(lambda v: loss(train, v, x, grad))(train.params)
        return train.apply_gradients(grads=grads), scaler

    for i in range(3):
        x, kernel, grad = operands(i)
        kernel = np.asarray(train.params["params"]["kernel"])
        train, scaler = step(train, scaler, x, grad)
        for name, true in amaxes(x, kernel, grad * 65536).items():
            slot = library.history(train.params, name)[0]
            tally(abs(slot / true - 1) < 1e-5, f"{name}: {slot / true:.3g} times the true amax")
    tally_next(tally, library, train.params, "the step after")
    return tally.verdict("the true amax")


@row("our loss scaling", peer="Flax has DynamicScale alone")
def our_loss_scale(library):
    """Unscaling leaves state alone, and the scale backs off after a step that overflows."""
    train, scaler, tally = create(library, optax.sgd(1e-3)), mixed_precision.DynamicLossScale(initial=2.0**10), Tally()

    @jax.jit
    def step(train, x, grad):
        grads = jax.grad(lambda v: scaler.scale(loss(train, v, x, grad)))(train.params)
        return train.apply_gradients(grads=scaler.unscale(grads))

    for i in range(3):
        x, _, grad = operands(i)
        kernel = np.asarray(train.params["params"]["kernel"])
        train = step(train, x, grad)
        for name, true in amaxes(x, kernel, grad * 2**10).items():
            slot = library.history(train.params, name)[0]
            tally(abs(slot / true - 1) < 1e-5, f"{name}: {slot / true:.3g} times the true amax")
    tally(scaler.adjust(jnp.asarray(False)).value == 2**9, "the scale did not back off")
    return tally.verdict("the true amax")


def out_of_reach(library, tx):
    """Under an optimizer that changes whole trees the kernel moves and state is what the layer returned."""
    train, tally = create(library, tx), Tally()
    for i in range(3):
        x, _, grad = operands(i)
        kernel = np.asarray(train.params["params"]["kernel"])
        train = advance(train, x, grad)
        for name, true in amaxes(x, kernel, grad).items():
            slot = library.history(train.params, name)[0]
            tally(abs(slot / true - 1) < 1e-6, f"{name}: {slot / true:.3g} times the true amax")
        tally(not np.array_equal(kernel, train.params["params"]["kernel"]), "the kernel does not train")
    return tally.verdict("the true amax")


@row("`clip_by_global_norm`")
def clipped(library):
    return out_of_reach(library, optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0)))


@row("weight decay")
def decayed(library):
    return out_of_reach(library, optax.adamw(1e-2, weight_decay=0.5))


@row("`pmean` of gradients")
def mean_over_devices(library):
    """Eight devices with data of their own in `shard_map`; the whole tree of gradients goes through `pmean`."""
    mesh, tally = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), Tally()
    layer, kernel = library.dense(N), operands(0)[1]

    def step(variables, x, grad):
        gradient = jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad))(variables)
        return library.update(variables, jax.lax.pmean(gradient, "data"))

    # Checked or not, devices must end with the largest amax of all.
    parts = [operands(i, 2.0**i) for i in range(8)]
    x, grad = np.concatenate([part[0] for part in parts]), np.concatenate([part[2] for part in parts])
    for checked in (True, False):
        with warnings.catch_warnings(), tally.raising(f"check_vma={checked}"):
            warnings.simplefilter("ignore")  # ours says that check_vma=False needs to be told about pipelines
            specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "check_vma": checked}
            after = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(library.variables(kernel), x, grad)
            for name, true in amaxes(x, kernel, grad).items():
                slot = library.history(after, name)[0]
                tally(
                    abs(slot / true - 1) < 1e-5, f"check_vma={checked}, {name}: {slot / true:.3g} times the true amax"
                )
    return tally.verdict("the true amax")


@row("`apply_if_finite`")
def apply_if_finite(library):
    """A step with an Inf is rejected; state is clean and the next products are right."""
    train, tally = create(library, optax.apply_if_finite(optax.sgd(1e-3), 5)), Tally()
    x, _, grad = operands(0)
    train = advance(train, x, grad)
    kernel, bad = np.asarray(train.params["params"]["kernel"]), x.copy()
    bad[0, 0] = np.inf
    train = advance(train, bad, grad)
    tally(np.array_equal(train.params["params"]["kernel"], kernel), "the kernel moved")
    tally(is_clean(train.params), f"history {library.history(train.params, 'input')}")
    tally_next(tally, library, train.params, "the step after")
    return tally.verdict()


@row("casts of the tree to bf16")
def cast_gradients(library):
    """Gradients cast as a whole: stored state stays float32 (a run is not traced again), products are right."""
    train, tally = create(library, optax.sgd(1e-3)), Tally()

    @jax.jit
    def step(train, x, grad):
        grads = jax.grad(lambda v: loss(train, v, x, grad))(train.params)
        return train.apply_gradients(grads=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), grads))

    for i in range(3):
        x, _, grad = operands(i)
        train = step(train, x, grad)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(train.params[OWG])}
    tally(dtypes == {"float32"}, f"state became {sorted(dtypes)}")
    tally_next(tally, library, train.params, "the step after")
    return tally.verdict()


@row("what slips through never gives garbage")
def slipped(library):
    """State after what trainers do to whole trees: the next step has no NaN, the one after it has right products."""
    tally = Tally()
    step = step_of(library, N)
    for name, slip in SLIPPED.items():
        variables = library.variables(operands(0)[1])
        for i in range(3):
            x, kernel, grad = operands(i)
            variables = step({**variables, "params": {"kernel": kernel}}, x, grad).variables
        with np.errstate(all="ignore"):
            state = jax.tree.map(lambda leaf, slip=slip: np.asarray(slip(np.asarray(leaf)), np.float32), variables[OWG])
        variables = {**variables, OWG: state}
        for i in (3, 4):
            x, kernel, grad = operands(i)
            got = step({**variables, "params": {"kernel": kernel}}, x, grad)
            tally(all(np.isfinite(product).all() for product in got[:3]), f"{name}: not finite {i - 2} steps after")
            variables = got.variables
        tally_products(tally, got, operands(4), name)
    return tally.verdict()


@row("a skipped step rolls params and state back together")
def skipped_step(library):
    """A step whose gradients overflow, skipped with `where` over parameters and state as Flax's examples do."""
    train, scaler, tally = create(library, optax.sgd(1e-3)), dynamic_scale.DynamicScale(scale=65536.0), Tally()

    @jax.jit
    def step(train, scaler, x, grad):
        scaler, finite, _, grads = scaler.value_and_grad(lambda v: loss(train, v, x, grad))(train.params)
        stepped = train.apply_gradients(grads=grads)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        return stepped.replace(params=jax.tree.map(keep, stepped.params, train.params)), scaler

    x, _, grad = operands(0)
    train, scaler = step(train, scaler, x, grad)
    bad = x.copy()
    bad[0, 0] = np.inf
    after, scaler = step(train, scaler, bad, grad)
    tally(same_bits(after.params, train.params), "parameters or state moved")
    tally(scaler.scale == 32768, "the loss scale did not back off")
    return tally.verdict()


@row("gradient w.r.t. params only: works, warns once")
def parameters_alone(library):
    """Without the gradient of the state nothing updates it, and scales stay at 1: that must be said."""
    layer, tally = library.dense(N), Tally()
    x, kernel, grad = operands(0)
    variables = library.variables(kernel)

    def loss(params):
        return jnp.vdot(layer.apply({**variables, "params": params}, x), grad)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        alone = jax.jit(jax.grad(loss))(variables["params"])
        jax.grad(loss)(variables["params"])
    full = jax.jit(jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad)))(variables)
    tally(same_bits(alone, full["params"]), "the gradient is another one")
    said = [str(w.message) for w in caught if OWG in str(w.message) or "state" in str(w.message)]
    tally(len(said) == 1, f"{len(said)} warnings that state is never updated")
    return tally.verdict("one warning")
