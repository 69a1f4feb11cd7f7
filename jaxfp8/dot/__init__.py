"""One FP8 product: dot_general, einsum, ragged_dot; the primitive; fprop, dgrad and
wgrad; fused inputs.
"""

from ._autodiff import vmapped_state, warn_of_state
from ._calls import DotGeneralCall, EinsumCall, RaggedDotCall, StatefulProduct
from ._compute_dtype import (
    gated_activation,
    linear,
    norm_of_layer,
    promoted,
    sizes,
)
from ._dot_general import checked_quantizers, dot_general
from ._einsum import einsum
from ._experts import (
    Route,
    columns,
    is_expert,
    mixture,
    sorted_by_expert,
    taken,
)
from ._fused_input import (
    Activated,
    FusedInput,
    Normalized,
    activated,
    as_read_residual,
    as_residual,
    normalized,
)
from ._layers_by_rule import LayersCall, Parameters, dense_layers, gated_layers
from ._ragged_dot import ragged_dot
