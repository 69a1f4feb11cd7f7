"""Tables of text: cells in aligned columns, the order of their lines, and the names of members of a stack."""

import re


def aligned(lines, right: int | None = None) -> str:
    """Lines of cells as text, the first one the head.

    Args:
        lines: sequences of strings, all of one length.
        right: the first column that is aligned to the right; None where none is.
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


def natural(path: str):
    """The order of paths in which `layers_2` is before `layers_10`."""
    return [
        [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", part)] for part in path.split("/")
    ]


def member(index: tuple[int, ...]) -> str:
    """`"[2,0]"`, what follows the name of a layer for one of a stack; "" where there is no stack."""
    return f"[{','.join(map(str, index))}]" if index else ""
