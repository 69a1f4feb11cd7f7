"""OverwriteWithGradient: the NNX variable whose gradient is its next value."""

from flax import nnx

from ..recipes import OVERWRITE_WITH_GRADIENT


class OverwriteWithGradient(nnx.Variable):
    """Quantizer state: one amax history f32 `(H,)` or one scale f32 `(1,)`. The forward pass only reads it.

    `nnx.bridge` translates these variables to Linen's collection `_overwrite_with_gradient`, and back.
    """


# Flax names the types that it makes for collections after them, and trainers (MaxText) look for that name.
OverwriteWithGradient.__name__ = OVERWRITE_WITH_GRADIENT
# overwrite: a Linen model that was bridged before this import has made a type of its own for the collection.
nnx.register_variable_name(OVERWRITE_WITH_GRADIENT, OverwriteWithGradient, overwrite=True)

# The filter of the variables that a training step changes: `nnx.DiffState(0, jaxfp8.nnx.trainable)`.
trainable = nnx.Any(nnx.Param, OverwriteWithGradient)
