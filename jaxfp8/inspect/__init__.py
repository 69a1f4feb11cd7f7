"""Diagnostics: list the products that do not run in FP8 and why, measure errors and
saturation, and read scales.

`_machine` has the parts of this machine and its active kernels, which
`python -m jaxfp8` prints.
"""

from ._compare import Comparison, compare
from ._count import Counts, count
from ._gemms import Gemms, assert_fp8, gemms
from ._report import Report
from ._scalars import Measured, measure, plot, scalars
from ._summary import Summary, summary

__all__ = [
    "Comparison",
    "Counts",
    "Gemms",
    "Measured",
    "Report",
    "Summary",
    "assert_fp8",
    "compare",
    "count",
    "gemms",
    "measure",
    "plot",
    "scalars",
    "summary",
]
