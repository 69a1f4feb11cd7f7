"""Write the vectors of this folder, by tests/oracle:
`python conformance/generate.py`.
"""

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import oracle  # noqa: E402
from oracle import (  # noqa: E402
    F32,
    FORMATS,
    LayerState,
    Options,
    State,
    blocks as oracle_blocks,
)

BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32), "rows": (1, None)}


def hard_numbers() -> np.ndarray:
    """Return numbers that rounding to FP8 can get wrong, infinities, NaNs and
    subnormals.
    """
    probes = [oracle.rounding_probes(fmt) for fmt in FORMATS.values()]
    return np.concatenate([*probes, oracle.f32_corner_cases()[:512]])


def quantize():
    for name, fmt in FORMATS.items():
        for scale in (1.0, 0.37, 2.0**-20, 2.0**126):
            x, scale = hard_numbers(), F32(scale)
            codes, amax = oracle.quantize(x, scale, fmt)
            yield (
                f"{name}, scale {scale}",
                {"format": name},
                {"x": x, "scale": scale},
                {"codes": codes, "amax": amax},
            )


def dequantize():
    for name, fmt in FORMATS.items():
        codes, scale_inv = oracle.all_codes(fmt), F32(0.37)
        values = oracle.dequantize(codes, scale_inv, F32)
        yield (
            name,
            {"format": name},
            {"codes": codes, "scale_inv": scale_inv},
            {"values": values},
        )


def delayed_scaling():
    """Each case is a step: the state before it and a tensor; codes and the state after
    it.
    """
    rng = np.random.default_rng(0)
    bad = {2: np.inf, 4: np.nan}
    for name, fmt in FORMATS.items():
        for margin in (0, 2):
            state = State.init(3)
            for step in range(7):
                x = (rng.standard_normal((4, 8)) * 4.0 ** rng.integers(-3, 4)).astype(
                    F32
                )
                x[0, 0] = bad.get(step, x[0, 0])
                codes, _, after = oracle.step(x, state, fmt, Options(margin=margin))
                before = {"amax_history": state.amax_history, "scale_inv": state.scale}
                answer = {
                    "codes": codes,
                    "amax_history": after.amax_history,
                    "scale_inv": after.scale,
                }
                yield (
                    f"{name}, margin {margin}, step {step}",
                    {"format": name, "margin": margin},
                    {"x": x, **before},
                    answer,
                )
                state = after


def quantize_blocks():
    rng = np.random.default_rng(1)
    # A block of zeros in either layout, a NaN, an infinity, and blocks that are cut off
    # at both edges.
    whole = (
        (rng.standard_normal((130, 264)) * 2.0 ** rng.integers(-12, 12, (130, 1)))
        .astype(oracle.BF16)
        .astype(F32)
    )
    whole[:128, :128], whole[128, 130], whole[129, 260] = 0, np.nan, np.inf
    for name, fmt in FORMATS.items():
        for block, sizes in BLOCKS.items():
            x = whole if block == "128x128" else whole[120:]
            kinds = (
                [("e8m0", "ceil"), ("e8m0", "floor")]
                if block == "1x32"
                else [("f32", "ceil")]
            )
            for scale, rounding in kinds:
                codes, scales = oracle_blocks.quantize(
                    x, fmt, sizes, scale=scale, rounding=rounding
                )
                options = {
                    "format": name,
                    "block": sizes,
                    "scale": scale,
                    "rounding": rounding,
                }
                answer = {"codes": codes, "scales": scales}
                yield f"{name}, {block}, {scale} {rounding}", options, {"x": x}, answer


def operands(fmt, m, k, seed):
    x = np.random.default_rng(seed).standard_normal((m, k)).astype(F32)
    scale = oracle.amax_to_scale(oracle.amax(x), fmt)
    return oracle.quantize(x, scale, fmt)[0], F32(1) / scale


def scaled_matmul():
    for a_name, b_name in (("e4m3", "e4m3"), ("e5m2", "e4m3")):
        a, a_scale_inv = operands(FORMATS[a_name], 6, 160, 2)
        b, b_scale_inv = operands(FORMATS[b_name], 10, 160, 3)
        product = oracle.scaled_matmul(a, b, a_scale_inv, b_scale_inv)
        inputs = {
            "a": a,
            "b": b,
            "a_scale_inv": a_scale_inv,
            "b_scale_inv": b_scale_inv,
        }
        yield (
            f"{a_name} by {b_name}",
            {"formats": [a_name, b_name]},
            inputs,
            {"y": product},
        )


def train_step():
    """y = x @ kernel and its gradients, three steps from an empty state; e4m3 forward,
    e5m2 for the gradient.
    """
    rng, state = np.random.default_rng(4), LayerState.init(4)
    kernel = (rng.standard_normal((32, 16)) / 6).astype(F32)
    for step in range(3):
        x, grad = (
            rng.standard_normal(shape).astype(F32) for shape in ((8, 32), (8, 16))
        )
        result = oracle.dense_step(x, kernel, grad, state)
        answer = {"y": result.y, "x_grad": result.dgrad, "kernel_grad": result.wgrad}
        yield (
            f"step {step}",
            {},
            {"x": x, "kernel": kernel, "grad": grad, **flat(state)},
            answer | flat(result.state),
        )
        state, kernel = result.state, (kernel - 0.1 * result.wgrad.exact).astype(F32)


def flat(state: LayerState) -> dict:
    quantizers = {
        "input": state.input,
        "kernel": state.kernel,
        "output_grad": state.output_grad,
    }
    return {
        f"{name}_{leaf}": value
        for name, quantizer in quantizers.items()
        for leaf, value in (
            ("amax_history", quantizer.amax_history),
            ("scale_inv", quantizer.scale),
        )
    }


OPS = (
    quantize,
    dequantize,
    delayed_scaling,
    quantize_blocks,
    scaled_matmul,
    train_step,
)


def arrays(op) -> dict[str, np.ndarray]:
    """Return the file of an op: `<case>/options` in JSON, and arrays `<case>/in`, `out`
    and `bound` `/<name>`.
    """
    file = {}
    for case, options, inputs, answer in op():
        file[f"{case}/options"] = np.array(json.dumps(options))
        for kind, values in (("in", inputs), ("out", answer)):
            for name, value in values.items():
                if isinstance(value, oracle.Product):
                    file[f"{case}/bound/{name}"], value = value.bound, value.exact
                value = np.asarray(value)
                file[f"{case}/{kind}/{name}"] = (
                    value.view(np.uint8) if value.itemsize == 1 else value
                )
    return file


if __name__ == "__main__":
    for op in OPS:
        np.savez_compressed(HERE / "vectors" / f"{op.__name__}.npz", **arrays(op))
