"""Fixed scales, for tensors in inference whose scale was found before."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._quantizer import no_reduction
from ._tensorwise import TensorwiseQuantizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedScale:
    """A scale that no step updates, and its inverse; both f32 `(1,)`.

    The inverse is stored because 1 / (1 / scale) may be another number than the scale.
    """

    scale: jax.Array
    scale_inv: jax.Array


@dataclasses.dataclass(frozen=True)
class FixedScaleQuantizer(TensorwiseQuantizer):
    """Quantize with the `FixedScale` that is the state, which no step updates.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
    """

    fp8_dtype: np.dtype
    updates_state = False

    def check_state(self, name: str, state: Any) -> None:
        """Raise a TypeError unless `state` is a FixedScale; `name` names the argument in the message."""
        if not isinstance(state, FixedScale):
            raise TypeError(f"{name}: expected a FixedScale, got {state!r}")

    def choose_scale(
        self, current_amax: Callable[[], jax.Array], step: FixedScale, reduce: Callable[..., Any] = no_reduction
    ) -> tuple[jax.Array, jax.Array, None]:
        """Return `(scale, scale_inv, None)` of the state."""
        return step.scale, step.scale_inv, None

    def record(self, step: Any, scale_inv: jax.Array, amax: None, fractions: jax.Array | None = None) -> None:
        """Record nothing, so that the state has no cotangent."""
