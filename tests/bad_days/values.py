"""Values: one bad number, first steps of any size, zeros, narrow dtypes."""

import functools
import itertools

import jax
import numpy as np
import oracle
from cpu_mesh import mesh_of
from jax.sharding import NamedSharding, PartitionSpec as P

from . import libraries
from .libraries import OPERANDS, OWG
from .steps import (
    FORMATS,
    is_clean,
    normal,
    operands,
    same_bits,
    step_of,
    tally_products,
    tally_state,
    used_state,
)
from .verdict import Tally, Verdict, row

BAD_VALUE = "one Inf or NaN: in the output, not in the history"
BAD_NUMBERS = (np.nan, np.inf, -np.inf)
# XLA's own float max loses a NaN from 4096 elements on; 4095 is no multiple of any
# vector width; 1M runs in threads.
SIZES = {8: (2, 4), 4095: (63, 65), 4096: (64, 64), 2**20: (1024, 1024)}
SMALL = 4


def bad_value(library, spoilt) -> Verdict:
    """The row or column of the bad value is not finite in the two products that see it,
    and all else is.

    Peers record the Inf and freeze the scale for a whole window, or saturate it to 448
    and show nothing.
    """
    tally = Tally()
    which = OPERANDS.index(spoilt)
    for size, (rows, cols) in SIZES.items():
        mkn = {
            "input": (rows, cols, SMALL),
            "kernel": (SMALL, rows, cols),
            "output_grad": (rows, SMALL, cols),
        }[spoilt]
        good = operands(*mkn, 4, 4, 4)
        step = step_of(library, mkn[2])
        first = step(library.variables(good[1]), good[0], good[2])
        before = tally_state(
            tally,
            library,
            first.variables,
            oracle.LayerState.init(4),
            good,
            what="the first step",
        )
        for bad, where in zip(
            BAD_NUMBERS,
            ((0, 0), (rows // 2, cols // 2), (rows - 1, cols - 1)),
            strict=True,
        ):
            x, kernel, grad = spoiled = [value.copy() for value in good]
            spoiled[which][where] = bad
            after = step({**first.variables, "params": {"kernel": kernel}}, x, grad)
            one, other, third = after.of(spoilt)
            axes = {"input": (0, 0), "kernel": (1, 1), "output_grad": (0, 1)}[spoilt]
            places = where[::-1] if spoilt == "kernel" else where
            what = f"{bad} among {size} values"
            for product, axis, index in zip((one, other), axes, places, strict=True):
                product = np.asarray(product)
                tally(
                    not np.isfinite(np.take(product, index, axis)).any(),
                    f"{what} gives finite products",
                )
                tally(
                    np.isfinite(np.delete(product, index, axis)).all(),
                    f"{what} spoils other rows",
                )
            tally(np.isfinite(third).all(), f"{what} spoils the product without it")
            history = library.history(after.variables, spoilt)
            tally(np.isfinite(history).all(), f"{what} is in the history")
            state = tally_state(
                tally, library, after.variables, before, spoiled, what=what
            )
            recovered = step(
                {**after.variables, "params": {"kernel": good[1]}}, good[0], good[2]
            )
            tally_products(tally, recovered, good, f"the step after {what}")
            tally_state(
                tally,
                library,
                recovered.variables,
                state,
                good,
                what=f"the step after {what}",
            )
    return tally.verdict()


@row(BAD_VALUE, "in x", any_layer=True)
def bad_value_in_x(library):
    return bad_value(library, "input")


@row(BAD_VALUE, "in the kernel")
def bad_value_in_kernel(library):
    return bad_value(library, "kernel")


@row(BAD_VALUE, "in the gradient")
def bad_value_in_grad(library):
    return bad_value(library, "output_grad")


@row("NaN on one device: same outcome on all", any_layer=True)
def nan_on_one_device(library):
    """With the batch over eight devices: a finite state, that of one device, on all;
    ours also in `shard_map`.
    """
    # said, so that check_vma=False has nothing to warn of
    told = {"pipeline_axes": ()} if library.is_ours else {}
    layer = library.dense(5, cls=library.dot_general_cls(**told))
    x = normal(0, (16, 6))
    kernel = normal(1, (6, 5))
    tally = Tally()
    x[5, 3] = np.nan
    variables = library.variables(kernel)
    gradient = jax.grad(lambda v, x: (layer.apply(v, x) ** 2).sum())
    alone = jax.jit(gradient)(variables, x)

    def judge(state, what):
        """`state`: of each leaf, what every device has."""
        for leaf, other in zip(state, jax.tree.leaves(alone[OWG]), strict=True):
            tally(
                all(same_bits(each, leaf[0]) for each in leaf), f"{what}: ranks differ"
            )
            # A few roundings of gradients in f32, none of ours; equal infinities and
            # NaNs.
            near = (
                same_bits(leaf[0], other)
                if library.is_ours
                else np.allclose(leaf[0], other, 1e-5, 0, True)
            )
            tally(near, f"{what}: the state is not that of one device: {other[:2]}")

    for kind in ("Auto", "Explicit")[: 2 if library.is_ours else 1]:
        mesh = mesh_of(kind, data=8)
        with jax.set_mesh(mesh):
            placed = jax.device_put(variables, NamedSharding(mesh, P()))
            together = jax.jit(gradient)(
                placed, jax.device_put(x, NamedSharding(mesh, P("data")))
            )
        judge(
            [
                [s.data for s in leaf.addressable_shards]
                for leaf in jax.tree.leaves(together[OWG])
            ],
            kind,
        )
        tally(
            is_clean(together),
            f"the history is {library.history(together, 'input')[:2]}",
        )
        tally(np.isnan(together["params"]["kernel"]).any(), "the NaN is hidden")

    def of_device(variables, x):
        return jax.tree.map(lambda leaf: leaf[None], gradient(variables, x)[OWG])

    for check_vma in (True, False) if library.is_ours else ():
        specs = {
            "in_specs": (P(), P("data")),
            "out_specs": P("data"),
            "check_vma": check_vma,
        }
        mesh = mesh_of(data=8)
        state = jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))(variables, x)
        judge(jax.tree.leaves(state), f"check_vma={check_vma}")
    return tally.verdict()


FIRST_DATA = {
    "data of 1e4": (1e4, 1.0),
    "grads of 1e-7": (1.0, 1e-7),
    "both": (1e4, 1e-7),
}


def first_steps(library, right_from, steps) -> Verdict:
    """The products of some steps on the same data are right from step `right_from`
    on.
    """
    tally = Tally()
    worst = 0.0
    for what, sizes in FIRST_DATA.items():
        x, kernel, grad = given = operands(16, 24, 8, *sizes)
        step = step_of(library, 8)
        variables = library.variables(kernel)
        runs = []
        for _ in range(steps):
            runs.append(step(variables, x, grad))
            variables = runs[-1].variables
        tally(all(run.is_finite for run in runs), f"{what}: not finite")
        for run in runs[right_from:]:
            worst = max(worst, tally_products(tally, run, given, what))
            # The same amax twice gives the same scale.
            tally(
                not library.is_ours or same_bits(run[:3], runs[-1][:3]),
                f"{what}: the window has another scale",
            )
    return tally.verdict(
        f"{tally.count} products within {worst:.2f} of what FP8 may cost"
    )


@row('first step, data of 1e4 or grads of 1e-7: `"current"` is right', any_layer=True)
def first_step_current(library):
    """Right at once, and still right when the window takes over."""
    return first_steps(libraries.calibrated_first_step(library), 0, 2)


@row('the same: `"unit"` recovers at step 2', any_layer=True)
def first_step_unit(library):
    """Scale 1 clips data of 1e4 to 448 and flushes gradients of 1e-7 to 0."""
    return first_steps(library, 1, 2)


@row("amax below 5e-36: scale 2**126, no NaN", any_layer=True)
def tiny_amax(library):
    """448 / 2**126 is 5.3e-36, 57344 / 2**126 is 6.7e-34: below, FP8_MAX / amax has no
    normal inverse.
    """
    tally = Tally()
    step = step_of(library, 5)
    for size in (4e-36, 1e-37, 1e-40):
        for tiny in (*OPERANDS, "all"):
            x, kernel, grad = given = operands(6, 8, 5, make=normal)
            for name, value in zip(OPERANDS, given, strict=True):
                if tiny in (name, "all"):
                    value[:] = np.sign(value) * np.float32(size)
            variables = library.variables(kernel)
            state = oracle.LayerState.init(4)
            for i in range(3):
                got = step(variables, x, grad)
                variables = got.variables
                what = f"step {i}, {tiny} of {size:g}"
                tally(got.is_finite, f"{what}: a product is not finite")
                scales = [
                    float(getattr(library.state(variables), name).scale)
                    for name in OPERANDS
                ]
                tally(
                    all(np.isfinite(s) and s >= 2.0**-126 for s in scales),
                    f"{what}: stored scales {scales}",
                )
                if library.is_ours:
                    expected = oracle.dense_step(x, kernel, grad, state)
                    for product, value in zip(
                        got, (expected.y, expected.dgrad, expected.wgrad), strict=False
                    ):
                        value.check(product, what)
                state = tally_state(tally, library, variables, state, given, what=what)
    return tally.verdict()


@row("subnormals", any_layer=True)
def subnormals(library):
    """The window knows the amax of subnormal data to the bit, and products of it at
    scale 1 are exact zeros.

    XLA's CPU threads read subnormals as zeros: an amax taken with float comparisons
    records 0.
    """
    tally = Tally()
    for dtype in (np.dtype(np.float32), oracle.BF16, oracle.F16):
        smallest = np.array(1, f"u{dtype.itemsize}").view(dtype)
        x = np.full((6, 8), smallest) * np.array([1, 3, -7, 0, 1, 2, -1, 5], dtype)
        step = step_of(library, 5, dtype=dtype)
        grad = normal(2, (6, 5)).astype(dtype)
        got = step(library.variables(normal(1, (8, 5))), x, grad)
        amax = library.history(got.variables, "input")[0]
        true = 7 * oracle.widen(smallest)
        tally(
            amax == true == oracle.amax(x), f"{dtype}: amax {amax:.3g}, not {true:.3g}"
        )
        tally(
            not np.any(got.y) and not np.any(got.dkernel),
            f"{dtype}: products of it are not zero",
        )
        tally(
            step(got.variables, x, grad).is_finite,
            f"{dtype}: not finite in the step after",
        )
    return tally.verdict()


@row("zero tensors: exact zeros", any_layer=True)
def zero_tensors(library):
    """Whatever was before: 0 / 0 has no place here. The window records 0 and keeps its
    scale.
    """
    tally = Tally()
    for start in (library, libraries.calibrated_first_step(library)):
        step = step_of(start, 5)
        for zero in OPERANDS:
            for state in (oracle.LayerState.init(4), used_state()):
                x, kernel, grad = given = operands(6, 8, 5, make=normal)
                given[OPERANDS.index(zero)][:] = 0
                variables = library.variables(kernel, state)
                for i in range(3):
                    got = step(variables, x, grad)
                    zeros = got.of(zero)[:2]
                    tally(
                        not any(np.any(product) for product in zeros),
                        f"step {i}: products with {zero} of 0 are not",
                    )
                    tally(got.is_finite, f"step {i}, {zero} of 0: not finite")
                    if library.is_ours:
                        before, after = (
                            getattr(library.state(v), zero)
                            for v in (variables, got.variables)
                        )
                        expected = oracle.step(
                            given[OPERANDS.index(zero)], before, FORMATS[zero]
                        )[2]
                        tally(
                            same_bits(vars(after), vars(expected)),
                            f"step {i}: {zero} state",
                        )
                    variables = got.variables
    return tally.verdict()


@row("zero blocks: exact zeros", any_layer=True)
def zero_blocks(library):
    """Beside others of 1e4, and other rows do not notice."""
    x = normal(0, (64, 96), 1e4)
    kernel = normal(1, (96, 32))
    grad = normal(2, (64, 32))
    x[16:48], kernel[:, 8:16], grad[:, 24:] = 0, 0, 0
    step = step_of(library, 32)
    got = step(step(library.variables(kernel), x, grad).variables, x, grad)
    y = np.asarray(got.y)
    dkernel = np.asarray(got.dkernel)
    tally = Tally()
    tally(
        not y[16:48].any() and not y[:, 8:16].any() and not dkernel[:, 24:].any(),
        "zeros are not exact",
    )
    tally(
        y[:16, :8].all() and y[48:, 16:].all() and dkernel[:, :24].all(),
        "others are zero",
    )
    return tally.verdict()


@row("float16, K = 4096, grads from 1e-1 to 1e-5: a few percent", any_layer=True)
def float16(library):
    """Off by 5.1 % (y) and 8.1 % (gradients) at most.

    Rounding errors are spread over half a unit in the last place: of a value at the
    start of its octave, where they weigh most, their root mean square is 2**-4 /
    sqrt(3) for e4m3 and 2**-3 / sqrt(3) for e5m2, and those of both operands are
    independent. For values spread over octaves the mean square is 0.54 of it, a margin
    of 26 % that 128 elements do not use up. float16 itself adds 2**-11, and where a
    result is subnormal 2**-25 / sqrt(3) in the root mean square. A kernel that casts
    before it scales overflows at 65504.
    """
    k = 4096
    dtype = oracle.F16
    tally = Tally()
    worst = 0.0
    of_y = np.hypot(2.0**-4, 2.0**-4) / 3**0.5
    of_gradients = np.hypot(2.0**-4, 2.0**-3) / 3**0.5
    step = step_of(library, 16, dtype=dtype)
    x = normal(0, (8, k), dtype=dtype)
    kernel = normal(1, (k, 16), k**-0.5)
    variables = library.variables(kernel)
    wide_x, wide_kernel = (value.astype(dtype).astype(float) for value in (x, kernel))
    for i, size in enumerate((1e-1, 1e-2, 1e-3, 1e-4, 1e-5)):
        grad = normal(2 + i, (8, 16), size, dtype)
        wide = grad.astype(float)
        # a window of 4, so that the larger gradients before have left it
        for _ in range(4):
            got = step(variables, x, grad)
            variables = got.variables
        exact = {
            "y": (wide_x @ wide_kernel, of_y),
            "dx": (wide @ wide_kernel.T, of_gradients),
            "dkernel": (wide_x.T @ wide, of_gradients),
        }
        for name, (value, relative) in exact.items():
            error = np.linalg.norm(np.asarray(getattr(got, name), float) - value)
            norm = np.linalg.norm(value)
            limit = (relative + 2.0**-11) * norm + 2.0**-25 / 3**0.5 * value.size**0.5
            worst = max(worst, error / norm)
            what = f"grads of {size:g}: {name} is off by {error / norm:.2g} of it"
            tally(error <= limit, what)
    return tally.verdict(f"at most {worst:.1%} off")


def gain(product, exact) -> float:
    """The factor by which the product is too large, in least squares."""
    return float(
        np.vdot(np.asarray(product, np.float64), exact) / np.vdot(exact, exact)
    )


@row("bf16 gain error below 0.35 %", any_layer=True)
def bfloat16_gain(library):
    """In least squares against the codes dequantized in f64, at 32 scales; the largest
    of the errors.

    What is left is the rounding of results to bf16, at most 2**-8 of each and as often
    up as down: 2**-8 / 64 = 0.006 % of the whole of 64 x 64. Scales that are rounded to
    bf16 cost up to 2**-8 each, 0.78 % in a product (Flax).
    """
    n, worst = 64, 0.0
    step = step_of(library, n, dtype=oracle.BF16)
    for i in range(32):
        make = functools.partial(normal, dtype=oracle.BF16)
        given = operands(
            n,
            n,
            n,
            *(size * (1 + i / 32) for size in (1, 1e-3, 0.1)),
            seed=3 * i,
            make=make,
        )
        amaxes = [oracle.amax(value) for value in given]
        state = oracle.LayerState(
            *(oracle.State(np.float32([a, 0, 0, 0]), np.float32(1)) for a in amaxes)
        )
        x, kernel, grad = given
        got = step(library.variables(kernel.astype(np.float32), state), x, grad)
        x, kernel, grad = (
            oracle.quantize(value, fmt.max / np.float64(amax), fmt)[0].astype(
                np.float64
            )
            * np.float64(amax)
            / fmt.max
            for value, amax, fmt in zip(given, amaxes, FORMATS.values(), strict=True)
        )
        for name, exact in {
            "y": x @ kernel,
            "dx": grad @ kernel.T,
            "dkernel": x.T @ grad,
        }.items():
            worst = max(worst, gain(getattr(got, name), exact) - 1, key=abs)
    tally = Tally()
    tally(abs(worst) < 0.0035, f"a gain error of {worst:.2%}")
    return tally.verdict(f"{worst:.3%}")


@row("all 65,536 bf16 and f16 codes, both formats")
def every_half_code(library):
    """Codes against the oracle at powers of two, where `x * scale` and `x / scale_inv`
    are the same rule.

    Infinite x is left out: that it stays visible is a row of its own.
    """
    tally = Tally()
    for dtype, fmt, scale in itertools.product(
        (oracle.BF16, oracle.F16),
        oracle.FORMATS.values(),
        np.float32([2.0**-6, 1, 2.0**7]),
    ):
        x = oracle.all_half_codes(dtype)
        x = x[~np.isinf(oracle.widen(x))]
        got = np.asarray(library.quantize(x, scale, fmt))
        expected = oracle.quantize(x, scale, fmt)[0]
        # A NaN is a NaN, whatever its sign and payload.
        wrong = np.where(
            np.isnan(oracle.widen(expected)),
            ~np.isnan(oracle.widen(got)),
            oracle.bits(got) != oracle.bits(expected),
        ).sum()
        tally(
            wrong == 0,
            f"{wrong} of {x.size} codes of {dtype} to {fmt.name} at scale {scale:g}",
        )
    return tally.verdict()
