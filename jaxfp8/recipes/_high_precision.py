"""HighPrecision: the recipe of a layer that is to have none."""

import dataclasses

from ._quantizer import Quantizer
from ._recipe import Recipe


@dataclasses.dataclass(frozen=True)
class HighPrecision(Recipe):
    """No FP8: a layer with this recipe computes as it would without one, whatever `autocast` says, and keeps no state.

    What a rule's None means (`jaxfp8.linen.quantize`), for layers whose own recipe None stands for the default.
    """

    def quantizers(self) -> tuple[Quantizer | None, ...]:
        """None, for each."""
        return (None,) * 3
