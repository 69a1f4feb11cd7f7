"""The warning about FP8 state."""


class FP8StateWarning(UserWarning):
    """The category of warnings about FP8 state that is not updated or not read, or whose mesh axes are not known."""
