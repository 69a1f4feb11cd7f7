"""Mixed precision: dtypes by operation, loss scaling for float16, and the search for
gradients that are not finite.
"""

from ._floats import (
    all_finite as all_finite,
    first_nonfinite as first_nonfinite,
    first_nonfinite_index as first_nonfinite_index,
    leaf_names as leaf_names,
    select as select,
)
from ._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    value_and_grad as value_and_grad,
)
from ._policy import Policy as Policy
