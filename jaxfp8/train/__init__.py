"""Carry state from step to step: uses combine by max, optimizers do not see state,
`update_state` checks and stores.
"""

from ._average import average
from ._optimizer import AppliedTransformation, apply_updates, optimizer
from ._quantize_params import quantize_params
from ._sharing import (
    apply_with_max_grad,
    fork,
    grad,
    max_grad,
    named_errors,
    spread,
    value_and_grad,
    without_value,
)
from ._stacked_state import StackedState, stack_state, unstack_state
from ._steps import accumulate_gradients
from ._update import expect_state, update_state

__all__ = [
    "AppliedTransformation",
    "accumulate_gradients",
    "apply_updates",
    "average",
    "fork",
    "optimizer",
    "spread",
    "stack_state",
    "unstack_state",
    "update_state",
]
