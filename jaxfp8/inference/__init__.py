"""Inference: `calibrate` fills histories without training, `freeze` leaves FP8 codes
and fixed scales.
"""

from ._calibrate import calibrate, freeze

__all__ = ["calibrate", "freeze"]
