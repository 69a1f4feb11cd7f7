"""Results of GPUs in the docs: the tables that are there, those of a made-up session,
and what is no result.
"""

import json

import pytest
import tables


@pytest.mark.parametrize("name, page", tables.PAGES.items())
def test_the_docs_have_what_was_measured(name, page):
    text = page.read_text()
    assert tables.replaced(text, name, tables.section(name)) == text, (
        "python benchmarks/tables.py"
    )


def test_a_call_may_write_several_records(tmp_path):
    """Each step of `gpu_session.sh minutes` writes one, and all are kept in one."""
    environment = {"device": "NVIDIA H200", "dry_run": False, "commit": "abc1234"}
    for name in ("model", "scan"):
        row = {"rows": {"bf16": {"us": 1, "gemms": {}}}, "errors": {}}
        record = {"environment": environment, "cases": {name: row}, "goals": []}
        (tmp_path / f"gpu_{name}.json").write_text(json.dumps(record))
    results = tmp_path / "results"
    results.mkdir()
    tables.keep(tmp_path, results)
    (path,) = results.iterdir()
    assert path.name == "h200_gpu.json"
    assert set(json.loads(path.read_text())["cases"]) == {"model", "scan"}
