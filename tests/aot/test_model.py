"""The GPU benchmark's model in training, compiled for an H200: the figures that
benchmarks/README.md quotes.
"""

import jax
import pytest

from .results import ROOT

PROGRAM = "model"
MEASURED_WITH = "0.10.2"


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
