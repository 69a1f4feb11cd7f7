"""Tables of text: cells in aligned columns, the order of their lines, and the names of
the runs of a layer.
"""

import re
from collections import Counter


def aligned(lines, right=None):
    """Return lines of cells as text in aligned columns; the first line is the head.

    Args:
        lines: sequences of strings, all of one length.
        right: index of the first column that is aligned to the right; None aligns all
            columns to the left.
    """
    count = len(lines[0])
    right = count if right is None else right
    widths = [max(len(line[i]) for line in lines) for i in range(count)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i >= right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def natural(path):
    """Return a sorting key for paths in which `layers_2` is before `layers_10`."""
    return [
        [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", part)]
        for part in path.split("/")
    ]


def member(index):
    """Return `"[2,0]"`, the suffix of a layer's name for one layer of a stack; ""
    without a stack.
    """
    return f"[{','.join(map(str, index))}]" if index else ""


def labelled_runs(
    products,
):
    """Yield `(label, iteration, run)` for each run of the products of a traced program.

    Args:
        products: in the order of the program, the layer of each product and its runs in
            the backward. A backward runs the iterations of a loop in reverse order, so
            that the last iteration comes first.

    Yields:
        `label` is the layer, with ` (call 1)` for its second product; `iteration` is
        `(i,)` in a loop, else `()`.
    """
    products_of_layer = Counter(layer for layer, _ in products)
    calls = Counter()
    for layer, runs in products:
        label = layer
        if products_of_layer[layer] > 1:
            label += f" (call {calls[layer]})"
        calls[layer] += 1
        for i, run in enumerate(reversed(runs)):
            yield label, (i,) if len(runs) > 1 else (), run
