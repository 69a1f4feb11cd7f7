"""The time line, of programs written by hand: what runs beside what, and how long."""

import json
import pathlib

import pytest

from . import hlo, timeline

ROOT = pathlib.Path(__file__).parents[2]

RATES = timeline.Rates(
    fp8=2e6, bf16=1e6, memory=1e3, wire=1e3, launch=0.0, collective=0.0
)
GROUPS = "replica_groups={{0,1}}"
# 2 * 10 * 10 * 10 FLOPs of FP8: 1 ms; 800 bytes, half of them on the wire: 400 ms.
PRODUCT = (
    "  %y = f32[10,10]{1,0} custom-call(%a, %b), "
    'custom_call_target="jaxfp8_scaled_matmul_v2"'
)
GATHERED = f"(%x), dimensions={{0}}, {GROUPS}"


def program(*lines, body=()):
    """A program with these instructions, and another computation `body`."""
    operands = [
        "  %a = f8e4m3fn[10,10]{1,0} parameter(0)",
        "  %b = f8e4m3fn[10,10]{1,0} parameter(1)",
        "  %x = f32[100]{0} parameter(2)",
    ]
    parts = [["%body () -> f32[] {", *operands, *body, "}"]] if body else []
    parts.append(["ENTRY %main () -> f32[] {", *operands, *lines, "}"])
    return hlo.parse("\n\n".join("\n".join(part) for part in parts))


STARTED = "  %s = (f32[100]{0}, f32[200]{0}) " + "all-gather-start" + GATHERED
DONE = "  %d = f32[200]{0} all-gather-done(%s)"


def test_what_is_beside_a_product_is_hidden():
    """The product of 1 ms hides its part; the wait is the rest."""
    alone = timeline.replay(program(PRODUCT), RATES)
    assert alone.total == pytest.approx(1e-3)
    beside = timeline.replay(program(STARTED, PRODUCT, DONE), RATES)
    assert beside.total == pytest.approx(0.4)
    assert beside.waits == pytest.approx(0.4 - 1e-3)
    behind = timeline.replay(program(STARTED, DONE, PRODUCT), RATES)
    assert behind.total == pytest.approx(0.4 + 1e-3)
    assert behind.waits == pytest.approx(0.4)
    at_once = program("  %d = f32[200]{0} " + "all-gather" + GATHERED, PRODUCT)
    assert timeline.replay(at_once, RATES) == behind


def test_a_loop_runs_its_body_as_often_as_it_says():
    loop = (
        "  %w = f32[] while(%a), condition=%body, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}'
    )
    times = timeline.replay(program(loop, body=(STARTED, PRODUCT, DONE)), RATES)
    assert times.total == pytest.approx(5 * 0.4)
    assert times.waits == pytest.approx(0.4 - 1e-3), "those of one pass"


def test_the_page_has_the_figures_of_the_results():
    results = ROOT / "benchmarks" / "results" / "timeline_h200.json"
    rows = json.loads(results.read_text())["cases"]["fsdp-8 scan"]
    page = (ROOT / "docs" / "performance.md").read_text()
    bf16 = rows["bf16"]
    for name in rows.keys() - {"own, bare"}:
        found = rows[name]
        cells = []
        for program in ("timeline", "profiled"):
            milliseconds = found[program]["ms"]
            ratio = bf16[program]["ms"] / milliseconds
            cells += [f"{milliseconds:.1f}", f"{ratio:.2f}"]
        cells.append(f"{found['timeline']['hidden_ms']:.1f}")
        assert f"| {' | '.join(cells)} |" in page, name
