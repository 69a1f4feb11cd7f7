"""Convert state and weights from and for other libraries, and fit state to a changed
model.
"""

from . import _tree as _tree
from ._fit import (
    merge_state as merge_state,
    reset_state as reset_state,
    resize_history as resize_history,
)
from ._flax import from_flax as from_flax, to_flax as to_flax
from ._from_safetensors import from_safetensors as from_safetensors
from ._qtensor import (
    from_qarray as from_qarray,
    from_scaled_matmul as from_scaled_matmul,
    to_qarray as to_qarray,
    to_scaled_matmul as to_scaled_matmul,
)
from ._read_safetensors import (
    StoredTensor as StoredTensor,
    read_safetensors as read_safetensors,
)
from ._to_safetensors import to_safetensors as to_safetensors
