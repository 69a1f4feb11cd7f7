"""Values: one bad number, first steps of any size, zeros, narrow dtypes, through `nn.Dense`."""

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from .cases import (
    OPERANDS,
    OWG,
    assert_quantizer,
    assert_same_bits,
    assert_state,
    dense,
    in_two_octaves,
    normal,
    products_are_right,
    state_of,
    step_of,
    used_state,
    variables_of,
)

# ------------------------------------------------------------------------------------------------------- one bad value

# XLA's own float max loses a NaN from 4096 elements on; 4095 is no multiple of any vector width; 1M runs in threads.
SIZES = {8: (2, 4), 4095: (63, 65), 4096: (64, 64), 2**20: (1024, 1024)}
SMALL = 4


def shapes(spoilt, size):
    """Of x, kernel and grad, such that the spoilt one has `size` elements."""
    m, n = SIZES[size]
    mkn = {"input": (m, n, SMALL), "kernel": (SMALL, m, n), "output_grad": (m, SMALL, n)}[spoilt]
    return (mkn[0], mkn[1]), (mkn[1], mkn[2]), (mkn[0], mkn[2])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spoilt", OPERANDS)
def test_one_bad_value(spoilt, size):
    """Visible in the products that see it and nowhere else, 0 in the history; then as if it had not been.

    Peers record the Inf and freeze the scale for a whole window, or saturate it to 448 and show nothing.
    """
    good = [normal(i, shape) for i, shape in enumerate(shapes(spoilt, size))]
    layer = dense(good[1].shape[1])
    step, which = step_of(layer), OPERANDS.index(spoilt)
    fmt = oracle.E5M2 if spoilt == "output_grad" else oracle.E4M3
    x, kernel, grad = good
    first = step(variables_of(kernel), x, grad)
    _, _, before = oracle.step(good[which], oracle.State.init(4), fmt)
    assert_quantizer(first.variables, spoilt, before, "first step")

    rows, cols = good[which].shape
    for bad, where in ((np.nan, (0, 0)), (np.inf, (rows // 2, cols // 2)), (-np.inf, (rows - 1, cols - 1))):
        operands = [value.copy() for value in good]
        operands[which][where] = bad
        x, kernel, grad = operands
        variables = {**first.variables, "params": {"kernel": kernel}}
        after = step(variables, x, grad)
        row, col = where
        seen = {  # the two products of the operand: the row or column of the bad value is NaN, and nothing else
            "input": [(after.y, 0, row), (after.dkernel, 0, col)],
            "kernel": [(after.y, 1, col), (after.dx, 1, row)],
            "output_grad": [(after.dx, 0, row), (after.dkernel, 1, col)],
        }[spoilt]
        for product, axis, index in seen:
            nan = np.isnan(np.asarray(product))
            assert nan.take(index, axis).all(), f"{bad} at {where} must show"
            assert nan.sum() == nan.take(index, axis).size and np.isfinite(np.delete(product, index, axis)).all()
        untouched = {"input": after.dx, "kernel": after.dkernel, "output_grad": after.y}[spoilt]
        assert np.isfinite(untouched).all()

        _, _, wanted = oracle.step(operands[which], before, fmt)
        assert wanted.amax_history[0] == 0
        assert_quantizer(after.variables, spoilt, wanted, f"{bad} at {where}")

        # The next good step: the scale is that of the good step before, the history takes the new amax.
        x, kernel, grad = good
        recovered = step({**after.variables, "params": {"kernel": kernel}}, x, grad)
        _, _, expected = oracle.step(good[which], wanted, fmt)
        assert expected.scale == np.float32(1) / np.float32(np.float32(fmt.max) / before.amax_history[0])
        assert_quantizer(recovered.variables, spoilt, expected, f"after {bad} at {where}")
        assert all(np.isfinite(product).all() for product in recovered[:3])


DEVICES = 8


def rows_with_nan():
    x = normal(0, (2 * DEVICES, 6))
    x[5, 3] = np.nan
    return x


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_nan_on_one_device(kind):
    """A batch over eight devices, a NaN on one of them: one outcome, that of a single device, on all."""
    layer, kernel = dense(5), normal(1, (6, 5))
    x, variables = rows_with_nan(), variables_of(kernel, used_state())
    gradient = jax.grad(lambda variables, x: (layer.apply(variables, x) ** 2).sum())
    alone = jax.jit(gradient)(variables, x)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType[kind],))
    with jax.set_mesh(mesh):
        placed = jax.device_put(variables, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))
        together = jax.jit(gradient)(*placed)
    assert_same_bits(together[OWG], alone[OWG], "state")
    for leaf in jax.tree.leaves(together[OWG]):
        assert len(leaf.addressable_shards) == DEVICES
        for shard in leaf.addressable_shards:
            oracle.assert_bitwise(shard.data, np.asarray(leaf), "on every device")
    assert state_of(together, "input").amax_history[0] == 0
    assert state_of(together, "kernel").amax_history[0] == np.abs(kernel).max()
    assert np.isnan(together["params"]["kernel"]).any(), "the NaN must show"


@pytest.mark.parametrize("check_vma", [True, False])
def test_nan_on_one_device_in_shard_map(check_vma):
    """The device that saw the NaN must not be the only one that records 0."""
    layer = dense(5, pipeline_axes=())  # said, so that check_vma=False has nothing to warn of
    x, variables = rows_with_nan(), variables_of(normal(1, (6, 5)), used_state())
    gradient = jax.grad(lambda variables, x: (layer.apply(variables, x) ** 2).sum())
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    state = jax.jit(
        jax.shard_map(
            lambda variables, x: jax.tree.map(lambda leaf: leaf[None], gradient(variables, x)[OWG]),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )(variables, x)
    alone = jax.jit(gradient)(variables, x)[OWG]
    for i in range(DEVICES):
        assert_same_bits(jax.tree.map(lambda leaf, i=i: leaf[i], state), alone, f"device {i}")


# ----------------------------------------------------------------------------------------------------------- first step

FIRST_DATA = {"data of 1e4": (1e4, 1.0), "grads of 1e-7": (1.0, 1e-7), "both": (1e4, 1e-7)}


@pytest.mark.parametrize("data, grads", FIRST_DATA.values(), ids=FIRST_DATA)
def test_first_step_current(data, grads):
    """`first_step="current"` measures the tensor in hand: right at once, and still right when the window takes over."""
    operands = in_two_octaves(0, (16, 24), data), in_two_octaves(1, (24, 8), 1), in_two_octaves(2, (16, 8), grads)
    x, kernel, grad = operands
    step = step_of(dense(8, first_step="current"))
    first = step(variables_of(kernel), x, grad)
    assert products_are_right(first, *operands) == [True] * 3
    second = step(first.variables, x, grad)
    assert products_are_right(second, *operands) == [True] * 3
    # The same amax twice gives the same scale, so the two ways agree to the bit.
    assert_same_bits(second[:3], first[:3], "the window's scale")


@pytest.mark.parametrize("data, grads", FIRST_DATA.values(), ids=FIRST_DATA)
def test_first_step_unit(data, grads):
    """Scale 1 clips data of 1e4 to 448 and flushes gradients of 1e-7 to 0; the step after is right, and never NaN."""
    operands = in_two_octaves(0, (16, 24), data), in_two_octaves(1, (24, 8), 1), in_two_octaves(2, (16, 8), grads)
    x, kernel, grad = operands
    step = step_of(dense(8))
    first = step(variables_of(kernel), x, grad)
    assert products_are_right(first, *operands) == [data < 448, grads > 1e-5, data < 448 and grads > 1e-5]
    assert all(np.isfinite(product).all() for product in first[:3])
    if grads == 1e-7:  # below half of e5m2's smallest number, 2**-16
        assert not np.any(first.dx) and not np.any(first.dkernel)
    second = step(first.variables, x, grad)
    assert products_are_right(second, *operands) == [True] * 3


# ---------------------------------------------------------------------------------------------------------------- zeros


@pytest.mark.parametrize("first_step", ["unit", "current"])
@pytest.mark.parametrize("zero", OPERANDS)
def test_zero_tensors(zero, first_step):
    """Exact zeros, whatever was before: 0 / 0 has no place here. The window records 0 and keeps its scale."""
    operands = [normal(0, (6, 8)), normal(1, (8, 5)), normal(2, (6, 5))]
    which = OPERANDS.index(zero)
    operands[which][:] = 0
    x, kernel, grad = operands
    step = step_of(dense(5, first_step=first_step))
    for state in (oracle.LayerState.init(4), used_state()):
        variables = variables_of(kernel, state)
        for i in range(3):
            got = step(variables, x, grad)
            zeros = {"input": (got.y, got.dkernel), "kernel": (got.y, got.dx), "output_grad": (got.dx, got.dkernel)}
            assert not any(np.any(product) for product in zeros[zero]), f"step {i}"
            assert all(np.isfinite(product).all() for product in got[:3])
            fmt = oracle.E5M2 if zero == "output_grad" else oracle.E4M3
            _, _, wanted = oracle.step(operands[which], state_of(variables, zero), fmt)
            assert_quantizer(got.variables, zero, wanted, f"step {i}")
            variables = got.variables


def test_zero_blocks():
    """Rows and columns of zeros stay zeros to the bit beside others of 1e4, and other rows do not notice."""
    x, kernel, grad = normal(0, (64, 96), 1e4), normal(1, (96, 32)), normal(2, (64, 32), 1e-7)
    x[16:48], kernel[:, 8:16], grad[:, 24:] = 0, 0, 0
    got = step_of(dense(32, first_step="current"))(variables_of(kernel), x, grad)
    y, dkernel = np.asarray(got.y), np.asarray(got.dkernel)
    assert not y[16:48].any() and not y[:, 8:16].any() and not dkernel[:, 24:].any()
    assert y[:16, :8].all() and y[48:, 16:].all() and dkernel[:, :24].all()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), oracle.BF16, oracle.F16], ids=["f32", "bf16", "f16"])
def test_subnormals(dtype):
    """At scale 1 subnormal operands give exact zeros, and the window knows their size to the bit.

    XLA's CPU threads read subnormals as zeros: an amax taken with float comparisons records 0.
    """
    smallest = np.array(1, f"u{dtype.itemsize}").view(dtype)
    tiny = np.full((6, 8), smallest) * np.array([1, 3, -7, 0, 1, 2, -1, 5], dtype)
    step = step_of(dense(5, dtype=dtype))
    kernel, grad = normal(1, (8, 5)), normal(2, (6, 5), dtype=dtype)
    got = step(variables_of(kernel), tiny, grad)
    assert not np.any(got.y) and not np.any(got.dkernel)
    wanted = oracle.amax(tiny)
    assert wanted == 7 * oracle.widen(smallest)
    oracle.assert_bitwise(state_of(got.variables, "input").amax_history[0], wanted, "amax")
    assert np.isfinite(np.asarray(step(got.variables, tiny, grad).y, np.float32)).all()


# 448 / 2**126 is 5.3e-36, 57344 / 2**126 is 6.7e-34: below, the quotient FP8_MAX / amax does not fit a normal inverse.
TINY_AMAXES = {"below 5e-36": 4e-36, "1e-37": 1e-37, "subnormal": 1e-40}


@pytest.mark.parametrize("size", TINY_AMAXES.values(), ids=TINY_AMAXES)
@pytest.mark.parametrize("tiny", [*OPERANDS, "all"])
def test_amax_below_5e_36(tiny, size):
    """The scale stays at 2**126, its inverse is a normal number, and nothing becomes NaN: not 0 * inf, not 1 / 0."""
    operands = [normal(0, (6, 8)), normal(1, (8, 5)), normal(2, (6, 5))]
    for i, name in enumerate(OPERANDS):
        if tiny in (name, "all"):
            operands[i] = (np.sign(operands[i]) * np.float32(size)).astype(np.float32)
    x, kernel, grad = operands
    step, variables, state = step_of(dense(5)), variables_of(kernel), oracle.LayerState.init(4)
    for i in range(3):
        got = step(variables, x, grad)
        expected = oracle.dense_step(x, kernel, grad, state)
        assert_state(got.variables, expected.state, f"step {i}")
        for name in OPERANDS:
            if tiny in (name, "all"):
                assert getattr(expected.state, name).scale == (1 if i == 0 else np.float32(2.0**-126))
        for product, wanted in ((got.y, expected.y), (got.dx, expected.dgrad), (got.dkernel, expected.wgrad)):
            wanted.check(product, f"step {i}")
            assert np.isfinite(product).all()
        variables, state = got.variables, expected.state


# -------------------------------------------------------------------------------------------------------- 16-bit floats

# Rounding errors are spread over half a unit in the last place: relative to a value at the start of its octave, where
# they weigh most, their root mean square is 2**-4 / sqrt(3) for e4m3 and 2**-3 / sqrt(3) for e5m2.
RMS_E4M3, RMS_E5M2 = 2.0**-4 / 3**0.5, 2.0**-3 / 3**0.5


def test_float16_with_a_long_contraction():
    """K = 4096, grads from 1e-1 to 1e-5: finite, and off by 5.1 % (y) and 8.1 % (gradients) at most.

    Errors of the terms are independent, so the norm of the error relative to that of a product of independent values is
    the root of the sum of squares of both operands' relative errors: sqrt(2) RMS_E4M3 for y, and with a gradient
    sqrt(RMS_E4M3**2 + RMS_E5M2**2). Those are means; the bounds count every value at the start of its octave, where
    for values spread over octaves the mean square is 0.54 of it, a margin of 26 % that 128 elements do not use up.
    float16 itself adds 2**-11, but half of 2**-24 where a result is subnormal: its root mean square is counted too.
    A kernel that casts before it scales overflows at 65504.
    """
    k, dtype = 4096, oracle.F16
    step = step_of(dense(16, dtype=dtype))
    x, kernel = normal(0, (8, k), dtype=dtype), normal(1, (k, 16), k**-0.5)
    variables = variables_of(kernel)
    wide_x, wide_kernel = (np.asarray(value.astype(dtype), np.float64) for value in (x, kernel))
    for i, size in enumerate((1e-1, 1e-2, 1e-3, 1e-4, 1e-5)):
        grad = normal(2 + i, (8, 16), size, dtype)
        wide_grad = grad.astype(np.float64)
        for _ in range(4):  # a window of 4, so that the larger gradients before have left it
            got = step(variables, x, grad)
            assert all(np.isfinite(np.asarray(product, np.float32)).all() for product in got[:3])
            variables = got.variables
        assert_close(got.y, wide_x @ wide_kernel, (2 * RMS_E4M3**2) ** 0.5, f"y, grads of {size}")
        of_gradients = (RMS_E4M3**2 + RMS_E5M2**2) ** 0.5
        assert_close(got.dx, wide_grad @ wide_kernel.T, of_gradients, f"dx, grads of {size}")
        assert_close(got.dkernel, wide_x.T @ wide_grad, of_gradients, f"dkernel, grads of {size}")


def assert_close(got, exact, relative, what) -> None:
    error = np.linalg.norm(np.asarray(got, np.float64) - exact)
    rounding = 2.0**-25 / 3**0.5 * exact.size**0.5  # to the nearest float16 subnormal
    limit = (relative + 2.0**-11) * np.linalg.norm(exact) + rounding
    assert error <= limit, f"{what}: {error / np.linalg.norm(exact):.2%} off"


def gain(product, exact) -> float:
    """The factor by which the product is too large, in least squares."""
    return float(np.vdot(np.asarray(product, np.float64), exact) / np.vdot(exact, exact))


def test_bfloat16_gain():
    """No product is larger or smaller as a whole by 0.35 %, at any of 32 scales.

    The reference dequantizes the codes by amax / FP8_MAX in f64. What is left is the rounding of results to bf16, at
    most 2**-8 of each and as often up as down: 2**-8 / 64 = 0.006 % of the whole of 64 x 64. Scales that are rounded to
    bf16 cost up to 2**-8 each, 0.78 % in a product (Flax).
    """
    n, formats = 64, (oracle.E4M3, oracle.E4M3, oracle.E5M2)
    step = step_of(dense(n, dtype=oracle.BF16))
    for i in range(32):
        operands = [
            normal(3 * i + j, (n, n), size * (1 + i / 32), oracle.BF16) for j, size in enumerate((1, 0.1, 1e-3))
        ]
        amaxes = [oracle.amax(value) for value in operands]
        state = oracle.LayerState(*(oracle.State(np.float32([a, 0, 0, 0]), np.float32(1)) for a in amaxes))
        x, kernel, grad = operands
        got = step(variables_of(kernel.astype(np.float32), state), x, grad)
        x, kernel, grad = (
            oracle.quantize(value, fmt.max / np.float64(amax), fmt)[0].astype(np.float64) * np.float64(amax) / fmt.max
            for value, amax, fmt in zip(operands, amaxes, formats, strict=True)
        )
        exact = {"y": x @ kernel, "dx": grad @ kernel.T, "dkernel": x.T @ grad}
        for name, product in exact.items():
            error = gain(getattr(got, name), product) - 1
            assert abs(error) < 0.0035, f"scale {i}: {name} is off by {error:.2%}"
