"""The picture of a comparison: losses, differences to the reference, time and memory.
Needs matplotlib.
"""

import matplotlib
import numpy as np
from _compare_arms import ARMS
from _compare_report import MAX_LOSS, reference_of
from _compare_runs import smooth, validation_of
from matplotlib.figure import Figure


def plot(path, title: str, results: dict, seeds: list) -> None:
    """Plot bars of time and memory, and above them the curves of losses if the arms
    were trained.

    Args:
        path: the file of the picture.
        title: the title above all axes.
        results: the result of `results_of` or `timed_results`.
        seeds: for each seed a dict name -> Run; empty where only time was measured.
    """
    style = {
        "axes.grid": True,
        "grid.alpha": 0.25,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    matplotlib.rcParams.update(style)
    figure = Figure(figsize=(14, 8.5 if seeds else 4.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2 if seeds else 1, 2, squeeze=False)
    if seeds:
        _plot_losses(axes[0, 0], seeds)
        _plot_differences(axes[0, 1], seeds)
    _plot_bars(
        axes[-1, 0], results, lambda row: row["median_ms_per_step"], "ms/step, median"
    )
    _plot_bars(
        axes[-1, 1],
        results,
        lambda row: (row["peak_bytes"] or 0) / 2**20,
        "MiB that a step needs",
    )
    figure.savefig(path, dpi=130)


def _plot_losses(ax, seeds):
    for name in seeds[0]:
        train = smooth(np.mean([runs[name].train_losses for runs in seeds], axis=0))
        steps, validation = validation_of(seeds, name)
        ax.plot(*train, color=ARMS[name].color, alpha=0.3, linewidth=1)
        ax.plot(
            steps,
            validation.mean(axis=0),
            "o-",
            markersize=3,
            color=ARMS[name].color,
            label=name,
        )
    ax.set(
        title="Validation loss (thin: training loss)",
        xlabel="step",
        ylabel="cross entropy (nat per character)",
    )
    ax.legend(frameon=False, ncols=2)


def _plot_differences(ax, seeds):
    reference = reference_of(seeds[0])
    if reference is None:
        ax.set_axis_off()
        return
    ax.axhspan(
        -MAX_LOSS, MAX_LOSS, color="#444444", alpha=0.08, label=f"{MAX_LOSS} nat"
    )
    ax.axhline(0, color=ARMS[reference].color, linewidth=1)
    of_reference = validation_of(seeds, reference)[1]
    for name in seeds[0]:
        if name != reference:
            steps, validation = validation_of(seeds, name)
            # Seeds are paired, so differences are averaged: the part of a seed that all
            # arms share cancels.
            difference = (validation - of_reference).mean(axis=0)
            ax.plot(
                steps,
                difference,
                "o-",
                markersize=3,
                color=ARMS[name].color,
                label=name,
            )
    ax.set(
        title=f"Validation loss minus {reference}, same weights and batches",
        xlabel="step",
        ylabel="nat",
    )
    ax.legend(frameon=False, ncols=2)


def _plot_bars(ax, results, value, title):
    bars = ax.barh(
        list(results),
        [*map(value, results.values())],
        color=[ARMS[name].color for name in results],
    )
    ax.bar_label(bars, fmt="%.1f", padding=3)
    ax.invert_yaxis()
    ax.set(title=title)
