"""Draws the results of gpu.py: ratios against their goals, and GEMMs under the roofline
of the day.

python benchmarks/plot.py benchmarks/results/gpu.json [--out docs/images/gpu.png]
"""

import argparse
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)

OURS, PEER, LIMIT = "#0b6fd6", "#999999", "#c4262e"
# Operations for each byte of the cases whose rows have a rate: a product of n^3 reads
# two operands and writes one.
GEMM_SIDE = 8192
INTENSITY = {"fp8": 2 * GEMM_SIDE / (1 + 1 + 2), "bf16": 2 * GEMM_SIDE / (2 + 2 + 2)}


def bars(axes, goals):
    """Draw the value of every measured goal relative to the goal: the line is the goal,
    the tick the stretch goal.
    """
    measured = [goal for goal in goals if goal["value"] is not None][::-1]
    for y, goal in enumerate(measured):
        part = goal["value"] / goal["goal"]
        axes.barh(y, part, color=OURS if part >= 1 else PEER, height=0.7)
        axes.plot(
            [goal["stretch"] / goal["goal"]] * 2,
            [y - 0.35, y + 0.35],
            color="black",
            linewidth=1.5,
        )
        digits = 2 if goal["unit"] == "x" else 0
        axes.text(
            part,
            y,
            f" {goal['value']:.{digits}f} {goal['unit']}",
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color=LIMIT, linewidth=1)
    axes.set_yticks(
        range(len(measured)), [goal["what"] for goal in measured], fontsize=8
    )
    axes.set_xlabel("part of the goal (line: goal, tick: stretch)")
    axes.margins(x=0.15)


def roofline(axes, cases):
    """Draw TFLOP/s over operations a byte: the slope of the copy, the roof of the
    fastest product, and the GEMMs.
    """
    ceilings = cases["ceilings"]["rows"].values()
    terabytes = max(row["gb_s"] for row in ceilings if "gb_s" in row) * 1e-3
    points = {
        name: row["tflops"]
        for name, row in cases.get("gemm", {}).get("rows", {}).items()
    }
    roofs = {
        "bf16, measured": max(row["tflops"] for row in ceilings if "tflops" in row)
    }
    fp8 = [rate for name, rate in points.items() if not name.startswith("bf16")]
    if fp8:
        roofs["FP8, measured"] = max(fp8)
    intensities = [1.0, 2.0 * GEMM_SIDE]
    for label, roof in roofs.items():
        knee = roof / terabytes
        corners = [
            x for x in (intensities[0], knee, intensities[1]) if x <= intensities[1]
        ]
        axes.plot(
            corners,
            [min(roof, terabytes * x) for x in corners],
            color=LIMIT,
            linewidth=1,
        )
        axes.text(intensities[0], roof, label, fontsize=8, va="bottom", color=LIMIT)
    for name, rate in points.items():
        ours = name.startswith("jaxfp8")
        x = INTENSITY["bf16" if name.startswith("bf16") else "fp8"]
        axes.plot(
            x,
            rate,
            "o" if ours else "s",
            color=OURS if ours else PEER,
            label=f"{name}: {rate:.3g}",
        )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    if points:
        axes.legend(fontsize=7, loc="lower right")


def draw(record: dict):
    """Return the figure of one JSON of gpu.py."""
    environment, cases = record["environment"], record["cases"]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 5), width_ratios=(3, 2), layout="constrained"
    )
    bars(left, record["goals"])
    if cases.get("ceilings", {}).get("rows"):
        roofline(right, cases)
    title = (
        f"{environment['device']}, JAX {environment['jax']}, {environment['commit']}"
    )
    figure.suptitle(f"DRY RUN, no GPU: {title}" if environment["dry_run"] else title)
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="default: beside the JSON")
    args = parser.parse_args()
    if not args.json.exists():
        sys.exit(f"plot.py: {args.json} does not exist; benchmarks/gpu.py writes it")
    out = args.out or args.json.with_suffix(".png")
    draw(json.loads(args.json.read_text())).savefig(out, dpi=150)
    print(f"picture: {out}")


if __name__ == "__main__":
    main()
