"""Tables of text: cells in aligned columns, and the order of their lines."""

import math
import re


def aligned(lines, right=math.inf):
    """Return lines of cells as text in aligned columns; the first line is the head.

    Args:
        lines: sequences of strings, all of one length.
        right: index of the first column that is aligned to the right; without it all
            columns are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i >= right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def table(rows, columns, form="", right=math.inf):
    """Return rows as text in aligned columns.

    Args:
        rows: dicts.
        columns: the keys of a row to show, which are the head as well.
        form: how a float is written, such as `".4g"`; None and "" are "-".
        right: see `aligned`.
    """
    lines = [columns]
    for row in rows:
        cells = []
        for column in columns:
            cell = row[column]
            if cell in (None, ""):
                cell = "-"
            elif isinstance(cell, float):
                cell = f"{cell:{form}}"
            cells.append(str(cell))
        lines.append(cells)
    return aligned(lines, right)


def natural(path):
    """Return a sorting key for paths in which `layers_2` is before `layers_10`."""
    padded = re.sub(r"\d+", lambda number: number[0].zfill(9), path)
    return padded.split("/")


def member(index):
    """Return `"[2,0]"`, the suffix of a layer's name for one layer of a stack; ""
    without a stack.
    """
    return f"[{','.join(map(str, index))}]" if index else ""
