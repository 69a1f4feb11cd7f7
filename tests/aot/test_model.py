"""The GPU benchmark's model in training, compiled for an H200: what fits, what runs in
FP8, and the figures that benchmarks/README.md quotes.
"""

import jax
import pytest

from .results import ROOT

PROGRAM = "model"
MEASURED_WITH = "0.10.2"
# of an 80 GB GPU: `gpu.py` leaves the rest to PyTorch
LIMIT_MIB = 0.7 * 79_000


def test_every_arm_fits_an_80_gb_gpu(report):
    for kind, arms in report.items():
        for name, row in arms.items():
            assert row["parameters"] == 1_577_111_552
            assert row["memory_mib"] < LIMIT_MIB, (kind, name)
            # parameters and two moments
            assert row["state_mib"] > 12 * row["parameters"] / 2**20


def test_what_runs_in_fp8(report):
    """All products of blocks, and none of the head: three are left."""
    for arms in report.values():
        assert arms["bf16"]["fp8_gemms"] == 0
        for name in ("flax", "jaxfp8 own", "jaxfp8 quantize"):
            assert arms[name]["gemms"] - arms[name]["fp8_gemms"] == 3, name
        assert arms["flax"]["launches"] > arms["jaxfp8 quantize"]["launches"]
        assert arms["jaxfp8 quantize"]["launches"] > arms["jaxfp8 own"]["launches"]


def test_the_page_has_the_figures(report):
    if jax.__version__ != MEASURED_WITH:
        pytest.skip(f"compiled with JAX {MEASURED_WITH}; XLA's part differs")
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for name, row in report["model"].items():
        cells = [name]
        for found in (row, report["scan"][name]):
            cells += [
                f"{found['memory_mib'] / 1024:.1f}",
                str(found["launches"]),
            ]
        cells.append(f"{row['fp8_gemms']} of {row['gemms']}")
        assert f"| {' | '.join(cells)} |" in page, cells
