"""The ops by themselves on a mesh: any dimension may be cut, results are those of one
device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from equality import assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec as P
from parametrize import each_row

from jaxfp8 import ops
from mesh import cases, hlo

E4M3 = oracle.E4M3.dtype
SCALE = np.float32(3)
SPECS = [
    P("data"),
    P(None, "fsdp"),
    P(None, None, "tp"),
    P("data", "fsdp", "tp"),
    P(("data", "tp"), "fsdp"),
]


def integers(*shape, seed=0):
    """Small ones, which FP8 and sums in any order keep."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def norm(x, gamma):
    """A row that is normalised is not cut."""
    options = {"kind": "layer", "epsilon": 1e-6, "rows": 2, "amax": SCALE}
    return ops.quantize_norm(x, gamma, None, SCALE, E4M3, **options)


def product(a, b, **added):
    """A bias is added once, whatever is cut."""
    options = {"out_dtype": jnp.float32, "precise": True}
    scale = np.float32(0.5)
    return ops.scaled_matmul(a, b, scale, scale, **options, **added)


X = integers(8, 6, 16)
GATED = normal(8, 2, 16)  # the two halves of a gated activation are not cut
CODES = [integers(n, 16, seed=n).astype(E4M3) for n in (8, 4)]
TRANSPOSE = functools.partial(ops.quantize_transpose, scale=SCALE, dtype=E4M3)
ACTIVATION = {"scale": SCALE, "dtype": E4M3}
CASES = {
    "amax": (ops.amax, X),
    "quantize": (lambda x: ops.quantize(x, SCALE, E4M3), X),
    "dequantize": (lambda x: ops.dequantize(x, SCALE, np.float32), X.astype(E4M3)),
    "quantize_transpose": (TRANSPOSE, X),
    "sums of columns": (functools.partial(TRANSPOSE, column_sums=True), X),
    "sums of two rows": (functools.partial(TRANSPOSE, rows=2, column_sums=True), X),
    "sums of two columns": (functools.partial(TRANSPOSE, cols=2, column_sums=True), X),
    "gelu": (
        lambda x: ops.quantize_activation(x, activation="gelu", **ACTIVATION),
        normal(8, 16),
    ),
    "silu_gated": (
        lambda x: ops.quantize_activation(x, activation="silu_gated", **ACTIVATION),
        GATED,
    ),
    "gradient of silu_gated": (
        lambda x, grad: ops.quantize_activation_grad(
            x, grad, activation="silu_gated", **ACTIVATION
        ),
        GATED,
        normal(8, 16, seed=1),
    ),
    "product": (product, *CODES),
    "product, bias": (
        lambda a, b, x: product(a, b, bias=x),
        *CODES,
        integers(4, seed=1),
    ),
    "norm": (norm, normal(8, 6, 16), normal(16, seed=1)),
}


def put(tree, spec):
    """Each array cut along those axes of `spec` that it has."""

    def placed(x):
        sharding = NamedSharding(cases.mesh(), P(*spec[: x.ndim]))
        return jax.device_put(x, sharding)

    return jax.tree.map(placed, tree)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@each_row("case", CASES)
def test_results_are_those_of_one_device(case, spec):
    function, *operands = case
    run = jax.jit(function)
    assert_same_bits(run(*put(operands, spec)), run(*operands))


def test_histories_are_written_by_xla_on_a_mesh():
    """As the reductions of the amaxes are, with which XLA can move them; delayed_scales
    is a custom call.
    """

    def step(history, amax):
        scales = ops.delayed_scales([history], [amax], fp8_max=[448.0])
        return ops.write_quantizers([(history, amax)], [(amax, scales[0][1])])

    operands = np.ones(8, np.float32), np.ones(1, np.float32)
    found = []
    with ops.implementation("ffi"):
        for placed in (put(operands, P()), operands):
            text = jax.jit(step).lower(*placed).compile().as_text()
            found += [f"jaxfp8_{op}" in text for op in ("delayed", "write_histories")]
    assert found == [True, False, True, True]


LEAVES = ((4, 2), (4, 2), (4,))  # layers and experts


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(("data", "tp")), P("fsdp", "data")], ids=str
)
def test_state_of_layers(spec):
    """Layers and experts are cut as they lie, without a collective."""
    rng = np.random.default_rng(0)
    uniform = lambda *shape: rng.uniform(1, 2, shape).astype(np.float32)  # noqa: E731
    products = [
        [(uniform(*batch, length), uniform(*batch, 1)) for length in (8, 4)]
        for batch in LEAVES
    ]
    operands = products, [uniform(*batch, 12) for batch in LEAVES]

    @jax.jit
    def step(products, recorded):
        fp8_max = [[448.0] * len(pairs) for pairs in products]
        readings = ops.read_histories(products, fp8_max=fp8_max)
        return readings, ops.write_histories(products, recorded)

    of_layers = lambda x: put(x, spec[: x.ndim - 1])  # noqa: E731
    with ops.implementation("ffi"):
        compiled = step.lower(*jax.tree.map(of_layers, operands)).compile()
        expected = step(*operands)
    assert_same_bits(compiled(*jax.tree.map(of_layers, operands)), expected)
    text = compiled.as_text()
    # one for each batch
    assert text.count('custom_call_target="jaxfp8_read_histories_v3"') == 2
    assert text.count('custom_call_target="jaxfp8_write_histories_v5"') == 2
    assert not hlo.collectives(text)


def test_what_a_mesh_cuts_is_whole_again():
    """A window, and rows of histories: they are gathered for the calls that read and
    write them.
    """
    rng = np.random.default_rng(0)
    history, scale = (rng.uniform(1, 2, (8, n)).astype(np.float32) for n in (4, 1))
    recorded = rng.uniform(1, 2, (8, 6)).astype(np.float32)
    recorded[:, 2] = 0  # no history stays

    @jax.jit
    def step(pairs, windows, recorded):
        readings = ops.read_histories([windows], fp8_max=[[448.0]])
        readings = ops.read_rows(pairs, fp8_max=[448.0]), readings
        return readings, ops.write_rows(pairs, list(recorded))

    windows = put([(history, scale)], P())
    cut = [(put(history, P(None, "tp")), windows[0][1])]
    expected = step([(history, scale)], [(history, scale)], recorded)
    got = step(put([(history, scale)], P("data")), cut, recorded)
    assert_same_bits(got, expected)
