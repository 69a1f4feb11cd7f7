"""The warning about FP8 state."""


class FP8StateWarning(UserWarning):
    """FP8 state that this gradient can never update, or of which a program hides what it belongs to."""
