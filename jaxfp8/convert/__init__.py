"""Convert models to FP8 by rules, state and weights from and for other libraries, and
fit state to a changed model.
"""

from ._fit import merge_state, reset_state, resize_history
from ._flax import from_flax, to_flax
from ._from_safetensors import from_safetensors
from ._read_safetensors import StoredTensor, read_safetensors
from ._to_safetensors import to_safetensors

__all__ = [
    "StoredTensor",
    "from_flax",
    "from_safetensors",
    "merge_state",
    "read_safetensors",
    "reset_state",
    "resize_history",
    "to_flax",
    "to_safetensors",
]
