"""FP8StateWarning, the category of warnings about FP8 state, and about FP8 that is not
there.
"""


class FP8StateWarning(UserWarning):
    """The category of warnings about FP8 state and FP8 that is not there.

    State is not updated or not read, or its mesh axes are not known; or rules reach no
    product.
    """
