"""Products on a GPU, cuBLASLt's and our own, within the bound of the device's tensor
cores.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ops import cases
from ops.cases import random_codes
from oracle import E4M3, E5M2, F32, blocks as oracle_blocks

from jaxfp8 import ops

from .gpu import GRAPHS, custom_calls as custom_calls
from .test_block_handlers import RAGGED, ragged_operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "a_scale, b_scale", [(1.7e-35, 1.1e-5), (1.1e-5, 1.7e-35), (1.3e25, 1.7e20)]
)
def test_scales_without_a_normal_product(a_scale, b_scale):
    """cuBLASLt does not say in which order it multiplies: no wrong number is right."""
    a = np.full((16, 32), 16, E4M3.dtype)
    b = np.full((16, 32), 16, E4M3.dtype)
    a[0] = 0
    got = np.asarray(
        ops.scaled_matmul(a, b, F32(a_scale), F32(b_scale), out_dtype=jnp.float32)
    )
    right = F32(float(F32(a_scale)) * float(F32(b_scale)) * 2.0**13)
    np.testing.assert_array_equal(got[1:], np.full((15, 16), got[1, 0]))
    assert (
        got[1, 0] == 0
        or not np.isfinite(got[1, 0])
        or abs(got[1, 0] / right - 1) < 2.0**-9
    )


@pytest.mark.parametrize("ragged", ["rows", "contraction"])
@pytest.mark.parametrize(
    "sizes, m, k, n",
    [([10, 0, 130, 1, 64], 304, 80, 40), ([700, 0, 1500, 3], 2500, 512, 384)],
)
def test_large_ragged_products(monkeypatch, sizes, m, k, n, ragged):
    """More slices and tiles than tests/ops has; by the copy engine the same bits."""
    shapes = ((m, k), (len(sizes), n, k)) if ragged == "rows" else ((k, m), (n, m))
    a = random_codes(shapes[0], E4M3, 1)
    b = random_codes(shapes[1], E5M2, 2)
    scales = F32(2.0**-9), F32(0.3 * 2.0**-9)
    product = functools.partial(
        ops.ragged_matmul, a, b, *scales, np.int32(sizes), ragged=ragged
    )
    for precise in (False, True):
        monkeypatch.setenv("JAXFP8_RAGGED_TMA", "0")
        got = product(out_dtype=jnp.float32, precise=precise)
        oracle.ragged_matmul(
            a, b, *scales, sizes, **cases.accumulation("cuda", precise)
        ).check(got, f"{sizes}")
        monkeypatch.setenv("JAXFP8_RAGGED_TMA", "1")
        by_tma = product(out_dtype=jnp.float32, precise=precise)
        oracle.assert_bitwise(by_tma, np.asarray(got), f"{sizes}")


@pytest.mark.parametrize("ragged", ["rows", "contraction"])
def test_ragged_neighbours(ragged):
    """NaN of other groups, and of rows of none, enters nothing; sizes that change
    replay one program, and one graph.
    """
    m, k, n = 304, 96, 64
    a = random_codes((m, k) if ragged == "rows" else (k, m), E4M3, 1)
    b = random_codes((3, n, k) if ragged == "rows" else (n, m), E5M2, 2)
    rows = a if ragged == "rows" else a.T
    rows[139] = rows[260:] = np.nan
    one = F32(2.0**-9)

    def product(a, b, sizes):
        return ops.ragged_matmul(
            a, b, one, one, sizes, ragged=ragged, out_dtype=jnp.float32, precise=True
        )

    for options in ({"xla_gpu_enable_command_buffer": ""}, GRAPHS):
        run = jax.jit(product, compiler_options=options)
        for sizes in ([100, 39, 60], [0, 139, 121], [139, 1, 120], [0, 0, 0]):
            expected = oracle.ragged_matmul(
                a, b, one, one, sizes, **cases.accumulation("cuda", precise=True)
            )
            expected.check(run(a, b, np.int32(sizes)), f"{sizes}")


@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_blocks(kind):
    """Random codes within the bound; signs, whose sums the tensor cores add exactly, to
    the bit.
    """
    capability = jax.devices("gpu")[0].compute_capability
    if capability != "9.0":
        pytest.skip(f"only 9.0 has scales of blocks, this GPU has {capability}")
    (a, b, *rest), options = ragged_operands(kind)
    signs = [np.sign(x.astype(F32)).astype(x.dtype) for x in (a, b)]

    @jax.jit
    def product(a, b):
        return ops.ragged_matmul(
            a, b, *rest, **options, ragged=kind, out_dtype=jnp.float32
        )

    expected = oracle_blocks.ragged_matmul_on_hopper(a, b, *rest, **options)
    expected.check(product(a, b), kind)
    exact = oracle_blocks.hopper_ragged_matmul(*signs, *rest)
    oracle.assert_bitwise(np.asarray(product(*signs)), exact, kind)
