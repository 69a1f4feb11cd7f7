"""cross_entropy: float64's loss and gradients; with FP8 the logits, gradients and next
state of the whole head at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_mesh import mesh_of
from equality import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8

BATCH, D, VOCABULARY = (4, 6), 16, 40
RNG = np.random.default_rng(0)
X = RNG.standard_normal((*BATCH, D)).astype(np.float32)
# Logits up to 40 apart: sums of exponentials are scaled anew in nearly every chunk.
KERNEL = (4 * RNG.standard_normal((D, VOCABULARY))).astype(np.float32)
BIAS = RNG.standard_normal(VOCABULARY).astype(np.float32)
LABELS = RNG.integers(0, VOCABULARY, BATCH).astype(np.int32)
WEIGHTS = RNG.uniform(0, 1, BATCH).astype(np.float32)
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
STATE = jaxfp8.init_state(RECIPE)

# One chunk, equal chunks, a smaller last one.
CHUNKS = pytest.mark.parametrize("chunk_size", [100, 8, 11])


def weighted(losses):
    return jnp.sum(WEIGHTS * losses)


def loss(x, kernel, bias, state=None, **options):
    options = {"bias": bias, "state": state} | options
    return weighted(jaxfp8.train.cross_entropy(x, kernel, LABELS, **options))


def in_float64(labels=LABELS):
    """The losses, and the gradients of their weighted sum by x, kernel and bias."""
    x = X.reshape(-1, D).astype(np.float64)
    kernel = KERNEL.astype(np.float64)
    logits = x @ kernel + BIAS
    one_hot = labels.reshape(-1, 1) == np.arange(VOCABULARY)
    largest = logits.max(1, keepdims=True)
    exponentials = np.exp(logits - largest)
    normalizer = largest[:, 0] + np.log(exponentials.sum(1))
    losses = normalizer - (logits * one_hot).sum(1)
    softmax = exponentials / exponentials.sum(1, keepdims=True)
    ct = (softmax - one_hot) * WEIGHTS.reshape(-1, 1)
    return losses.reshape(BATCH), (
        (ct @ kernel.T).reshape(X.shape),
        x.T @ ct,
        ct.sum(0),
    )


def compare(chunk_size, labels=LABELS):
    """Sums of up to 40 float32 numbers of magnitude 40: 1e-4 is 20 of their ulps."""
    losses, gradients = in_float64(labels)

    def of_labels(x, kernel, bias):
        got = jaxfp8.train.cross_entropy(
            x, kernel, labels, bias=bias, chunk_size=chunk_size
        )
        return weighted(got), got

    (_, got), of_operands = jax.jit(
        jax.value_and_grad(of_labels, argnums=(0, 1, 2), has_aux=True)
    )(X, KERNEL, BIAS)
    np.testing.assert_allclose(got, losses, atol=1e-4)
    for of_operand, wanted in zip(of_operands, gradients, strict=True):
        np.testing.assert_allclose(of_operand, wanted, atol=1e-4)


@CHUNKS
def test_float64(chunk_size):
    compare(chunk_size)


def test_a_label_outside_has_the_logit_0():
    compare(8, np.where(LABELS > 20, -100, LABELS))
    compare(11, np.where(LABELS > 20, VOCABULARY, LABELS))


def at_once(x, kernel, bias, state=None, recipe=RECIPE):
    logits = jaxfp8.dot_general(
        x,
        kernel,
        (((2,), (0,)), ((), ())),
        recipe=recipe,
        state=state,
        preferred_element_type=jnp.float32,
    )
    logits += bias[None, None]
    picked = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return weighted(jax.nn.logsumexp(logits, -1) - picked)


def compare_fp8(chunk_size, gradient=jaxfp8.value_and_grad, steps=3):
    """Logits are the same sums. The gradient of the logits differs by ulps of exp, so
    its amax does; codes of ties may, 2**-3 of a number of E5M2.
    """
    run = {
        name: jax.jit(gradient(function, argnums=(0, 1, 2, 3)))
        for name, function in (
            ("whole", at_once),
            (
                "chunks",
                lambda *args: loss(*args, recipe=RECIPE, chunk_size=chunk_size),
            ),
        )
    }
    state = STATE
    for step in range(steps):
        x = (1 + step) * X
        kernel = KERNEL / (1 + step)
        value, whole = run["whole"](x, kernel, BIAS, state)
        got, chunks = run["chunks"](x, kernel, BIAS, state)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        for a, b in zip(chunks[:3], whole[:3], strict=True):
            np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())
        for operand in ("input", "kernel"):
            assert_same_bits(
                getattr(chunks[3], operand), getattr(whole[3], operand), operand
            )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
            chunks[3].output_grad,
            whole[3].output_grad,
        )
        state = whole[3]


@CHUNKS
def test_delayed_scaling_is_that_of_the_whole_head(chunk_size):
    compare_fp8(chunk_size)


def test_plain_gradient():
    compare_fp8(11, jax.value_and_grad)


def test_bfloat16():
    """Operands are rounded to the dtype of x, logits are not; gradients have the dtypes
    of their operands.
    """
    half = X.astype(jnp.bfloat16)
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(
        half, KERNEL, BIAS, chunk_size=8
    )
    rounded = half.astype(np.float32), KERNEL.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(value, loss(*rounded, BIAS), rtol=1e-6)
    assert [g.dtype.name for g in gradients] == ["bfloat16", "float32", "float32"]
    # Two roundings of the gradient of the logits and of the sums, 2**-8 each.
    exact = jax.grad(loss, argnums=(0, 1))(*rounded, BIAS)
    for got, wanted in zip(gradients[:2], exact, strict=True):
        np.testing.assert_allclose(
            got.astype(np.float32), wanted, atol=2**-7 * np.abs(wanted).max()
        )


def temporaries(function, tokens=512, vocabulary=8192):
    x = jnp.zeros((tokens, D), jnp.bfloat16)
    kernel = jnp.zeros((D, vocabulary), jnp.float32)
    labels = jnp.zeros(tokens, jnp.int32)
    compiled = (
        jax.jit(jax.grad(function, argnums=(0, 1))).lower(x, kernel, labels).compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes / (4 * tokens * vocabulary)


@pytest.mark.parametrize("recipe", [None, jaxfp8.Float8CurrentScaling()])
def test_no_array_of_all_tokens_and_columns(recipe):
    def chunks(x, kernel, labels):
        losses = jaxfp8.train.cross_entropy(
            x, kernel, labels, recipe=recipe, chunk_size=512
        )
        return jnp.mean(losses)

    def whole(x, kernel, labels):
        logits = (x @ kernel.astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    assert temporaries(chunks) < 0.5
    assert temporaries(whole) > 1


def test_four_products():
    """One in the loop of the forward, three in that of the backward."""
    losses = lambda x, state: loss(  # noqa: E731
        x, KERNEL, BIAS, state, recipe=RECIPE, chunk_size=8
    )
    gradients = jaxfp8.grad(losses, argnums=(0, 1))
    text = jax.jit(gradients).lower(X, STATE).as_text()
    assert text.count("stablehlo.while") == 2
    gemms = jaxfp8.inspect.gemms(gradients, X, STATE)
    assert sorted(row["gemm"] for row in gemms.rows) == [
        "dgrad",
        "fprop",
        "fprop",
        "wgrad",
    ]


BAD = {
    "x": (dict(x=LABELS), TypeError, "x: expected bfloat16, float16 or float32"),
    "kernel": (dict(kernel=KERNEL.T), ValueError, r"kernel: expected \[16, vocabulary"),
    "labels": (dict(labels=X[..., 0]), TypeError, "labels: expected ints, got float32"),
    "shape": (dict(labels=LABELS[0]), ValueError, r"labels: expected shape \(4, 6\)"),
    "bias": (dict(bias=BIAS[1:]), ValueError, r"bias: expected shape \(40,\)"),
    "float": (dict(chunk_size=8.0), TypeError, "chunk_size: expected an int, got 8.0"),
    "zero": (dict(chunk_size=0), ValueError, "chunk_size: expected at least 1, got 0"),
    "state": (dict(recipe=RECIPE), ValueError, "DelayedScaling keeps state"),
}


@pytest.mark.parametrize("changed, error, message", BAD.values(), ids=BAD)
def test_errors(changed, error, message):
    arguments = {"x": X, "kernel": KERNEL, "labels": LABELS} | changed
    with pytest.raises(error, match=message):
        jaxfp8.train.cross_entropy(**arguments)


@pytest.mark.parametrize("cut", [P("d"), P(None, None, "d")], ids=["tokens", "width"])
def test_on_a_mesh(cut):
    """One device's loss and state; sums over devices have another order."""
    mesh = mesh_of(d=2)

    def gradients(x):
        return jaxfp8.value_and_grad(loss, argnums=(0, 1, 3))(
            x, KERNEL, BIAS, STATE, recipe=RECIPE, chunk_size=11
        )

    value, (of_x, of_kernel, state) = jax.jit(gradients)(X)
    got, (x, kernel, next_state) = jax.jit(gradients)(
        jax.device_put(X, NamedSharding(mesh, cut))
    )
    np.testing.assert_allclose(got, value, rtol=1e-5)
    np.testing.assert_allclose(x, of_x, atol=0.02 * np.abs(of_x).max())
    np.testing.assert_allclose(kernel, of_kernel, atol=0.02 * np.abs(of_kernel).max())
    assert_same_bits(next_state.input, state.input)
    assert_same_bits(next_state.kernel, state.kernel)
