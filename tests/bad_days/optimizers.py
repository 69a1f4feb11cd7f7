"""Optimizers and trainers from outside: optax that needs more than gradients, Equinox,
pmap, mistakes in losses.
"""

import warnings

import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from programs.cases import MATMUL

import jaxfp8

from . import steps
from .libraries import OWG
from .steps import tally_amaxes, tally_state
from .trainers import K, M, N, loss_of, operands, variables_of
from .verdict import Tally, refused, row

NO_WRAPPER = (
    "Flax gives optax the parameters alone, in a TrainState that has no more arguments"
)


def train(
    library,
    tx,
    tally,
    what,
    count=4,
    params_of=lambda p: p,
    start=lambda v: v,
    extra=lambda value, grads, f: {},
):
    """Train by a bare optax loop: state is numpy's to the bit, and parameters are those
    of `tx` alone.

    Args:
        params_of: the parameters that gradients are of, among those that `tx` updates;
            `start` is its inverse.
        extra: what `tx` needs by name, from the loss, its gradient and the loss as a
            function.
    """
    kernel = operands(0)[1]
    wrapped = jaxfp8.train.optimizer(tx)
    variables = variables_of(library)
    params = start(variables)
    state = library.state(variables)
    opt_state = wrapped.init(params)
    alone_state = tx.init(start({"params": variables["params"]}))
    of_step = jax.jit(
        lambda variables, fp8, x, grad: loss_of(
            library, {OWG: fp8, **variables}, x, grad
        )
    )
    for i in range(count):
        (x, _, grad), trained = operands(i), params_of(params)

        def objective(variables, fp8=trained[OWG], x=x, grad=grad):
            return of_step(variables, fp8, x, grad)

        value, grads = jax.value_and_grad(objective)(trained)
        updates, opt_state = wrapped.update(
            grads, opt_state, params, **extra(value, grads, objective)
        )
        # `tx` alone, at the same point; what it calls runs on the same state.
        without = jax.tree.map(
            lambda tree: {"params": tree["params"]}, params, is_leaf=_is_variables
        )
        grads = {"params": grads["params"]}
        with warnings.catch_warnings(action="ignore", category=jaxfp8.FP8StateWarning):
            options = extra(value, grads, objective)
            alone, alone_state = optax.with_extra_args_support(tx).update(
                grads, alone_state, without, **options
            )
        params = optax.apply_updates(params, updates)
        kernel = np.asarray(trained["params"]["kernel"])
        for got, expected in zip(
            _kernels(params), _kernels(optax.apply_updates(without, alone)), strict=True
        ):
            tally(
                np.array_equal(got, expected),
                f"{what}, step {i}: the kernel is not that of optax alone",
            )
        for tree in jax.tree.leaves(params, is_leaf=_is_variables):
            after = tally_state(
                tally, library, tree, state, (x, kernel, grad), what=f"{what}, step {i}"
            )
        state = after
    return opt_state, params


def _is_variables(tree) -> bool:
    return isinstance(tree, dict)


def _kernels(params):
    trees = jax.tree.leaves(params, is_leaf=_is_variables)
    return [tree["params"]["kernel"] for tree in trees]


@row(
    "optimizers that need more than gradients",
    "lookahead, opaque SAM, L-BFGS",
    peer=NO_WRAPPER,
)
def more_than_gradients(library):
    """Two sets of parameters, functions and gradients by name: state is stored once a
    step, parameters are optax's; what an optimizer computes for itself is no warning.
    """
    tally = Tally()
    with warnings.catch_warnings(action="error", category=jaxfp8.FP8StateWarning):
        ahead = optax.lookahead(optax.sgd(1e-2), 3, 0.5)
        train(
            library,
            ahead,
            tally,
            "lookahead",
            4,
            lambda p: p.fast,
            optax.LookaheadParams.init_synced,
        )
        sam = optax.contrib.sam(
            optax.sgd(1e-2), optax.sgd(1e-3), sync_period=3, opaque_mode=True
        )

        def for_sam(value, grads, objective):
            return {"grad_fn": lambda params, i: jax.grad(objective)(params)}

        train(library, sam, tally, "SAM", extra=for_sam)

        def for_search(value, grads, objective):
            return {"value": value, "grad": grads, "value_fn": objective}

        train(library, optax.lbfgs(1e-2), tally, "L-BFGS", extra=for_search)
        search = optax.chain(optax.sgd(1e-2), optax.scale_by_backtracking_linesearch(5))
        train(library, search, tally, "a line search", extra=for_search)
    return tally.verdict("as optax alone, and the true amaxes")


@row(
    "optimizers that need more than gradients",
    "parameters to evaluate, of schedule-free",
    peer=NO_WRAPPER,
)
def schedule_free(library):
    """`schedule_free_eval_params` of all variables: parameters are averaged, state is
    as it is.
    """
    tally = Tally()
    opt_state, params = train(
        library, optax.contrib.schedule_free_sgd(1e-2), tally, "schedule-free"
    )
    evaluated = optax.contrib.schedule_free_eval_params(opt_state, params)
    z = opt_state.z["params"]["kernel"]
    b1 = opt_state.b1
    kernel = (np.asarray(params["params"]["kernel"]) - (1 - b1) * np.asarray(z)) / b1
    tally(
        np.allclose(evaluated["params"]["kernel"], kernel, rtol=1e-6),
        "the kernel is not the average",
    )
    tally(steps.same_bits(evaluated[OWG], params[OWG]), "the state is another one")
    return tally.verdict()


NO_FUNCTIONS = "Flax's FP8 is Linen modules"


@row("Equinox's checkpointed while loop: the true amax or an error", peer=NO_FUNCTIONS)
def checkpointed_loop(library):
    """The loop's own backward adds cotangents up. With `fork` in its carry the true
    amax, as its bounded kind has by itself; state that it closes over is refused."""
    tally = Tally()
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    # Small integers by the unit matrix: exact, for a first step has scale 1.
    x = jnp.arange(M * K, dtype=jnp.float32).reshape(M, K) % 8
    factors = jnp.float32([4, 0.5, 1])

    def gradient(grad, kind, is_carried):
        def objective(params):
            kernel, state = params

            def body(carry):
                y, i, state = carry
                state, used = (
                    jaxfp8.train.fork(state) if is_carried else (state, params[1])
                )
                y = jaxfp8.dot_general(y, kernel, MATMUL, recipe=recipe, state=used)
                return y * factors[i], i + 1, state

            carry = x, jnp.int32(0), state if is_carried else None
            return jnp.sum(
                equinox.internal.while_loop(
                    lambda c: c[1] < len(factors),
                    body,
                    carry,
                    max_steps=4,
                    kind=kind,
                    **options[kind],
                )[0]
            )

        options = {"checkpointed": {"checkpoints": 2}, "bounded": {}}
        return jax.jit(grad(objective))((jnp.eye(K), jaxfp8.init_state(recipe)))[1]

    for grad, kind, is_carried in (
        (jax.grad, "checkpointed", True),
        (jaxfp8.grad, "bounded", True),
        (jaxfp8.grad, "bounded", False),
        (jax.grad, "bounded", False),
    ):
        with tally.raising(kind):
            amax = gradient(grad, kind, is_carried).input.amax_history[0]
            tally(np.isclose(amax, 4 * 7, rtol=1e-5), f"{kind}: {amax}, not 28")
    refused(
        lambda: gradient(jaxfp8.grad, "checkpointed", False),
        tally,
        "state closed over",
        "fork",
    )
    return tally.verdict("the true amax, or an error")


@row("a norm of all variables in the loss", any_layer=True)
def norm_of_all(library):
    """State is no part of a norm: an error that says so, where gradients of state
    combine by max; of the parameters alone it is right."""
    tally = Tally()
    (x, kernel, grad) = operands(0)
    variables = variables_of(library)
    for name, norm in (
        ("optax.global_norm", optax.global_norm),
        (
            "a sum of squares",
            lambda v: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(v)),
        ),
    ):
        call = library.grad(lambda v, norm=norm: loss_of(library, v, x, grad) + norm(v))
        refused(lambda call=call: call(variables), tally, name, "FP8 state")
        call = library.grad(
            lambda v, norm=norm: loss_of(library, v, x, grad) + norm(v["params"])
        )
        with tally.raising(f"{name} of the parameters"):
            tally_amaxes(tally, library, call(variables), (x, kernel, grad))
    return tally.verdict("an error")


@row("the gradient of an earlier step", any_layer=True)
def stale_gradient(library):
    """State that is stored from a gradient which was taken of the state before the
    last: an error that names it.
    """
    tally = Tally()
    variables = variables_of(library)
    grads = []
    for i in range(4):
        x, _, grad = operands(i)
        grads.append(
            library.grad(lambda v, x=x, grad=grad * 4**i: loss_of(library, v, x, grad))(
                variables
            )
        )
        variables = library.update(variables, grads[-1])
    refused(
        lambda: library.update(variables, grads[1]),
        tally,
        "two steps late",
        "another step",
    )
    return tally.verdict("an error")


@row("`pmap` over devices, gradients averaged")
def pmapped(library):
    """Eight devices with data of their own: the largest amax of all on each; what is
    said of it names pmap.
    """
    tally = Tally()
    (_, kernel, _) = operands(0)
    variables = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (8, *np.shape(leaf))),
        library.variables(kernel),
    )

    def step(variables, x, grad):
        grads = jax.grad(lambda v: loss_of(library, v, x, grad))(variables)
        return library.update(variables, jax.lax.pmean(grads, "data"))

    parts = [steps.operands(M, K, N, 2.0**j, seed=j) for j in range(8)]
    x, grad = (np.stack([part[which] for part in parts]) for which in (0, 2))
    with warnings.catch_warnings(record=True, action="always") as caught:
        after = jax.pmap(step, axis_name="data")(variables, x, grad)
    for j in (0, 7):
        shard = jax.tree.map(lambda leaf, j=j: np.asarray(leaf[j]), after)
        whole = np.concatenate(x), kernel, np.concatenate(grad)
        tally_amaxes(tally, library, shard, whole, f"device {j}, ", rtol=1e-5)
    said = [str(w.message) for w in caught if "FP8 state" in str(w.message)]
    tally(not said or all("pmap" in message for message in said), f"it says {said[:1]}")
    return tally.verdict("the true amax")
