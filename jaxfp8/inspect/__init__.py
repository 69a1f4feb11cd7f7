"""Diagnostics: list the products that do not run in FP8 and why, measure errors and
saturation, and read scales.

`_machine` has the parts of this machine and its active kernels, which
`python -m jaxfp8` prints.
"""

from ._compare import Comparison as Comparison, compare as compare
from ._count import Counts as Counts, count as count
from ._gemms import Gemms as Gemms, assert_fp8 as assert_fp8, gemms as gemms
from ._scalars import (
    Measured as Measured,
    measure as measure,
    plot as plot,
    scalars as scalars,
)
from ._summary import Summary as Summary, summary as summary
