"""Training steps: the next state is stored exactly, out of the reach of optimizers, and checked on the way."""

from ._accumulate import accumulate_gradients as accumulate_gradients
from ._optimizer import apply_updates as apply_updates, optimizer as optimizer
from ._update import update_state as update_state
