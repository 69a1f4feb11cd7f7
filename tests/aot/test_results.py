"""The counts that are committed are on the pages that quote them; `results.py` compares
them with the programs.
"""

import pytest

from .results import RESULTS, ROOT

PROGRAMS = {"dense": "Dense, 8192^3", "dense with bias": "the same with a bias"}
PROGRAMS |= {
    "gated mlp": "gated MLP, 8192 tokens, 4096 to 14336",
    "fsdp-8": "the same, FSDP over 8 devices",
}
LAYERS = {"bf16": "bf16", "flax": "Flax FP8", "drop-in": "jaxfp8, drop-in"}
LAYERS |= {"own": "jaxfp8.linen.Dense", "fused": "jaxfp8.linen.GatedMLP"}


def line(case, name) -> str:
    row = RESULTS["cases"][case][name]
    title = f"{PROGRAMS[case]} " if name == "bf16" else ""
    gemms = f"{row['fp8_gemms']} of {row['gemms']}"
    return (
        f"| {title}| {LAYERS[name]} | {row['launches']} | {gemms} | "
        f"{row['bytes'] / 2**20:.0f} | {row['copies']} |"
    )


@pytest.mark.parametrize("case", PROGRAMS)
def test_the_page_has_the_counts(case):
    page = (ROOT / "benchmarks" / "compiled.md").read_text()
    quoted = [
        name
        for name in LAYERS
        if name in RESULTS["cases"][case]
        and (case, name) != ("dense with bias", "drop-in")
    ]
    assert [line(case, name) for name in quoted if line(case, name) not in page] == []
