"""The table of a comparison, the verdict of the proof and the JSON record, with the
machine that it holds for.
"""

import json
import pathlib

import jax
import numpy as np
from _compare_arms import ARMS, FP8_ARMS
from _compare_runs import record, summarize

from jaxfp8._jax import _files
from jaxfp8._jax._table import aligned
from jaxfp8.inspect._machine import processor, versions

# the largest mean of paired differences to bf16 that passes, in nat of validation loss
MAX_LOSS = 0.02
PROOF_STEPS, PROOF_SEEDS = 1000, 3


def environment() -> dict:
    """Return the processor, the devices and the versions that times and losses depend
    on.
    """
    machine = {"cpu": processor(), "devices": [str(device) for device in jax.devices()]}
    return {
        "machine": machine,
        "versions": versions(("jax", "jaxlib", "flax", "optax", "numpy")),
    }


def device_name() -> str:
    """Return the vendor's name of the device that programs run on."""
    device = jax.devices()[0]
    return (
        f"{processor()} (CPU)"
        if device.platform == "cpu"
        else f"{device.device_kind} ({device.platform})"
    )


def reference_of(names) -> str | None:
    """Return the arm that others are compared with: bf16 if it is among `names`, else
    f32; or None.
    """
    return next((name for name in ("bf16", "f32") if name in names), None)


def results_of(seeds, programs) -> dict[str, dict]:
    """Return for each arm the results of `summarize` and `Program.record`, and the
    steps that each seed skipped.
    """
    results = summarize(seeds, reference_of(seeds[0]))
    for name, row in results.items():
        row |= programs[name].record() | {
            "skipped": [runs[name].skipped for runs in seeds]
        }
    return results


def timed_results(times, programs) -> dict[str, dict]:
    """Return for each arm its times and their median, in ms, and the result of
    `Program.record`.
    """
    medians = {
        name: {"median_ms_per_step": float(np.median(ms))} for name, ms in times.items()
    }
    steps = {name: {"step_ms": [round(t, 3) for t in ms]} for name, ms in times.items()}
    return {
        name: medians[name] | steps[name] | programs[name].record() for name in times
    }


def table(results) -> str:
    """Return a table with a line for each arm."""
    # Columns without figures are left out: those of a reference that did not run, and
    # of losses without a training.
    reference, lines = reference_of(results), []
    for name, row in results.items():
        ms = row["median_ms_per_step"]
        cells = {"arm": name, "ms/step": f"{ms:.1f}"}
        if reference:
            cells[f"x {reference}"] = (
                f"{ms / results[reference]['median_ms_per_step']:.2f}"
            )
        cells |= {
            "peak MiB": _mib(row["peak_bytes"]),
            "kept MiB": _mib(row["kept_bytes"]),
        }
        if "mean_validation_loss" in row:
            cells["loss"] = f"{row['mean_validation_loss']:.4f}"
            if reference:
                bounds = row[f"interval_minus_{reference}"]
                cells[f"minus {reference}"] = f"{bounds['mean']:+.4f}"
                if bounds["low"] is not None:
                    cells["95 %"] = f"{bounds['low']:+.4f} to {bounds['high']:+.4f}"
            cells["skipped"] = (
                str(sum(row["skipped"])) if ARMS[name].loss_scaled else "-"
            )
        if name == reference:
            cells |= dict.fromkeys(cells.keys() & {f"minus {reference}", "95 %"}, "-")
        lines.append(cells)
    return aligned(
        [list(lines[0]), *(list(cells.values()) for cells in lines)], right=1
    )


def notes(programs) -> str:
    """Describe on which device the programs ran, and how the FP8 products of each arm
    ran there.
    """
    lines = [f"device: {device_name()}", "how FP8 ran there, in one step:"]
    lines += [
        f"  {name:8} {programs[name].how()}" for name in programs if name in FP8_ARMS
    ]
    if len(lines) == 2:
        return lines[0]
    if any(
        p.fp8["products"] > p.fp8["products_by_kernel"] + p.fp8["products_by_xla"]
        for p in programs.values()
    ):
        lines.append(
            "Widened codes are multiplied in bf16 or f32: these times are not the "
            "speed of FP8 units."
        )
    return "\n".join(lines)


def is_proof(steps: int, seeds: int, names) -> bool:
    """Return whether a comparison is long and wide enough to judge every recipe."""
    return (
        steps >= PROOF_STEPS
        and seeds >= PROOF_SEEDS
        and {"bf16", *FP8_ARMS} <= set(names)
    )


def judge(results) -> tuple[bool, str]:
    """Return `(passed, one line)`; an arm whose loss is NaN does not pass, because no
    comparison with NaN holds.
    """
    differences = {name: results[name]["mean_minus_bf16"] for name in FP8_ARMS}
    passed = all(difference <= MAX_LOSS for difference in differences.values())
    each = ", ".join(
        f"{name} {difference:+.4f}" for name, difference in differences.items()
    )
    return (
        passed,
        f"{'PASS' if passed else 'FAIL'}: nat above bf16, at most {MAX_LOSS}: {each}",
    )


def write_json(path, settings: dict, results: dict, seeds: list) -> None:
    """Write settings, the environment, results, and the curves of each seed."""
    written = (
        {"settings": settings}
        | environment()
        | {"results": results, "seeds": record(seeds)}
    )
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _files.replaced(path, "w") as file:
        file.write(json.dumps(written, indent=1) + "\n")


def _mib(size) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"
