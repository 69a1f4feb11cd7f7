"""transpose_codes: FP8 codes in their other layout, for products whose kernels a mesh
gathers in one layout.
"""

from . import _shapes, _support
from ._primitive import Op, dims


def transpose_codes(data, rows=1, cols=1):
    """Move the last `cols` dimensions before the `rows` dimensions in front of them, by
    the kernel for codes; XLA's own transpose of bytes is slower on GPUs.

    Args:
        data: float8_e4m3fn or float8_e5m2, on a mesh of CPUs their bytes.
        rows, cols: the numbers of these dimensions.
    """
    if rows == 0 or cols == 0:
        return data
    return _TransposeCodes(rows, cols)(data)[0]


def turned_codes(op, data, rows, cols):
    """Transpose codes by the implementation that an op was traced with."""
    with _support.using(op.implementation):
        return transpose_codes(data, rows, cols)


class _TransposeCodes(Op):
    name = "transpose_codes"
    rows: int
    cols: int

    def names(self, data):
        row, col = dims("row", self.rows), dims("col", self.cols)
        batch = dims("batch", data - self.rows - self.cols)
        return [(batch, row, col)], [(batch, col, row)]

    def dtypes(self, data):
        return [data.dtype]

    def reference(self, data):
        return [_shapes.transpose(data, self.rows, self.cols)]

    cpu = reference
    cuda = Op.call_on_groups
