"""Values: one bad number, first steps of any size, zeros, narrow dtypes."""

import jax
import numpy as np
import oracle
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from reliability.test_values import SIZES, gain, shapes

from . import libraries
from .libraries import OPERANDS, OWG
from .steps import in_two_octaves, is_clean, normal, same_bits, step_of, tally_products
from .verdict import Tally, Verdict, row

BAD_VALUE = (
    "one Inf or NaN in x, kernel or grad at sizes 8, 4095, 4096, 1M: visible in the output, not in the history, scale "
    "right on the next good step"
)


def bad_value(library, spoilt) -> Verdict:
    tally, which = Tally(), OPERANDS.index(spoilt)
    for size in SIZES:
        good = [in_two_octaves(i, shape, 4) for i, shape in enumerate(shapes(spoilt, size))]
        step = step_of(library, good[1].shape[1])
        first = step(library.variables(good[1]), good[0], good[2])
        rows, cols = good[which].shape
        for bad, where in ((np.nan, (0, 0)), (np.inf, (rows // 2, cols // 2)), (-np.inf, (rows - 1, cols - 1))):
            operands = [value.copy() for value in good]
            operands[which][where] = bad
            x, kernel, grad = operands
            after = step({**first.variables, "params": {"kernel": kernel}}, x, grad)
            row, col = where
            seen = {  # the two products of the operand, and the row or column that it is in
                "input": [(after.y, 0, row), (after.dkernel, 0, col)],
                "kernel": [(after.y, 1, col), (after.dx, 1, row)],
                "output_grad": [(after.dx, 0, row), (after.dkernel, 1, col)],
            }[spoilt]
            what = f"{bad} among {size} values"
            for product, axis, index in seen:
                product = np.asarray(product)
                tally(not np.isfinite(np.take(product, index, axis)).any(), f"{what} gives finite products")
                tally(np.isfinite(np.delete(product, index, axis)).all(), f"{what} spoils other rows")
            tally(np.isfinite(library.history(after.variables, spoilt)).all(), f"{what} is in the history")
            recovered = step({**after.variables, "params": {"kernel": good[1]}}, good[0], good[2])
            tally_products(tally, recovered, good, f"the step after {what}")
    return tally.verdict()


@row(BAD_VALUE, "in x")
def bad_value_in_x(library):
    return bad_value(library, "input")


@row(BAD_VALUE, "in the kernel")
def bad_value_in_kernel(library):
    return bad_value(library, "kernel")


@row(BAD_VALUE, "in the gradient")
def bad_value_in_grad(library):
    return bad_value(library, "output_grad")


@row("NaN on one device: same outcome on all")
def nan_on_one_device(library):
    """Under jit with the batch over eight devices: a finite state, that of one device, on all."""
    layer, x, kernel = library.dense(5), normal(0, (16, 6)), normal(1, (6, 5))
    x[5, 3] = np.nan
    gradient = jax.grad(lambda v, x: (layer.apply(v, x) ** 2).sum())
    alone = jax.jit(gradient)(library.variables(kernel), x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(library.variables(kernel), NamedSharding(mesh, P()))
        together = jax.jit(gradient)(placed, jax.device_put(x, NamedSharding(mesh, P("data"))))
    tally = Tally()
    for leaf in jax.tree.leaves(together[OWG]):
        tally(all(same_bits(s.data, leaf.addressable_shards[0].data) for s in leaf.addressable_shards), "ranks differ")
    for leaf, other in zip(jax.tree.leaves(together[OWG]), jax.tree.leaves(alone[OWG]), strict=True):
        # A few roundings of gradients in f32; equal infinities and NaNs.
        tally(
            np.allclose(leaf, other, rtol=1e-5, atol=0, equal_nan=True),
            f"the state is not that of one device: {other[:2]}",
        )
    tally(is_clean(together), f"the history is {library.history(together, 'input')[:2]}")
    tally(np.isnan(together["params"]["kernel"]).any(), "the NaN is hidden")
    return tally.verdict()


FIRST_DATA = {"data of 1e4": (1e4, 1.0), "grads of 1e-7": (1.0, 1e-7), "both": (1e4, 1e-7)}


def first_steps(library, steps, **fields) -> Verdict:
    """The products of the last of some steps on the same data."""
    tally, worst = Tally(), 0.0
    for what, (data, grads) in FIRST_DATA.items():
        x, kernel, grad = operands = (
            in_two_octaves(0, (16, 24), data),
            in_two_octaves(1, (24, 8), 1),
            in_two_octaves(2, (16, 8), grads),
        )
        step, variables = step_of(library, 8, **fields), library.variables(kernel)
        for _ in range(steps):
            got = step(variables, x, grad)
            variables = got.variables
        worst = max(worst, tally_products(tally, got, operands, what))
    return tally.verdict(f"{tally.count} products within {worst:.2f} of what FP8 may cost")


@row('first step with data of 1e4 or grads of 1e-7: `"current"` is right')
def first_step_current(library):
    """Flax has no such option: its first step is what it is."""
    if library.is_ours:
        return first_steps(libraries.calibrated_first_step(library), 1)
    return first_steps(library, 1)


@row('the same: `"unit"` recovers at step 2')
def first_step_unit(library):
    return first_steps(library, 2)


@row("amax below 5e-36: scale 2**126, no NaN")
def tiny_amax(library):
    tally = Tally()
    for size in (4e-36, 1e-37, 1e-40):
        for tiny in (*OPERANDS, "all"):
            operands = [normal(0, (6, 8)), normal(1, (8, 5)), normal(2, (6, 5))]
            for i, name in enumerate(OPERANDS):
                if tiny in (name, "all"):
                    operands[i] = (np.sign(operands[i]) * np.float32(size)).astype(np.float32)
            x, kernel, grad = operands
            step, variables = step_of(library, 5), library.variables(kernel)
            for i in range(3):
                got = step(variables, x, grad)
                variables, what = got.variables, f"step {i}, {tiny} of {size:g}"
                tally(all(np.isfinite(product).all() for product in got[:3]), f"{what}: a product is not finite")
                scales = [np.asarray(variables[OWG][library.module][f"{name}_scale"])[0] for name in OPERANDS]
                tally(all(np.isfinite(s) and s >= 2.0**-126 for s in scales), f"{what}: stored scales {scales}")
    return tally.verdict()


@row("subnormals")
def subnormals(library):
    """The window knows the amax of subnormal data to the bit, and products of it at scale 1 are exact zeros."""
    tally = Tally()
    for dtype in (np.dtype(np.float32), oracle.BF16, oracle.F16):
        smallest = np.array(1, f"u{dtype.itemsize}").view(dtype)
        x = np.full((6, 8), smallest) * np.array([1, 3, -7, 0, 1, 2, -1, 5], dtype)
        got = step_of(library, 5, dtype=dtype)(library.variables(normal(1, (8, 5))), x, normal(2, (6, 5)).astype(dtype))
        amax = library.history(got.variables, "input")[0]
        tally(amax == oracle.amax(x), f"{dtype}: amax {amax:.3g}, not {oracle.amax(x):.3g}")
        tally(not np.any(got.y) and not np.any(got.dkernel), f"{dtype}: products of it are not zero")
    return tally.verdict()


@row("zero tensors: exact zeros")
def zero_tensors(library):
    tally = Tally()
    for zero in OPERANDS:
        operands = [normal(0, (6, 8)), normal(1, (8, 5)), normal(2, (6, 5))]
        operands[OPERANDS.index(zero)][:] = 0
        x, kernel, grad = operands
        step, variables = step_of(library, 5), library.variables(kernel)
        for i in range(3):
            got = step(variables, x, grad)
            zeros = {"input": (got.y, got.dkernel), "kernel": (got.y, got.dx), "output_grad": (got.dx, got.dkernel)}
            tally(not any(np.any(product) for product in zeros[zero]), f"step {i}: products with {zero} of 0 are not")
            tally(all(np.isfinite(product).all() for product in got[:3]), f"step {i}, {zero} of 0: not finite")
            variables = got.variables
    return tally.verdict()


@row("zero blocks: exact zeros")
def zero_blocks(library):
    x, kernel, grad = normal(0, (64, 96), 1e4), normal(1, (96, 32)), normal(2, (64, 32))
    x[16:48], kernel[:, 8:16], grad[:, 24:] = 0, 0, 0
    step = step_of(library, 32)
    got = step(step(library.variables(kernel), x, grad).variables, x, grad)
    y, dkernel, tally = np.asarray(got.y), np.asarray(got.dkernel), Tally()
    tally(not y[16:48].any() and not y[:, 8:16].any() and not dkernel[:, 24:].any(), "zeros are not exact")
    tally(y[:16, :8].all() and y[48:, 16:].all() and dkernel[:, :24].all(), "others are zero")
    return tally.verdict()


@row("float16, K = 4096, grads from 1e-1 to 1e-5: finite, a few percent")
def float16(library):
    """Off by 10 % in norm at most: `test_float16_with_a_long_contraction` derives 5.1 % and 8.1 %."""
    k, dtype, tally, worst = 4096, oracle.F16, Tally(), 0.0
    step = step_of(library, 16, dtype=dtype)
    x, kernel = normal(0, (8, k), dtype=dtype), normal(1, (k, 16), k**-0.5)
    variables = library.variables(kernel)
    wide_x, wide_kernel = (np.asarray(value.astype(dtype), np.float64) for value in (x, kernel))
    for i, size in enumerate((1e-1, 1e-2, 1e-3, 1e-4, 1e-5)):
        grad = normal(2 + i, (8, 16), size, dtype)
        for _ in range(4):  # a window of 4, so that the larger gradients before have left it
            got = step(variables, x, grad)
            variables = got.variables
        wide = grad.astype(np.float64)
        exact = {"y": wide_x @ wide_kernel, "dx": wide @ wide_kernel.T, "dkernel": wide_x.T @ wide}
        for name, value in exact.items():
            error = np.asarray(getattr(got, name), np.float64) - value
            # To the nearest float16 subnormal: 2**-25 / sqrt(3) in the mean square.
            off = (np.linalg.norm(error) - 2.0**-25 / 3**0.5 * value.size**0.5) / np.linalg.norm(value)
            worst = max(worst, off)
            tally(off <= 0.1, f"grads of {size:g}: {name} is off by {off:.2g} of it")
    return tally.verdict(f"at most {worst:.1%} off")


@row("bf16 gain error below 0.35 %")
def bfloat16_gain(library):
    """In least squares against the codes dequantized in f64, at 32 scales; the largest of the errors."""
    n, formats, worst = 64, (oracle.E4M3, oracle.E4M3, oracle.E5M2), 0.0
    step = step_of(library, n, dtype=oracle.BF16)
    for i in range(32):
        operands = [
            normal(3 * i + j, (n, n), size * (1 + i / 32), oracle.BF16) for j, size in enumerate((1, 0.1, 1e-3))
        ]
        amaxes = [oracle.amax(value) for value in operands]
        state = oracle.LayerState(*(oracle.State(np.float32([a, 0, 0, 0]), np.float32(1)) for a in amaxes))
        x, kernel, grad = operands
        got = step(library.variables(kernel.astype(np.float32), state), x, grad)
        x, kernel, grad = (
            oracle.quantize(value, fmt.max / np.float64(amax), fmt)[0].astype(np.float64) * np.float64(amax) / fmt.max
            for value, amax, fmt in zip(operands, amaxes, formats, strict=True)
        )
        for name, exact in {"y": x @ kernel, "dx": grad @ kernel.T, "dkernel": x.T @ grad}.items():
            worst = max(worst, abs(gain(getattr(got, name), exact) - 1), key=abs)
    tally = Tally()
    tally(worst < 0.0035, f"a gain error of {worst:.2%}")
    return tally.verdict(f"{worst:.3%}")


def codes(library, values, scales) -> Verdict:
    """Codes against the oracle at powers of two, where `x * scale` and `x / scale_inv` are the same rule.

    Infinite x is left out: that it stays visible is a row of its own.
    """
    tally = Tally()
    for x in values:
        x = x[~np.isinf(oracle.widen(x))]
        for fmt in oracle.FORMATS.values():
            for scale in scales:
                got, wanted = np.asarray(library.quantize(x, scale, fmt)), oracle.quantize(x, scale, fmt)[0]
                # A NaN is a NaN, whatever its sign and payload.
                nan = np.isnan(oracle.widen(wanted))
                wrong = np.where(nan, ~np.isnan(oracle.widen(got)), oracle.bits(got) != oracle.bits(wanted)).sum()
                tally(wrong == 0, f"{wrong} of {x.size} codes of {x.dtype} to {fmt.name} at scale {scale:g}")
    return tally.verdict()


@row("all 65,536 bf16 and f16 codes, both formats")
def every_half_code(library):
    return codes(library, map(oracle.all_half_codes, (oracle.BF16, oracle.F16)), np.float32([2.0**-6, 1, 2.0**7]))


@row("every f32 rounding midpoint, one ulp around it, both formats")
def rounding_midpoints(library):
    probes = np.unique(np.concatenate([oracle.rounding_probes(fmt) for fmt in oracle.FORMATS.values()]))
    return codes(library, [probes], np.float32([1]))
