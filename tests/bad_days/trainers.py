"""Trainers: loss scales, clipping, decay, means over devices, casts, skipped steps;
what they do to state.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from cpu_mesh import mesh_of
from flax.training import dynamic_scale
from jax.sharding import PartitionSpec as P

import jaxfp8

from . import steps
from .libraries import OWG
from .steps import (
    is_clean,
    same_bits,
    step_of,
    tally_amaxes,
    tally_products,
    tally_state,
)
from .verdict import Tally, row

M, K, N = 16, 24, 8


def operands(i, data=1.0, grads=1.0):
    return steps.operands(M, K, N, data, grads, seed=3 * i)


def create(library, tx):
    _, kernel, _ = operands(0)
    return library.train_state.create(
        apply_fn=library.dense(N).apply, params=library.variables(kernel), tx=tx
    )


def kernel_of(train):
    return np.asarray(train.params["params"]["kernel"])


def loss(train, variables, x, grad):
    return jnp.vdot(train.apply_fn(variables, x), grad)


def loss_of(library, variables, x, grad):
    """The loss of one layer, without a TrainState."""
    return jnp.vdot(library.dense(N).apply(variables, x), grad)


def variables_of(library):
    """Of one layer, as JAX has them."""
    return jax.tree.map(jnp.asarray, library.variables(operands(0)[1]))


@jax.jit
def advance(train, x, grad):
    return train.apply_gradients(
        grads=jax.grad(lambda v: loss(train, v, x, grad))(train.params)
    )


def tally_next(tally, library, variables, what, i=1):
    """The products of one more step, with the kernel as it is."""
    x, _, grad = operands(i)
    kernel = np.asarray(variables["params"]["kernel"])
    tally_products(
        tally, step_of(library, N)(variables, x, grad), (x, kernel, grad), what
    )


@row("DynamicScale")
def flax_dynamic_scale(library):
    """Flax's own loss scaling, which divides the whole tree of gradients by 65536. What
    is stored must be the state of the gradients that the layer saw.
    """
    tally = Tally()
    scaler = dynamic_scale.DynamicScale(scale=65536.0)
    train = create(library, optax.sgd(1e-3))

    @jax.jit
    def step(train, x, grad):
        gradient = scaler.value_and_grad(lambda v: loss(train, v, x, grad))
        return train.apply_gradients(grads=gradient(train.params)[3])

    for i in range(3):
        x, _, grad = operands(i)
        kernel = kernel_of(train)
        train = step(train, x, grad)
        seen = x, kernel, grad * 65536
        tally_amaxes(tally, library, train.params, seen, rtol=1e-5)
    tally_next(tally, library, train.params, "the step after")
    return tally.verdict("the true amax")


@row("the whole gradient clipped under jit: NaN in the next loss")
def clipped_by_hand(library):
    """The norm holds the state's entries, so that the parameters' step is far too
    small: a healthy loss would lie.
    """
    tally = Tally()

    @jax.jit
    def clipped_step(train, x, grad):
        grads = jax.grad(lambda v: loss(train, v, x, grad))(train.params)
        factor = jnp.minimum(1, 0.03 / optax.global_norm(grads))
        return train.apply_gradients(
            grads=jax.tree.map(lambda leaf: leaf * factor, grads)
        )

    x, _, grad = operands(0)
    first = create(library, optax.sgd(1e-3))
    for when, before in {
        "the first step": first,
        "the second step": advance(first, x, grad),
    }.items():
        train = clipped_step(before, x, grad)
        tally(
            not np.isfinite(loss(train, train.params, x, grad)),
            f"the loss after {when} looks healthy",
        )
    return tally.verdict("NaN in the next loss")


@row("`pmean` of gradients", any_layer=True)
def mean_over_devices(library):
    """Eight devices with data of their own in `shard_map`; the whole tree of gradients
    goes through `pmean`.

    Checked or not, devices must end with the largest amax of all.
    """
    mesh = mesh_of(data=8)
    tally = Tally()
    layer = library.dense(N)
    kernel = operands(0)[1]

    def step(variables, x, grad):
        gradient = jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad))(variables)
        return library.update(variables, jax.lax.pmean(gradient, "data"))

    for checked in (True, False):
        # ours says that check_vma=False needs to be told about pipelines
        with (
            warnings.catch_warnings(action="ignore"),
            tally.raising(f"check_vma={checked}"),
        ):
            specs = {
                "in_specs": (P(), P("data"), P("data")),
                "out_specs": P(),
                "check_vma": checked,
            }
            run = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
            variables = library.variables(kernel)
            for i in range(3 if library.is_ours else 1):
                parts = [operands(8 * i + j, 2.0**j) for j in range(8)]
                x, grad = (
                    np.concatenate([part[which] for part in parts]) for which in (0, 2)
                )
                variables = run(variables, x, grad)
                tally_amaxes(
                    tally,
                    library,
                    variables,
                    (x, kernel, grad),
                    f"check_vma={checked}, ",
                    rtol=1e-5,
                )
    return tally.verdict("the true amax")


@row("`apply_if_finite`")
def apply_if_finite(library):
    """A step with an Inf is rejected; state is clean and the next products are
    right.
    """
    train = create(library, optax.apply_if_finite(optax.sgd(1e-3), 5))
    tally = Tally()
    x, _, grad = operands(0)
    train = advance(train, x, grad)
    kernel = np.asarray(train.params["params"]["kernel"])
    bad = x.copy()
    bad[0, 0] = np.inf
    train = advance(train, bad, grad)
    tally(np.array_equal(train.params["params"]["kernel"], kernel), "the kernel moved")
    tally(is_clean(train.params), f"history {library.history(train.params, 'input')}")
    tally_next(tally, library, train.params, "the step after")
    return tally.verdict()


@row("casts of the tree to bf16")
def cast_gradients(library):
    """Gradients cast as a whole: stored state stays float32 (a run is not traced
    again), products are right.
    """
    train = create(library, optax.sgd(1e-3))
    tally = Tally()

    @jax.jit
    def step(train, x, grad):
        grads = jax.grad(lambda v: loss(train, v, x, grad))(train.params)
        return train.apply_gradients(
            grads=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), grads)
        )

    for i in range(3):
        x, _, grad = operands(i)
        train = step(train, x, grad)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(train.params[OWG])}
    tally(dtypes == {"float32"}, f"state became {sorted(dtypes)}")
    tally_next(tally, library, train.params, "the step after")
    return tally.verdict()


# What trainers do to a tree of gradients or variables, done to state that was right;
# below_zero.py has what makes it negative.
SLIPPED = {
    "unscaled by 65536": lambda leaf: leaf / 65536,
    "clipped": lambda leaf: leaf * 0.0317,
    "averaged over 8": lambda leaf: leaf / 8,
    "summed over 3 uses": lambda leaf: leaf * 3,
    "weight decay": lambda leaf: leaf * 0.9,
    "cast to bfloat16": lambda leaf: leaf.astype(oracle.BF16),
    "cast to float16": lambda leaf: leaf.astype(oracle.F16),
    "set to zero": lambda leaf: leaf * 0,
    "divided by zero": lambda leaf: leaf / np.zeros_like(leaf),
    "not a number": lambda leaf: leaf * np.nan,
}


@row("state scaled as a whole: right two steps later", any_layer=True)
def slipped(library):
    """State after what trainers do to whole trees: the next step has no NaN, the one
    after it has right products.
    """
    tally = Tally()
    step = step_of(library, N)
    for name, slip in SLIPPED.items():
        # Ours also with data of 1e5 and gradients of 1e-7.
        for sizes in ((1.0, 1.0), (1e5, 1e-7))[: 2 if library.is_ours else 1]:
            variables = library.variables(operands(0)[1])
            for i in range(5):
                x, kernel, grad = given = operands(i, *sizes)
                if i == 3:
                    with np.errstate(all="ignore"):
                        leaves = {
                            key: slip(np.asarray(v))
                            for key, v in variables[OWG][library.module].items()
                        }
                    state = {
                        library.module: jax.tree.map(
                            lambda leaf: np.asarray(leaf, np.float32), leaves
                        )
                    }
                    variables = {**variables, OWG: state}
                    before = library.state(variables)
                got = step({**variables, "params": {"kernel": kernel}}, x, grad)
                if i >= 3:
                    tally(got.is_finite, f"{name}: not finite {i - 2} steps after")
                    before = tally_state(
                        tally,
                        library,
                        got.variables,
                        before,
                        given,
                        what=f"{name}, step {i}",
                    )
                variables = library.update(variables, got.variables)
            tally_products(tally, got, given, name)
    return tally.verdict()


@row("gradient w.r.t. params only: works, warns once", any_layer=True)
def parameters_alone(library):
    """Without the gradient of the state nothing updates it, and scales stay at 1: that
    must be said, once for all layers, traces and calls; inference is no mistake."""
    layer = library.dense(N)
    tally = Tally()
    x, kernel, grad = operands(0)
    variables = library.variables(kernel)

    def loss(params):
        return jnp.vdot(layer.apply({**variables, "params": params}, x), grad)

    with warnings.catch_warnings(action="error", category=jaxfp8.FP8StateWarning):
        full = jax.jit(jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad)))(variables)
        loss(variables["params"])
    with warnings.catch_warnings(record=True, action="default") as caught:
        for _ in range(2):
            alone = jax.jit(jax.grad(lambda params: loss(params)))(variables["params"])
            jax.grad(loss)(variables["params"])
    tally(same_bits(alone, full["params"]), "the gradient is another one")
    said = [
        str(w.message)
        for w in caught
        if OWG in str(w.message) or "state" in str(w.message)
    ]
    tally(len(said) == 1, f"{len(said)} warnings that state is never updated")
    tally(
        any(np.any(leaf) for leaf in jax.tree.leaves(full[OWG])),
        "with the state it is not updated",
    )
    return tally.verdict("one warning")
