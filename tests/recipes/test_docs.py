"""docs/custom_recipes.md: its table is what the benchmark found."""

import json

import snippets

PAGE = "docs/custom_recipes.md"


def test_table_is_the_record():
    """Each row of the table is in the record, and where ours is worse is in the
    table.
    """
    rows = json.loads(
        (snippets.ROOT / "benchmarks/results/custom_recipe.json").read_text()
    )["rows"]
    lines = [f"| {of(row)} |" for row in rows]
    text = (snippets.ROOT / PAGE).read_text().splitlines()
    table = [line for line in text if line.startswith("| ") and " dB |" in line]
    assert table and set(table) <= set(lines)
    assert {
        line for line, row in zip(lines, rows, strict=True) if row["better_by"] < 0
    } <= set(table)


def of(row) -> str:
    where = f"{row['tensors']}: {row['of']}, {row['figure']}"
    best = row["dB"][row["best_stock"]]
    better = f"{row['better_by']:+.1f} +- {row['confidence_95']:.1f} dB"
    return (
        f"{where} | {best:.1f} ({row['best_stock']}) | {row['dB']['rotated']:.1f} | "
        f"{better}"
    )
