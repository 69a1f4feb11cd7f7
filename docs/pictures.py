"""Draws pictures of docs/images/: FP8's numbers, a scale, a layer's kernels in time,
launches and bytes beside peers, gaps with intervals.

    # reads benchmarks/results/, needs matplotlib; the same input gives the same files
    python docs/pictures.py
"""

import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
from _loss_gap_arms import ARMS  # noqa: E402

RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
OURS, PEER, BF16 = "#0b6fd6", "#999999", "#c4262e"
FORMATS = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
LABELS = {
    "bf16": "bfloat16",
    "flax": "Flax FP8",
    "drop-in": "jaxfp8, drop-in",
    "own": "jaxfp8.linen",
}


def formats():
    """All positive numbers of both formats, and the step from one number to the
    next.
    """
    figure, axes = plt.subplots(2, 1, figsize=(8, 4), sharex=True, layout="constrained")
    for (name, dtype), color in zip(FORMATS.items(), (OURS, BF16), strict=True):
        numbers = np.arange(1, 128, dtype=np.uint8).view(dtype).astype(np.float64)
        numbers = numbers[np.isfinite(numbers)]
        y = list(FORMATS).index(name)
        axes[0].plot(numbers, np.full(len(numbers), y), "|", markersize=18, color=color)
        largest = f"{name}\n{numbers[0]:.2g} to {numbers[-1]:g}"
        axes[0].text(1.5e5, y, largest, va="center", color=color, fontsize=9)
        step = np.diff(numbers) / numbers[1:] / 2
        axes[1].plot(numbers[1:], 100 * step, color=color, label=name)
    axes[0].set(xscale="log", ylim=(-0.6, 1.6), yticks=[], title="The positive numbers")
    axes[0].spines[["left", "right", "top"]].set_visible(False)
    axes[1].set(title="Largest rounding error, % of the number", xlabel="number")
    axes[1].set(ylim=(0, 27), xlim=(3e-6, 5e6))
    axes[1].legend(frameon=False, loc="upper right")
    return figure


def scale():
    """A histogram of small gradients, before and after its scale, over the range of
    E5M2.
    """
    x = np.abs(1e-6 * np.random.default_rng(0).standard_normal(20000))
    factor = 57344 / x.max()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    bins = np.geomspace(1e-11, 1e6, 110)
    smallest = 2.0**-16
    for axis, values in zip(axes, (x, x * factor), strict=True):
        flushed = 100 * np.mean(values < smallest / 2)
        axis.hist(values, bins, color=OURS)
        axis.axvspan(smallest, 57344, color="#ffb000", alpha=0.25)
        axis.set(xscale="log", xlabel="magnitude", yticks=[])
        title = "as they are" if values is x else f"times {factor:.2g} = 57344 / amax"
        axis.set_title(f"Gradients {title}: {flushed:.0f} % become zero", fontsize=10)
    axes[0].text(
        1, axes[0].get_ylim()[1] * 0.9, "E5M2's range", ha="center", fontsize=9
    )
    return figure


def timeline():
    """The kernels of a Dense layer on an H200, one after the other, without the gaps
    between them.
    """
    trace = (RESULTS / "h200_trace.txt").read_text()
    layers = {
        "dense": "Dense, 8192 x 8192 x 8192: forward and backward",
        "small dense": "Dense, 2048 x 1024 x 1024",
    }
    arms = {"bf16": "bfloat16", "flax": "Flax FP8", "jaxfp8 own": "jaxfp8.linen.Dense"}
    figure, axes = plt.subplots(2, 1, figsize=(9, 4), layout="constrained")
    for axis, (layer, title) in zip(axes, layers.items(), strict=True):
        for y, arm in enumerate(arms):
            section = trace.split(f"== {layer} {arm}\n")[1]
            end = draw_kernels(axis, y, section)
            busy = float(re.search(r"busy ([\d.]+) us", section)[1])
            axis.text(1.01 * end, y, f"{busy:.0f} us", va="center", fontsize=8)
        axis.set(yticks=range(3), title=title)
        axis.margins(x=0.12)
        axis.set_yticklabels(arms.values())
        axis.invert_yaxis()
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("us of the device's work")
    axes[0].barh([0], [0], color=OURS, label="products")
    axes[0].barh([0], [0], color="#ffb000", label="quantization, casts, the rest")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def draw_kernels(axis, y, section) -> float:
    """A bar for each kernel in the first `seq:` line of a trace; returns their time."""
    sequence = section.partition("seq: ")[2].partition("\n")[0]
    start = 0.0
    for kernel in sequence.split(" | "):
        name, us = re.fullmatch(r"(.*) ([\d.]+) \(\S+\)", kernel).groups()
        is_product = name.startswith(("nvjet", "gemm_fusion"))
        color = OURS if is_product else "#ffb000"
        axis.barh(y, float(us), 0.6, start, color=color, edgecolor="white", lw=0.4)
        start += float(us)
    return start


def speed():
    """The speed of Dense layers, forward and backward, beside bfloat16's by size."""
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for name, (color, points) in _speeds().items():
        for arm, line in (("jaxfp8", "o-"), ("Flax FP8", "x:")):
            values = [point[arm] for point in points.values()]
            axis.plot([*points], values, line, color=color, label=f"{name}: {arm}")
    axis.axhline(1, color="black", lw=0.8)
    axis.text(58, 1.03, "bfloat16", fontsize=8)
    axis.set(xscale="log", ylabel="times as fast as bfloat16", ylim=(0, 2.2))
    axis.set_xlabel("cube root of rows x inputs x outputs")
    axis.set_xticks([64, 128, 256, 512, 1024, 2048, 4096, 8192])
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.minorticks_off()
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _speeds() -> dict:
    """The colour of each device, and by size how many times as fast both arms are."""
    files = {
        "CPU, AVX-512": (OURS, "train_step_epyc_2cpu.json"),
        "CPU without": (BF16, "train_step_epyc_2cpu_no_avx512.json"),
    }
    found = {}
    for name, (color, file) in files.items():
        points = {}
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            if row["case"].startswith("dense"):
                size = int(row["case"].removeprefix("dense"))
                beside = row["times_faster_than"]
                flax = beside["bf16"] / beside["flax"]
                points[size] = {"jaxfp8": beside["bf16"], "Flax FP8": flax}
        found[name] = color, points
    cases = json.loads((RESULTS / "h200_gpu.json").read_text())["cases"]
    points = {}
    sizes = {"small_dense": (2048 * 1024 * 1024) ** (1 / 3), "dense": 8192}
    for case, size in sizes.items():
        us = {arm: row["us"] for arm, row in cases[case]["rows"].items()}
        ours, flax = us["bf16"] / us["jaxfp8 own"], us["bf16"] / us["flax"]
        points[size] = {"jaxfp8": ours, "Flax FP8": flax}
    found["H200"] = "#2a9d3f", points
    return found


def launches():
    """Launches, and bytes outside of GEMMs, of programs compiled for an H200."""
    cases = json.loads((RESULTS / "aot_h200.json").read_text())["cases"]
    titles = {
        "dense": "Dense, 8192 x 8192 x 8192",
        "gated mlp": "Gated MLP of Llama 8B",
    }
    figure, axes = plt.subplots(2, 2, figsize=(9, 4), layout="constrained")
    for row, (case, title) in zip(axes, titles.items(), strict=True):
        rows = {arm: cases[case][arm] for arm in LABELS if arm in cases[case]}
        if "fused" in cases[case]:
            rows["fused"] = cases[case]["fused"]
        names = [LABELS.get(arm, "jaxfp8 GatedMLP") for arm in rows]
        colors = [
            BF16 if arm == "bf16" else PEER if arm == "flax" else OURS for arm in rows
        ]
        for axis, key, unit in zip(row, ("launches", "bytes"), (1, 2**20), strict=True):
            values = [arm[key] / unit for arm in rows.values()]
            bars = axis.barh(names, values, color=colors)
            axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            what = "launches" if key == "launches" else "MiB outside of GEMMs"
            axis.set_title(f"{title}: {what}", fontsize=9)
    return figure


def gaps():
    """Validation loss above bfloat16, a panel a text: of each arm the pairs as points,
    their mean and its interval.
    """
    texts = json.loads((RESULTS / "loss_gap.json").read_text())["results"]
    ran = set().union(*texts.values())
    arms = {
        name: arm.title
        for name, arm in ARMS.items()
        if arm.reference != name and name in ran
    }
    figure, axes = plt.subplots(
        1, len(texts), figsize=(11, 7), sharey=True, layout="constrained"
    )
    for axis, (text, rows) in zip(axes, texts.items(), strict=True):
        for y, name in enumerate(arms):
            if name not in rows:
                continue
            differences, bounds = rows[name]["differences"], rows[name]["difference"]
            half = None if bounds["low"] is None else bounds["high"] - bounds["mean"]
            axis.errorbar(bounds["mean"], y, xerr=half, fmt="o", color=OURS, capsize=4)
            axis.plot(
                differences,
                [y + 0.28] * len(differences),
                ".",
                color=PEER,
                markersize=3,
            )
        axis.axvline(0, color=BF16, linewidth=1)
        axis.set(
            title=text,
            xlabel="nat per character above bfloat16",
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(
        range(len(arms)), [title.replace("`", "") for title in arms.values()]
    )
    axes[0].invert_yaxis()
    return figure


PICTURES = {
    "formats": formats,
    "scale": scale,
    "timeline": timeline,
    "speed": speed,
    "launches": launches,
    "gaps": gaps,
}


def main(folder: pathlib.Path = IMAGES) -> None:
    """Draw all pictures into a folder."""
    plt.rcParams["svg.hashsalt"] = (
        "jaxfp8"  # names in the file, which are random otherwise
    )
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        print(f"picture: {folder / name}.svg")


if __name__ == "__main__":
    main()
