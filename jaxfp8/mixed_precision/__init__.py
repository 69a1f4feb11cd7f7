"""Mixed precision: dtypes by operation, loss scaling for float16, and the search for
gradients that are not finite.
"""

from ._floats import all_finite, first_nonfinite, select
from ._loss_scale import DynamicLossScale, value_and_grad
from ._policy import Policy

__all__ = [
    "DynamicLossScale",
    "Policy",
    "all_finite",
    "first_nonfinite",
    "select",
    "value_and_grad",
]
