"""The ops by themselves on a mesh: any dimension may be cut, results are those of one
device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from equality import assert_all_bitwise
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import gradients as oracle_gradients

from jaxfp8 import ops
from mesh import cases, hlo

FORMAT = oracle.E4M3
SPECS = [P("data"), P(None, "fsdp"), P(None, None, "tp"), P("data", "fsdp", "tp")]


def put(x, spec):
    return jax.device_put(x, NamedSharding(cases.mesh(), spec))


def codes(*shape, seed=0):
    return oracle.quantize(
        normal(*shape, seed=seed), np.float32(FORMAT.max / 8), FORMAT
    )[0]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_tensor(spec):
    x = normal(4, 6, 10)
    scale = np.float32(3)
    data, top = oracle.quantize(x, scale, FORMAT)
    cut = put(x, spec)
    oracle.assert_bitwise(jax.jit(ops.amax)(cut), top, "amax")
    assert_all_bitwise(
        jax.jit(lambda x: ops.quantize(x, scale, FORMAT.dtype))(cut),
        (data, top),
        "quantize",
    )
    both = jax.jit(lambda x: ops.quantize_transpose(x, scale, FORMAT.dtype))(cut)
    assert_all_bitwise(both, (data, data.swapaxes(1, 2), top), "quantize_transpose")
    out = jax.jit(lambda q: ops.dequantize(q, scale, np.float32))(put(data, spec))
    oracle.assert_bitwise(
        out,
        oracle.dequantize(data, scale, np.dtype(np.float32)),
        "dequantize",
    )


@pytest.mark.parametrize(
    "spec",
    [P("data", None, "fsdp"), P(("data", "fsdp"), "tp", None), P(None, "tp", "data")],
    ids=str,
)
def test_producers(spec):
    """Rows and columns may be cut, but not the two halves of a gated activation, nor a
    row that is normalised.
    """
    x = normal(8, 2, 16)
    scale = np.float32(3)
    for name, m, n in (("silu_gated", 8, 16), ("gelu", 16, 16)):
        operand = (
            put(x, spec)
            if name == "silu_gated"
            else put(x.reshape(m, n), P(spec[0], spec[2]))
        )
        run = jax.jit(
            lambda x, name=name: ops.quantize_activation(
                x, scale, FORMAT.dtype, activation=name
            )
        )
        oracle.activation(np.asarray(operand), name).check(
            *map(np.asarray, run(operand)), scale, FORMAT, what=name
        )
        grad = put(normal(m, n, seed=2), P(spec[0], spec[2]))
        quantize_grad = lambda x, grad, name=name: ops.quantize_activation_grad(  # noqa: E731
            x, grad, scale, FORMAT.dtype, activation=name, column_sums=True
        )
        data, data_t, top, sums = map(np.asarray, jax.jit(quantize_grad)(operand, grad))
        exact = oracle_gradients.activation(np.asarray(operand), np.asarray(grad), name)
        exact = oracle.Values(
            *(part.reshape(m, -1) for part in (exact.exact, exact.bound))
        )
        exact.check(
            data.reshape(m, -1),
            data_t.reshape(-1, m),
            top,
            scale,
            FORMAT,
            what=f"gradient of {name}",
        )
        np.testing.assert_allclose(
            sums.reshape(-1), exact.exact.sum(0), rtol=1e-5, atol=1e-5
        )
    gamma = normal(16, seed=1)
    both = jax.jit(
        lambda x, gamma: ops.quantize_norm(
            x,
            gamma,
            None,
            scale,
            FORMAT.dtype,
            kind="layer",
            epsilon=1e-6,
            rows=2,
            amax=scale,
        )
    )
    data, data_t, top = map(np.asarray, both(put(x, spec), put(gamma, P("tp"))))
    oracle.norm(x, gamma, None, "layer", 1e-6).check(
        data, data_t, top, scale, FORMAT, start=scale
    )


@pytest.mark.parametrize("extra", ["", "bias", "accumulator", "bias accumulator"])
@pytest.mark.parametrize(
    "spec",
    [
        P("data", "tp"),
        P("tp", "data"),
        P(None, ("data", "tp")),
        P(("data", "fsdp"), None),
    ],
)
def test_product(spec, extra):
    """A bias and an accumulator are added once, whatever is cut: also where each device
    has a part of the sum.
    """
    m, n, k = 8, 4, 16
    a = codes(m, k, seed=1)
    b = codes(n, k, seed=2)
    scales = np.float32(2.0**-7), np.float32(0.3)
    options = {
        name: normal(*shape, seed=3)
        for name, shape in (("bias", (n,)), ("accumulator", (m, n)))
        if name in extra
    }

    @jax.jit
    def product(a, b, options):
        return ops.scaled_matmul(
            a, b, *scales, out_dtype=jnp.float32, precise=True, **options
        )

    expected = oracle.scaled_matmul(a, b, *scales, **options)
    expected.check(
        product(put(a, spec), put(b, P(None, spec[1])), options), f"a {spec}"
    )
    expected.check(
        product(put(a, spec), put(b, P("fsdp")), options), f"a {spec}, b by rows"
    )


def test_histories_are_written_by_xla_on_a_mesh():
    """As the reductions of the amaxes are, with which XLA can move them; delayed_scales
    is a custom call.
    """

    def step(history, amax):
        (scale,) = ops.delayed_scales([history], [amax], fp8_max=[448.0])
        return ops.write_histories([[(history, amax)]], [[(amax, scale.scale_inv)]])

    history = np.ones(8, np.float32)
    amax = np.ones(1, np.float32)
    with ops.implementation("ffi"):
        cut = jax.jit(step).lower(put(history, P()), put(amax, P())).compile().as_text()
        alone = jax.jit(step).lower(history, amax).compile().as_text()
    assert [
        f"jaxfp8_{op}" in cut for op in ("delayed_scales_v3", "write_histories_v5")
    ] == [True, False]
    assert [
        f"jaxfp8_{op}" in alone for op in ("delayed_scales_v3", "write_histories_v5")
    ] == [True, True]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_column_sums(spec):
    """Summed over the devices that have the rows; amaxes over all, codes not at all."""
    x = normal(4, 6, 10)
    for rows, cols in ((1, 1), (2, 1), (1, 2)):

        def run(x, rows=rows, cols=cols):
            return ops.quantize_transpose(
                x, np.float32(3), FORMAT.dtype, rows=rows, cols=cols, column_sums=True
            )

        data, _, top, sums = jax.jit(run)(put(x, spec))
        assert_all_bitwise(
            (data, top), oracle.quantize(x, np.float32(3), FORMAT), f"{rows} by {cols}"
        )
        batch = x.reshape(
            -1,
            np.prod(x.shape[3 - rows - cols : 3 - cols]),
            np.prod(x.shape[3 - cols :]),
        )
        for i, matrix in enumerate(batch):
            oracle.assert_column_sums(
                np.asarray(sums).reshape(len(batch), -1)[i],
                matrix,
                f"{rows} by {cols}, {i}",
            )


@pytest.mark.parametrize(
    "spec",
    [P(), P("data"), P(("data", "tp")), P("fsdp", "data"), P(None, "tp"), "windows"],
    ids=str,
)
def test_state_of_layers(spec):
    """Layers and experts are cut as they lie, without a collective; a window that comes
    cut is still one window.
    """
    rng = np.random.default_rng(0)
    leaves = ((4, 2), (4, 2), (4,))
    products = [
        [
            (
                np.abs(normal(*batch, length, seed=i)),
                rng.uniform(1, 2, (*batch, 1)).astype(np.float32),
            )
            for length in (8, 4)
        ]
        for i, batch in enumerate(leaves)
    ]
    recorded = [rng.uniform(1, 2, (*batch, 12)).astype(np.float32) for batch in leaves]
    is_cut = spec == "windows"

    def place(x):
        of_batch = P("data") if is_cut else P(*spec[: x.ndim - 1])
        return put(
            x,
            P(*of_batch, *(None,) * (x.ndim - 2), "tp")
            if is_cut and x.shape[-1] > 1
            else of_batch,
        )

    @jax.jit
    def step(products, recorded):
        return ops.read_histories(products), ops.write_histories(products, recorded)

    arguments = jax.tree.map(place, (products, recorded))
    with ops.implementation("ffi"):
        compiled = step.lower(*arguments).compile()
    readings, written = compiled(*arguments)
    for i, pairs in enumerate(products):
        for j in np.ndindex(leaves[i]):
            numbers = [oracle.reading(h[j], scale[j]) for h, scale in pairs]
            oracle.assert_bitwise(
                readings[i][j], np.concatenate(numbers), f"product {i}: {j}"
            )
            for q, (h, _) in enumerate(pairs):
                expected = oracle.write_history(h[j], recorded[i][j][6 * q :])
                got = (np.asarray(x[j]) for x in written[i][q])
                assert_all_bitwise(
                    got,
                    (expected[0], expected[1].reshape(1)),
                    f"product {i}: quantizer {q}: {j}",
                )
    text = compiled.as_text()
    # one for each batch
    assert text.count('custom_call_target="jaxfp8_read_histories_v3"') == 2
    assert text.count('custom_call_target="jaxfp8_write_histories_v5"') == 2
    assert is_cut or not hlo.collectives(text)


def test_rows_are_whole():
    """Rows that a mesh cuts are gathered for the calls that read and write them."""
    rng = np.random.default_rng(0)
    history, scale = (rng.uniform(1, 2, (8, n)).astype(np.float32) for n in (4, 1))
    recorded = rng.uniform(1, 2, (8, 6)).astype(np.float32)
    recorded[:, 2] = 0  # no history stays
    pairs = [tuple(put(x, P("data")) for x in (history, scale))]
    readings = jax.jit(lambda pairs: ops.read_rows(pairs, fp8_max=[448.0]))(pairs)
    [written] = jax.jit(ops.write_rows)(pairs, list(recorded))
    for i, row in enumerate(history):
        assert_all_bitwise([readings[i]], [oracle.reading(row, scale[i])], f"row {i}")
        expected = oracle.write_history(row, recorded[i])
        got = (np.asarray(x[i]) for x in written)
        assert_all_bitwise(got, (expected[0], expected[1].reshape(1)), f"row {i}")
