"""The figures of docs/optimizer_states.md are those of the committed result, which
keeps its promises.
"""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def test_figures():
    results = json.loads(
        (ROOT / "benchmarks/results/optimizer_states_cpu.json").read_text()
    )["results"]
    page = (ROOT / "docs/optimizer_states.md").read_text()
    for arms in results["losses"].values():
        for arm in ("fp8", "lion_fp8", "momentum_fp8", "linear"):
            figures = arms[arm]["difference"]
            assert (
                "{mean:+.4f} nat, {low:+.4f} to {high:+.4f}".format(**figures) in page
            )
        difference = arms["fp8"]["difference"]
        assert -0.003 <= difference["low"] and difference["high"] <= 0.003
        assert abs(arms["linear"]["difference"]["mean"]) > 0.003
    for arms in results["updates"].values():
        assert all(
            f"{arm['size']:.3f}, {arm['error']:.2f}" in page for arm in arms.values()
        )
        assert abs(arms["fp8"]["size"] - 1) <= 0.08 and arms["fp8"]["error"] < 0.3
    assert (
        f"{results['memory']['fp8']['all']:.2f} (float32: "
        f"{results['memory']['float32']['all']:.2f})" in page
    )
    assert results["memory"]["fp8"]["all"] <= 2.2
    assert (
        results["time"]["apply"]["ratio"] <= results["time"]["update"]["ratio"] <= 2.0
    )
