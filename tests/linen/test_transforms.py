"""FP8 state under Linen's transformations: bitwise the oracle's after three steps, in whatever program the layer is.

`SHARED` programs use one state four times: the next state is the max over the uses. `STACKED` ones have a state a use.
All are right with `jaxfp8.grad`, and all but those in `NOT_PLAIN` with `jax.grad` too.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8

from .probes import FP8, OWG, RECIPE, USES, N, Probe, assert_state, data, dense, find, train

SPLIT = {"params": True}
SAME = {"params": False}


def shared_scan(body, length=None):
    return nn.scan(body, variable_broadcast=("params", OWG), split_rngs=SAME, length=length)


class Program(nn.Module):
    """A program of a probe, by name."""

    run: str

    @nn.compact
    def __call__(self, total, uses):
        return globals()[self.run](total, uses)


def each(call, total, uses):
    for i in range(USES):
        total, _ = call(total, jax.tree.map(lambda a, i=i: a[i], uses))
    return total, None


def in_two(uses):
    return jax.tree.map(lambda a: a.reshape(2, USES // 2, *a.shape[1:]), uses)


def called_twice(total, uses):
    return each(Probe(name="probe"), total, uses)


def remat_called_twice(total, uses):
    return each(nn.remat(Probe)(name="probe"), total, uses)


def jit_called_twice(total, uses):
    return each(nn.jit(Probe)(name="probe"), total, uses)


def scan_broadcast(total, uses):
    return shared_scan(Probe)(name="probe")(total, uses)


def scan_of_remat_broadcast(total, uses):
    return shared_scan(nn.remat(Probe, prevent_cse=False))(name="probe")(total, uses)


def remat_of_scan_broadcast(total, uses):
    return nn.remat(shared_scan(Probe))(name="probe")(total, uses)


def scan_of_scan_broadcast(total, uses):
    return shared_scan(shared_scan(Probe))(name="probe")(total, in_two(uses))


def scan_broadcast_called_twice(total, uses):
    scan = shared_scan(Probe)(name="probe")
    first, second = (jax.tree.map(lambda a, i=i: a[i], in_two(uses)) for i in range(2))
    return scan(scan(total, first)[0], second)


def remat_of_twice(total, uses):
    return nn.remat(CalledTwice)(name="twice")(total, uses)


def scan_of_twice(total, uses):
    return shared_scan(CalledTwice)(name="twice")(total, in_two(uses))


def vmap_none(total, uses):
    mapped = nn.vmap(Probe, in_axes=(None, 0), out_axes=0, variable_axes={"params": None, OWG: None}, split_rngs=SAME)
    return mapped(name="probe")(total, uses)


def vmap_none_of_scan(total, uses):
    mapped = nn.vmap(
        shared_scan(Probe), in_axes=(None, 0), out_axes=0, variable_axes={"params": None, OWG: None}, split_rngs=SAME
    )
    return mapped(name="probe")(total, in_two(uses))


def cond_in_scan(total, uses):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, total, use):
            probe = Probe(name="probe")
            if self.is_initializing():
                return probe(total, use)
            return nn.cond(use[0][0, 0] < jnp.inf, lambda m, t: m(t, use)[0], lambda m, t: t, probe, total), None

    return shared_scan(Body)(name="body")(total, uses)


def shared_scope(total, uses):
    class Wrapper(nn.Module):
        inner: nn.Module

        def setup(self):
            nn.share_scope(self, self.inner)

        def __call__(self, total, use):
            return self.inner(total, use)

    return each(Wrapper(Probe()), total, uses)


class CalledTwice(nn.Module):
    """A probe called for each of a stack of uses."""

    @nn.compact
    def __call__(self, total, uses):
        probe = Probe(name="probe")
        for i in range(len(uses[0])):
            total, _ = probe(total, jax.tree.map(lambda a, i=i: a[i], uses))
        return total, None


SHARED = (
    called_twice,
    remat_called_twice,
    jit_called_twice,
    scan_broadcast,
    scan_of_remat_broadcast,
    remat_of_scan_broadcast,
    scan_of_scan_broadcast,
    scan_broadcast_called_twice,
    remat_of_twice,
    scan_of_twice,
    vmap_none,
    vmap_none_of_scan,
    cond_in_scan,
    shared_scope,
)
# The state enters these functions as an argument, once an iteration or call, and autodiff adds what comes back.
NOT_PLAIN = (remat_called_twice, jit_called_twice, scan_of_remat_broadcast)


def names(programs):
    return pytest.mark.parametrize("program", [program.__name__ for program in programs])


@names(SHARED)
def test_shared_state(program):
    train(Program(program), rows=None)


@names(program for program in SHARED if program not in NOT_PLAIN)
def test_shared_state_under_plain_grad(program):
    train(Program(program), rows=None, transform=jax.grad, steps=2)


@names(NOT_PLAIN)
def test_plain_grad_sums_in_these(program):
    """What docs say needs `jaxfp8.grad`. Where one of these turns green, the docs can say less."""
    with pytest.raises(AssertionError, match="step 0: input amax_history"):
        train(Program(program), rows=None, transform=jax.grad, steps=1)


# ------------------------------------------------------------------------------------------------------ a state a use


def stacked_scan(body, **options):
    return nn.scan(body, variable_axes={"params": 0, OWG: 0}, split_rngs=SPLIT, length=USES, **options)


def scan_axis_0(total, uses):
    return stacked_scan(Probe)(name="probe")(total, uses)


def scan_of_remat_axis_0(total, uses):
    return stacked_scan(nn.remat(Probe, prevent_cse=False))(name="probe")(total, uses)


def scan_axis_0_unrolled(total, uses):
    return stacked_scan(Probe, unroll=2)(name="probe")(total, uses)


def scan_of_state_alone(total, uses):
    """One kernel for all iterations, a state for each."""
    body = nn.scan(Probe, variable_broadcast="params", variable_axes={OWG: 0}, split_rngs=SAME, length=USES)
    return body(name="probe")(total, uses)


def vmap_axis_0(total, uses):
    mapped = nn.vmap(
        Probe, in_axes=(None, 0), out_axes=0, variable_axes={"params": 0, OWG: 0}, split_rngs=SPLIT, axis_size=USES
    )
    return mapped(name="probe")(total, uses)


def vmap_of_remat_axis_0(total, uses):
    mapped = nn.vmap(
        nn.remat(Probe), in_axes=(None, 0), out_axes=0, variable_axes={"params": 0, OWG: 0}, split_rngs=SPLIT
    )
    return mapped(name="probe")(total, uses)


STACKED = (
    scan_axis_0,
    scan_of_remat_axis_0,
    scan_axis_0_unrolled,
    scan_of_state_alone,
    vmap_axis_0,
    vmap_of_remat_axis_0,
)


@names(STACKED)
def test_stacked_state_under_plain_grad(program):
    train(Program(program), rows=USES, transform=jax.grad)


@names((scan_of_remat_axis_0, vmap_axis_0))
def test_stacked_state(program):
    train(Program(program), rows=USES, steps=2)


# -------------------------------------------------------------------------------------------------------- branches


def cond_sometimes(total, uses):
    """Uses 1 and 3 run."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, total, numbered):
            index, use = numbered
            probe = Probe(name="probe")
            if self.is_initializing():
                return probe(total, use)
            return nn.cond(index % 2 == 1, lambda m, t: m(t, use)[0], lambda m, t: t, probe, total), None

    return shared_scan(Body)(name="body")(total, (jnp.arange(USES), uses))


@pytest.mark.parametrize("transform", [jax.grad, jaxfp8.grad], ids=["jax", "jaxfp8"])
def test_cond_sometimes_taken(transform):
    train(Program("cond_sometimes"), rows=None, used=(1, 3), transform=transform, steps=2)


class Switch(nn.Module):
    """One of two layers; an index beyond them runs neither."""

    @nn.compact
    def __call__(self, index, x):
        layers = [dense(name=f"dense_{i}") for i in range(2)]
        if self.is_initializing():
            return sum(layer(x) for layer in layers)

        def run(i):
            return lambda module, x: layers[i](x)

        return nn.switch(index, [run(0), run(1), lambda module, x: jnp.zeros((len(x), N))], self, x)


def test_switch_touches_what_runs():
    (x, *_), (grad, *_) = data(0)
    module = Switch()
    variables = module.init(jax.random.key(0), 0, x)

    @jax.jit
    def gradients(index):
        return jax.grad(lambda variables: jnp.vdot(module.apply(variables, index, x), grad))(variables)[OWG]

    for index in range(3):
        got = gradients(index)
        for i in range(2):
            kernel = np.asarray(variables["params"][f"dense_{i}"]["kernel"])
            state = got[f"dense_{i}"]["Fp8DotGeneral_0"]
            if i == index:
                first = oracle.LayerState.init(RECIPE.amax_history_len)
                assert_state(state, oracle.dense_step(x, kernel, grad, first).state, f"branch {i}")
            else:
                assert not any(np.any(leaf) for leaf in jax.tree.leaves(state)), "zero: untouched"


# ------------------------------------------------------------------------------------- transformations of the apply


APPLY = {
    "scan over microbatches": lambda apply, x, grad: jax.lax.scan(
        lambda total, use: (total + apply(*use), None), jnp.float32(0), (x, grad)
    )[0],
    "vmap over examples": lambda apply, x, grad: jnp.sum(jax.vmap(apply)(x, grad)),
    "checkpoint that closes over the state": lambda apply, x, grad: sum(
        jax.checkpoint(apply)(x[i], grad[i]) for i in range(USES)
    ),
    "jit that closes over the state": lambda apply, x, grad: sum(jax.jit(apply)(x[i], grad[i]) for i in range(USES)),
    "map": lambda apply, x, grad: jnp.sum(jax.lax.map(lambda use: apply(*use), (x, grad))),
}


@pytest.mark.parametrize("program", APPLY.values(), ids=APPLY)
def test_transformations_around_apply(program):
    """A function that closes over the variables is right under plain `jax.grad`."""

    class Around(nn.Module):
        @nn.compact
        def __call__(self, total, uses):
            probe = Probe(name="probe")
            if self.is_initializing():
                return probe(total, jax.tree.map(lambda a: a[0], uses))
            unbound, variables = probe.unbind()
            return program(lambda x, grad: unbound.apply(variables, jnp.float32(0), (x, grad))[0], *uses), None

    train(Around(), rows=None, transform=jax.grad, steps=2)


def test_while_loop_runs_forward():
    """A while_loop has no reverse mode; its forward reads the state it is given."""

    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(x.shape[-1], use_bias=False, dot_general_cls=FP8, name="dense")
            if self.is_initializing():
                return layer(x)

            def more(module, carry):
                return carry[0] < 3

            def body(module, carry):
                return carry[0] + 1, layer(carry[1])

            return nn.while_loop(more, body, self, (0, x), broadcast_variables=True)[1]

    (x, *_), _ = data(0)
    module = Loop()
    variables = module.init(jax.random.key(0), x)
    variables[OWG]["dense"]["Fp8DotGeneral_0"]["input_amax_history"] = jnp.float32([50, 0, 0])
    layer = nn.Dense(x.shape[-1], use_bias=False, dot_general_cls=FP8)
    alone = {key: find(value, "dense") for key, value in variables.items()}
    expected = x
    for _ in range(3):
        expected = layer.apply(alone, expected)
    oracle.assert_bitwise(module.apply(variables, x), expected, "three iterations")
