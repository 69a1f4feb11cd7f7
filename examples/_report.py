"""Report a training comparison: scales over time, the table, the picture, the verdict
and the JSON record.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import matplotlib
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
import _compare_runs  # noqa: E402
from _compare_report import environment  # noqa: E402
from _compare_runs import record, smooth, summarize as summarize, validation_of  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend has to be chosen first)

COLORS = {
    "bf16": "#444444",
    "jaxfp8": "#0b6fd6",
    "flax": "#e07b00",
    "control": "#c4262e",
}
# the arms of custom_recipes.py
COLORS |= {"mixed": "#0b6fd6", "int6": "#e07b00", "rotated": "#2a9d58"}
COLORS |= {"residual": "#8a4fbf"}
OPERANDS = {
    "input": "input",
    "kernel": "kernel",
    "output_grad": "gradient of the output",
}

# The criteria of the proof, in nat of validation loss. The control loses more than a
# nat; ten times the tolerance is enough to show that the measurement can tell a broken
# recipe from a working one.
MAX_LOSS_TO_BF16 = 0.02
MAX_LOSS_TO_FLAX = 0.005
MIN_CONTROL_LOSS = 0.2


@dataclasses.dataclass
class Run(_compare_runs.Run):
    """The curves, times and scales of one arm with one seed."""

    # (step, {(layer, operand): scale})
    scales: list = dataclasses.field(default_factory=list)

    def record_scales(self, step, fp8_state):
        """Record every scale of a state collection, which stores `amax / FP8_MAX`, the
        inverse of the scale.
        """
        leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(fp8_state))[0]
        scales = {}
        for path, leaf in leaves:
            *module, _, variable = (key.key for key in path)
            if variable.endswith("_scale"):
                scales["/".join(module), variable.removesuffix("_scale")] = 1 / float(
                    leaf[0]
                )
        self.scales.append((step, scales))


def table(results):
    lines = [
        f"{'arm':9}{'validation loss':>16}{'minus bf16':>12}{'ms/step':>9}   "
        "validation loss of each seed"
    ]
    for name, row in results.items():
        difference = (
            f"{row['mean_minus_bf16']:+.4f}"
            if name != "bf16" and "mean_minus_bf16" in row
            else "-"
        )
        each = "  ".join(f"{loss:.4f}" for loss in row["validation_losses"])
        lines.append(
            f"{name:9}{row['mean_validation_loss']:16.4f}{difference:>12}"
            f"{row['median_ms_per_step']:9.1f}   {each}"
        )
    return "\n".join(lines)


def judge(results):
    """Return the verdict `(passed, one line)`; a NaN loss does not pass, because no
    comparison with NaN holds.
    """
    to_bf16 = results["jaxfp8"]["mean_minus_bf16"]
    to_flax = to_bf16 - results["flax"]["mean_minus_bf16"]
    control = results["control"]["mean_minus_bf16"]
    passed = (
        to_bf16 <= MAX_LOSS_TO_BF16
        and to_flax <= MAX_LOSS_TO_FLAX
        and control >= MIN_CONTROL_LOSS
    )
    return passed, (
        f"{'PASS' if passed else 'FAIL'}: jaxfp8 - bf16 {to_bf16:+.4f} nat (at most "
        f"{MAX_LOSS_TO_BF16}), jaxfp8 - flax {to_flax:+.4f} (at most "
        f"{MAX_LOSS_TO_FLAX}), control - bf16 {control:+.4f} (at least "
        f"{MIN_CONTROL_LOSS})"
    )


def plot(seeds, path):
    """Plot losses and their differences to bf16, means over the seeds, and the jaxfp8
    scales of the first seed.
    """
    plt.rcParams.update(
        {
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    rows = 2 if "jaxfp8" in seeds[0] else 1
    figure = plt.figure(figsize=(14, 4.25 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 6)
    _plot_losses(figure.add_subplot(grid[0, :3]), seeds)
    if "bf16" in seeds[0]:
        _plot_differences(figure.add_subplot(grid[0, 3:]), seeds)
    if "jaxfp8" in seeds[0]:
        axes = [figure.add_subplot(grid[1, 2 * i : 2 * i + 2]) for i in range(3)]
        for ax, operand in zip(axes, OPERANDS, strict=True):
            _plot_scales(ax, seeds[0]["jaxfp8"].scales, operand)
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=8,
            frameon=False,
        )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_losses(ax, seeds):
    for name in seeds[0]:
        train = smooth(np.mean([runs[name].train_losses for runs in seeds], axis=0))
        steps, validation = validation_of(seeds, name)
        ax.plot(*train, color=COLORS[name], alpha=0.35, linewidth=1)
        # The lines of arms that agree overlap: bf16 is a wide band below, Flax a dashed
        # line above.
        style = {
            "bf16": {"linewidth": 7, "alpha": 0.35},
            "flax": {"linestyle": "--"},
        }.get(name, {})
        ax.plot(
            steps,
            validation.mean(axis=0),
            marker="o",
            markersize=4,
            color=COLORS[name],
            label=name,
            **style,
        )
    ax.set(
        title="Validation loss (thin: training loss)",
        xlabel="step",
        ylabel="cross entropy (nat per character)",
    )
    ax.legend(frameon=False)


def _plot_differences(ax, seeds):
    ax.axhspan(
        -MAX_LOSS_TO_BF16,
        MAX_LOSS_TO_BF16,
        color=COLORS["bf16"],
        alpha=0.08,
        label="tolerance at the end",
    )
    ax.axhline(0, color=COLORS["bf16"], linewidth=1)
    reference = validation_of(seeds, "bf16")[1]
    for name in (name for name in seeds[0] if name not in ("bf16", "control")):
        steps, validation = validation_of(seeds, name)
        difference = validation - reference
        ax.plot(
            steps,
            difference.mean(axis=0),
            "o-",
            color=COLORS[name],
            markersize=4,
            label=name,
        )
        if len(seeds) > 1:
            ax.plot(steps, difference.T, color=COLORS[name], alpha=0.3, linewidth=0.8)
    ax.set(
        title="Validation loss minus bf16, same weights and batches",
        xlabel="step",
        ylabel="difference (nat)",
    )
    ax.legend(frameon=False)


def _plot_scales(ax, scales, operand):
    layers = [layer for layer, of in scales[0][1] if of == operand]
    projections = sorted({layer.split("/")[-1] for layer in layers})
    blocks = sorted({layer.split("/")[0] for layer in layers})
    for layer in layers:
        ax.plot(
            [step for step, _ in scales],
            [values[layer, operand] for _, values in scales],
            color=f"C{projections.index(layer.split('/')[-1])}",
            linestyle=["-", "--"][blocks.index(layer.split("/")[0]) % 2],
            linewidth=1.6,
            label=layer,
        )
    ax.set(
        title=f"jaxfp8 scale: {OPERANDS[operand]}",
        xlabel="step",
        ylabel="scale",
        yscale="log",
    )


def write_json(path, settings, corpus, seeds, results):
    text = {"characters": len(corpus.codes), "vocabulary": len(corpus.vocabulary)}
    parts = (
        {"settings": settings, "text": text}
        | environment()
        | {"results": results, "seeds": record(seeds)}
    )
    pathlib.Path(path).write_text(json.dumps(parts, indent=1) + "\n")
