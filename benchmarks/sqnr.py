"""Measures the error of quantizing a tensor, and of a product: SQNR of every recipe on
the same tensors.

    python benchmarks/sqnr.py [--json PATH]

    SQNR = 10 log10(sum x**2 / sum (x - q(x))**2) dB, against float64

Each recipe has three numbers: for the tensor itself, quantized along its rows; for the
half of its elements that are the smallest, which hardly count in the first number; and
for `y = x @ kernel` with K = 1024 and a normal kernel, quantized by the same recipe.
Codes are the same on every platform, and so are these numbers.
"""

import argparse
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from _environment import environment, write

import jaxfp8

ROWS, K, COLS = 512, 1024, 256
FIGURES = ("tensor_db", "small_db", "product_db")
MATMUL = (((1,), (0,)), ((), ()))
FORMATS = {"e4m3": jaxfp8.Format.E4M3, "e5m2": jaxfp8.Format.E5M2}
RESULTS = pathlib.Path(__file__).parent / "results" / "sqnr.json"


def tensors() -> dict:
    """Make the tensors, f32 `[ROWS, K]`, by name."""
    rng = np.random.default_rng(0)
    shape = (ROWS, K)
    normal = rng.standard_normal(shape)
    outliers, massive = (rng.standard_normal(shape) for _ in range(2))
    outliers[:, rng.choice(K, 8, replace=False)] *= 100
    massive[:, rng.choice(K, 2, replace=False)] *= 10_000
    made = {
        "normal": normal,
        "student t, 3": rng.standard_t(3, shape),
        "columns x100": outliers,
        "columns x10000": massive,
        "gradient": rng.choice([-1.0, 1.0], shape)
        * np.exp(3 * rng.standard_normal(shape))
        * 1e-6,
        "constant": np.full(shape, 0.3),
    }
    return {name: value.astype(np.float32) for name, value in made.items()}


def recipes(fp8_format) -> dict:
    """Return a dict name -> `(recipe, staleness)`.

    The history of delayed scaling holds the amax of the tensor, times the staleness,
    which is None for other recipes.
    """
    delayed = jaxfp8.DelayedScaling(amax_history_len=1, fp8_format=fp8_format)
    current = jaxfp8.Float8CurrentScaling(fp8_format)
    block, mx = (
        jaxfp8.Float8BlockScaling(fp8_format),
        jaxfp8.MXFP8BlockScaling(fp8_format),
    )
    return {
        "delayed, history matches": (delayed, 1),
        "delayed, history 4x too large": (delayed, 4),
        "delayed, history 4x too small": (delayed, 1 / 4),
        "current": (current, None),
        "current, power of 2": (dataclasses.replace(current, power_2_scale=True), None),
        "row-wise": (jaxfp8.Float8RowwiseScaling(fp8_format), None),
        "block": (block, None),
        "block, power of 2": (dataclasses.replace(block, power_2_scale=True), None),
        "MXFP8, ceil": (mx, None),
        "MXFP8, floor": (dataclasses.replace(mx, rounding="floor"), None),
    }


def state_of(recipe, staleness, *arrays):
    """Return the state of a product whose histories hold the amaxes of `arrays`, times
    the staleness.
    """
    if staleness is None:
        return None

    def state(x):
        amax = np.abs(x).max().astype(np.float32) * np.float32(staleness)
        return jaxfp8.recipes.QuantizerState(
            jnp.full((recipe.amax_history_len,), amax), jnp.ones((1,), jnp.float32)
        )

    return jaxfp8.DotGeneralState(*map(state, arrays), None)


def sqnr(exact, got) -> float | None:
    """Return the SQNR in dB, to a tenth; None where `got` is exact."""
    exact, got = np.asarray(exact, np.float64), np.asarray(got).astype(np.float64)
    noise = np.sum((exact - got) ** 2)
    return (
        None if noise == 0 else round(float(10 * np.log10(np.sum(exact**2) / noise)), 1)
    )


def quantized(recipe, staleness, x):
    """Return x, f32, after quantizing and dequantizing by the recipe's quantizer of
    x.
    """
    quantizer = recipe.quantizers()[0]
    if staleness is None:
        return quantizer.quantize(x, quantizer.init())[0].dequantize(jnp.float32)
    amax = np.abs(x).max() * np.float32(staleness)
    scale = np.float32(recipe.fp8_format.max) / amax
    data, _ = jaxfp8.ops.quantize(x, scale, recipe.fp8_format.dtype)
    return jaxfp8.ops.dequantize(data, np.float32(1) / scale, jnp.float32)


def smallest(x):
    """Return a mask of the elements in the smaller half by magnitude."""
    return np.abs(x) <= np.median(np.abs(x))


def measure(names=None, formats=("e4m3", "e5m2")) -> list[dict]:
    """Return a row for each format, recipe and tensor, of the tensors `names`, or of
    all where it is None.
    """
    kernel = np.random.default_rng(1).standard_normal((K, COLS)).astype(
        np.float32
    ) / np.float32(K**0.5)
    rows = []
    chosen = {
        name: x for name, x in tensors().items() if names is None or name in names
    }
    for format_name in formats:
        for name, (recipe, staleness) in recipes(FORMATS[format_name]).items():
            product = jax.jit(
                lambda x, kernel, state, recipe=recipe: jaxfp8.dot_general(
                    x, kernel, MATMUL, recipe=recipe, state=state, precision="highest"
                )
            )
            for tensor, x in chosen.items():
                y = product(x, kernel, state_of(recipe, staleness, x, kernel))
                exact = x.astype(np.float64) @ kernel.astype(np.float64)
                q, small = np.asarray(quantized(recipe, staleness, x)), smallest(x)
                rows.append(
                    {
                        "format": format_name,
                        "recipe": name,
                        "tensor": tensor,
                        "tensor_db": sqnr(x, q),
                        "small_db": sqnr(x[small], q[small]),
                        "product_db": sqnr(exact, y),
                    }
                )
    return rows


def decibels(value) -> str:
    """Write dB without decimals: smaller differences come from the random numbers."""
    return "exact" if value is None else f"{value:.0f}"


def table(rows) -> str:
    """Return Markdown with a table for each format: recipes by tensors,
    `tensor / its small half / product` in dB.
    """
    parts = []
    for format_name in dict.fromkeys(row["format"] for row in rows):
        mine = [row for row in rows if row["format"] == format_name]
        names = list(dict.fromkeys(row["tensor"] for row in mine))
        lines = [
            f"| {format_name} | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        for recipe in dict.fromkeys(row["recipe"] for row in mine):
            cells = {row["tensor"]: row for row in mine if row["recipe"] == recipe}
            values = (
                " / ".join(decibels(cells[name][key]) for key in FIGURES)
                for name in names
            )
            lines.append(f"| {recipe} | " + " | ".join(values) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    path = parser.parse_args().json
    rows = measure()
    print(table(rows))
    write(path, environment=environment(), rows=rows)


if __name__ == "__main__":
    main()
