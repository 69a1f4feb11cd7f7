"""Fixed scales: of a tensor in inference, whose scale was found before."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._quantizer import alone
from ._tensorwise import TensorwiseQuantizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedScale:
    """A scale that stays; both f32 `(1,)`. It has its inverse beside it, as 1 / (1 / scale) may be another number."""

    scale: jax.Array
    scale_inv: jax.Array


@dataclasses.dataclass(frozen=True)
class FixedScaleQuantizer(TensorwiseQuantizer):
    """Quantizes with the `FixedScale` that is its state, which is never updated.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
    """

    fp8_dtype: np.dtype

    def check_state(self, name: str, state: Any) -> None:
        """As `Quantizer.check_state`."""
        if not isinstance(state, FixedScale):
            raise TypeError(f"{name}: expected a FixedScale, got {state!r}")

    def scale(
        self, current: Callable[[], jax.Array], run: FixedScale, reduce: Callable[..., jax.Array] = alone
    ) -> tuple[jax.Array, jax.Array, None]:
        """As `TensorwiseQuantizer.scale`."""
        del current, reduce
        return run.scale, run.scale_inv, None

    def seen(
        self, run: Any, scale: jax.Array, scale_inv: jax.Array, amax: None, fractions: jax.Array | None = None
    ) -> None:
        """As `TensorwiseQuantizer.seen`: nothing was, so that the state has no cotangent."""
        del run, scale, scale_inv, amax, fractions
