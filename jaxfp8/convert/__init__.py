"""State from and for other libraries, and state that has to fit a changed model. Plain functions on variable trees."""

from . import _serialization as _serialization
from ._fit import merge_state as merge_state, reset_state as reset_state, resize_history as resize_history
from ._flax import from_flax as from_flax, to_flax as to_flax
from ._transformer_engine import (
    from_transformer_engine as from_transformer_engine,
    to_transformer_engine as to_transformer_engine,
)
