"""inspect.count: the fractions of every product against numpy, of steps that compute
what they compute otherwise.

`use` is `vdot(layer(x), grad)`, so that grad is, to the bit, what arrives at the
output. Sizes are powers of two, so fractions are exact; of others XLA multiplies by a
rounded 1 / size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from equality import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec as P
from programs.cases import MATMUL, stacked
from programs.known_amax import OPERANDS

import jaxfp8
from jaxfp8 import inspect

M, K, N, H = 16, 32, 8, 3
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)


def tensors(seed=0, uses=1):
    """x, kernel and grad: in each some elements saturate at scale 1 or become zero, in
    other numbers in every use.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-30, 18, shape)).astype(
            np.float32
        )

    return draw(uses, M, K), draw(K, N), draw(uses, M, N)


def use(state, kernel, x, grad, recipe=RECIPE):
    return jnp.vdot(
        jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state), grad
    )


FORMATS = oracle.E4M3, oracle.E4M3, oracle.E5M2


def expected(operands, scales=(1, 1, 1), formats=FORMATS):
    triples = zip(operands, scales, formats, strict=True)
    return [
        oracle.counts(values, scale, fmt) / np.float32(values.size)
        for values, scale, fmt in triples
    ]


def assert_counts(counts, fractions, what, layer="product", names=OPERANDS):
    """`fractions` has the pair of each tensor; the table has the worst first."""
    got = {
        row["tensor"]: (row["saturated"], row["flushed"])
        for row in counts.rows
        if row["layer"] == layer
    }
    assert got.keys() == set(names)
    for name, pair in zip(names, fractions, strict=True):
        oracle.assert_bitwise(np.float32(got[name]), pair, f"{what}: {name}")
    worst = [(row["saturated"], row["flushed"]) for row in counts.rows]
    assert worst == sorted(worst, reverse=True)


def test_steps():
    """At scale 1, then at that of the amaxes; a counted step is compiled once, and
    gives the bits of any other.
    """
    x, kernel, grad = tensors()
    traces = []

    @jax.jit
    def step(state, x):
        traces.append(None)
        return jaxfp8.update_state(state, jax.grad(use)(state, kernel, x, grad[0]))

    state = jaxfp8.init_state(RECIPE)
    oracle_state = oracle.LayerState.init(H)
    for i, size in enumerate(np.float32([1, 4, 0.5])):
        operands = (x[0] * size, kernel, grad[0])
        after = oracle.dense_step(*operands, oracle_state)
        scales = [after.scales[name] for name in OPERANDS]
        fractions = expected(operands, scales)
        assert np.any([pair[0] > 0 for pair in fractions]) == (i < 2)
        assert np.all([pair[1] > 0 for pair in fractions])
        new, counts = inspect.count(step, state, operands[0])
        assert_counts(counts, fractions, f"step {i}")
        assert_same_bits(new, step(state, operands[0]), f"step {i}")
        state, oracle_state = new, after.state
    assert len(traces) == 2
    head, worst = str(counts).split("\n")[:2]
    row = counts.rows[0]
    assert head.split() == ["layer", "tensor", "saturated", "flushed"]
    assert worst.split() == [
        "product",
        row["tensor"],
        f"{row['saturated']:.2%}",
        f"{row['flushed']:.2%}",
    ]


def test_without_state():
    """Scales of the tensors at hand."""
    (x,), kernel, (grad,) = tensors(7)
    bounds = [np.max(np.abs(values)) for values in (x, kernel, grad)]
    scales = np.float32([448, 448, 57344]) / np.float32(bounds)
    step = jax.grad(use, argnums=1)
    recipe = jaxfp8.Float8CurrentScaling()
    _, counts = inspect.count(step, None, kernel, x, grad, recipe)
    assert_counts(counts, expected((x, kernel, grad), scales), "recipe")


def test_loops_batches_and_calls():
    """A row for each iteration, each member of a batch and each call, in the order of
    the program.
    """
    x, kernel, grad = tensors(1, uses=3)
    state = jaxfp8.init_state(RECIPE)

    def scanned(state):
        return jax.lax.scan(
            lambda total, pair: (total + use(state, kernel, *pair), None),
            jnp.float32(0),
            (x, grad),
        )[0]

    def mapped(state):
        return jnp.sum(jax.vmap(use, (None, None, 0, 0))(state, kernel, x, grad))

    def called(state):
        return sum(use(state, kernel, *pair) for pair in zip(x, grad, strict=True))

    for loss in (scanned, mapped, jax.checkpoint(scanned)):
        _, counts = inspect.count(jax.jit(jaxfp8.grad(loss)), state)
        for i in range(3):
            assert_counts(
                counts, expected((x[i], kernel, grad[i])), f"use {i}", f"product[{i}]"
            )
    _, counts = inspect.count(jax.grad(called), state)
    assert {row["layer"] for row in counts.rows} == {
        f"product (call {i})" for i in range(3)
    }
    assert_counts(
        counts, expected((x[2], kernel, grad[2])), "the last call", "product (call 2)"
    )


def test_stacked_layers():
    """The state of a scan over layers is read before the loop."""
    x = tensors(4)[0][0]
    layers = stacked((jnp.eye(K), jaxfp8.init_state(RECIPE)), 3)

    def loss(layers):
        def layer(x, at):
            kernel, state = at
            return jaxfp8.dot_general(
                x, kernel, MATMUL, recipe=RECIPE, state=state
            ), None

        return jnp.sum(jax.lax.scan(layer, jnp.asarray(x), layers)[0])

    _, counts = inspect.count(jax.jit(jaxfp8.grad(loss)), layers)
    (pair,) = (
        np.float32([row["saturated"], row["flushed"]])
        for row in counts.rows
        if row["layer"].endswith("[0]") and row["tensor"] == "input"
    )
    oracle.assert_bitwise(
        pair, oracle.counts(x, 1, oracle.E4M3) / np.float32(x.size), "the first layer"
    )
    assert len(counts.rows) == 9


def test_inputs_that_are_computed_on_the_way():
    """In float32: 448 * (1 + 2**-12) saturates, and 2**-10 * (1 + 2**-12) does not
    become zero; in bfloat16 they are 448 and 2**-10.

    The first four of 16 in a row are 2**row, so x / sqrt(mean(x**2)) is 2 for these,
    and 0 for the others.
    """
    x = np.zeros((M, 16), oracle.BF16)
    x[:, :4] = 2.0 ** np.arange(M)[:, None] / 16
    gamma = np.ones(16, np.float32)
    gamma[:4] = np.float32([224, 224, 2**-11, 2**-11]) * np.float32(
        [1, 1 + 2**-12, 1, 1 + 2**-12]
    )
    kernel = np.ones((16, N), oracle.BF16)
    grad = np.ones((M, N), oracle.BF16)

    def loss(state):
        return use(
            state, kernel, jaxfp8.normalized(x, gamma, kind="rms", epsilon=0.0), grad
        )

    _, counts = inspect.count(jax.jit(jax.grad(loss)), jaxfp8.init_state(RECIPE))
    row = next(row for row in counts.rows if row["tensor"] == "input")
    assert (row["saturated"], row["flushed"]) == (1 / 16, 1 / 16)


def test_experts_and_kernels_that_are_quantized_before():
    """Rows beyond the last group do not count. A kernel of codes with a source counts
    as its source.
    """
    (x,), kernel, (grad,) = tensors(3)
    state = jaxfp8.init_state(RECIPE)
    kernels = np.stack([kernel, 2 * kernel])

    def experts(state):
        return jnp.vdot(
            jaxfp8.ragged_dot(
                x, kernels, jnp.int32([3, 8]), recipe=RECIPE, state=state
            ),
            grad,
        )

    inside = (np.arange(M) < 11)[:, None]
    _, counts = inspect.count(jax.grad(experts), state)
    assert_counts(
        counts,
        expected((np.where(inside, x, 0), kernels, np.where(inside, grad, 0))),
        "experts",
    )

    def before(state, kernel):
        q = jaxfp8.quantize_params({"w": kernel}, {"w": state}, RECIPE)["w"]
        return use(state, q, x, grad)

    _, counts = inspect.count(jax.grad(before, argnums=(0, 1)), state, kernel)
    assert_counts(counts, expected((x, kernel, grad)), "quantized before")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes(kind):
    """x, kernel and grad cut along different axes: the fractions of whole tensors,
    which are one device's bits.
    """
    (x,), kernel, (grad,) = tensors(5)
    specs = P(), P(None, "tp"), P("data"), P("data", "tp")

    def loss(state, kernel, x, grad):
        out = specs[-1] if kind == "Explicit" else None
        y = jaxfp8.dot_general(
            x, kernel, MATMUL, recipe=RECIPE, state=state, out_sharding=out
        )
        return jnp.sum(y * grad)

    arguments = jaxfp8.init_state(RECIPE), kernel, x, grad
    mesh = mesh_of(kind, data=4, tp=2)
    with jax.set_mesh(mesh):
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        _, counts = inspect.count(step, *jax.device_put(arguments, shardings))
    assert_counts(counts, expected((x, kernel, grad)), "mesh")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Each of eight devices has a row, with the fraction of the whole tensor."""
    (x,), kernel, (grad,) = tensors(6)
    recipe = dataclasses.replace(RECIPE, pipeline_axes=())
    step = jax.shard_map(
        lambda *operands: jax.grad(use)(*operands, recipe),
        mesh=mesh_of(data=4, tp=2),
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    state = jaxfp8.init_state(RECIPE)
    _, counts = inspect.count(jax.jit(step), state, kernel, x, grad)
    for i in range(len(counts.rows) // 3):
        assert_counts(
            counts, expected((x, kernel, grad)), f"device {i}", f"product[{i}]"
        )


def test_a_step_without_products():
    with pytest.raises(
        ValueError,
        match=(
            r"count: step: expected a function that takes gradients through FP8 "
            r"products"
        ),
    ):
        inspect.count(jnp.sin, 1.0)


def test_by_product():
    """Codes that a second product has for itself have rows of their own; where products
    share codes there is one.
    """
    (x,), kernel, (grad,) = tensors()
    recipe = jaxfp8.ByProduct(
        jaxfp8.StaticScaling(4.0, 1e6), None, jaxfp8.StaticScaling(9.0, 1e6, 0.5)
    )
    _, counts = inspect.count(
        jax.grad(use, argnums=(1, 2)), None, kernel, x, grad, recipe
    )
    scales = np.float32([448, 448, 448, 57344]) / np.float32([4, 1e6, 9, 0.5])
    fractions = expected((x, kernel, x, grad), scales, (oracle.E4M3, *FORMATS))
    names = "input", "kernel", "wgrad_input", "wgrad_output_grad"
    assert_counts(counts, fractions, "by product", names=names)
