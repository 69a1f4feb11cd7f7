"""What a step holds at its peak: the committed bytes and the page that quotes them."""

import json

from .results import ROOT


def test_committed_bytes():
    """Experts hold less than in bf16, GatedMLP with FP8 kept less than half of it."""
    results = ROOT / "benchmarks" / "results" / "memory_h200.json"
    models = json.loads(results.read_text())["models"]
    page = (ROOT / "docs" / "performance.md").read_text()
    peaks = {
        (model, name): found["temporary_bytes"]
        for model, candidates in models.items()
        for name, found in candidates.items()
    }
    for (model, _), peak in peaks.items():
        of_bf16 = peak / peaks[model, "bf16"]
        assert f"| {peak / 2**20:.0f} | {of_bf16:.2f} |" in page
    assert peaks["experts", "fused"] < peaks["experts", "bf16"]
    assert peaks["llama", "fused, FP8 kept"] <= 0.5 * peaks["llama", "bf16"]
