"""GradScaler in numpy, as its users know it: one f32 factor and a counter of good
steps. The oracle of loss scaling.
"""

import dataclasses

import numpy as np

LARGEST, SMALLEST = np.float32(2.0**126), np.float32(2.0**-126)


@dataclasses.dataclass
class GradScaler:
    """`found_inf` halves at once; `interval` steps in a row without it double."""

    scale: np.float32 = np.float32(65536)
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.scale = max(
                np.float32(self.scale * np.float32(self.backoff_factor)), SMALLEST
            )
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            with np.errstate(over="ignore"):
                self.scale = min(
                    np.float32(self.scale * np.float32(self.growth_factor)), LARGEST
                )
            self.growth_tracker = 0

    def unscale(self, gradient: np.ndarray) -> np.ndarray:
        """One multiplication in f32 by the inverse, which is rounded once."""
        inverse = np.float32(1 / np.float64(self.scale))
        with np.errstate(invalid="ignore", over="ignore"):
            return gradient.astype(np.float32) * inverse
