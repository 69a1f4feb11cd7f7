"""How often layers that multiply one x quantize it on an H200, and what one
quantization for all would save.
"""

import jax
import pytest

from .results import ROOT

PROGRAM = "shared_input"
MIB_OF_X = 8192 * 4096 * 2 / 2**20
# the first cell on the page of what a version of JAX made of the scan
CELLS = {"0.10.2": 4, "0.12.0.1": 7}


def test_xla_merges_what_keeps_no_state(report):
    """Current scaling reads x for its amax too."""
    for name in ("current", "row-wise", "block", "static"):
        assert report[f"alone, each, {name}"]["reads"] == [1 + (name == "current")]
    assert report["scan, each, current"] == report["scan, once, current"]


def test_delayed_scaling_quantizes_for_each_layer(report):
    """Two layers more than one read x and write its codes in two layouts."""
    each, once = (report[f"alone, {way}, delayed"] for way in ("each", "once"))
    assert (each["reads"], once["reads"]) == ([3], [1])
    assert each["launches"] - once["launches"] == 2
    assert each["mib"] - once["mib"] == pytest.approx(2 * 2 * MIB_OF_X, abs=1e-3)


def test_a_rule_saves_launches_bytes_and_time(report):
    for program in ("rotary", "rotary scan"):
        apart, joined = (
            report[f"{program}, {w}, delayed"] for w in ("apart", "by rule")
        )
        for key in ("launches", "mib", "ms", "temporary_mib"):
            assert joined[key] < 0.96 * apart[key], (program, key)


def test_the_page_has_the_figures(report):
    if jax.__version__ not in CELLS:
        pytest.skip(f"compiled with JAX {', '.join(CELLS)}; XLA's part differs")
    first = CELLS[jax.__version__]
    page = (ROOT / "benchmarks" / "compiled.md").read_text()
    rows = dict.fromkeys(("each", "once", "one product"), ("alone", "scan"))
    rows |= dict.fromkeys(("apart", "by rule"), ("rotary", "rotary scan"))
    for way, programs in rows.items():
        alone, scan = (report[f"{program}, {way}, delayed"] for program in programs)
        (line,) = [x for x in page.splitlines() if x.startswith(f"| {way} |")]
        cells = line.strip("| ").split(" | ")
        expected = f"{alone['launches']}", f"{alone['mib']:.0f}", f"{alone['ms']:.2f}"
        assert tuple(cells[1:4]) == expected, way
        expected = (
            f"{scan['launches']}",
            f"{scan['ms']:.1f}",
            f"{scan['temporary_mib']:.0f}",
        )
        assert tuple(cells[first : first + 3]) == expected, way
