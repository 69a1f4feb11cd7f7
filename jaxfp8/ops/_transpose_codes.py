"""transpose_codes: FP8 codes in their other layout, for products whose kernels a mesh
gathers in one layout.
"""

from . import _shapes, _support
from ._primitive import Op, dims


def transpose_codes(data, order):
    """Return `jnp.transpose(data, order)` by the kernel for codes; XLA's own transpose
    of bytes is slower on GPUs.

    Args:
        data: float8_e4m3fn or float8_e5m2, on a mesh of CPUs their bytes.
        order: moves the last dimensions before those in front of them.
    """
    leading = next((i for i, j in enumerate(order) if i != j), data.ndim)
    if leading == data.ndim:
        return data
    rows, cols = order[leading] - leading, data.ndim - order[leading]
    return _TransposeCodes(rows, cols)(data)[0]


def turned_codes(op, data, order):
    """Transpose codes by the implementation that an op was traced with."""
    with _support.using(op.implementation):
        return transpose_codes(data, order)


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
