"""Keras's Dense layer in FP8, for the backend JAX. Import this file, or copy it."""

import keras

import jaxfp8


class Fp8Dense(keras.layers.Dense):
    """`keras.layers.Dense` with a product in FP8, of the recipe `DelayedScaling`.

    The state is in weights that Keras's optimizers overwrite with their gradient.
    """

    def __init__(self, units, recipe=None, **arguments):
        super().__init__(units, **arguments)
        self.recipe = recipe or jaxfp8.DelayedScaling()

    def build(self, input_shape):
        super().build(input_shape)
        shapes = {"amax_history": (self.recipe.amax_history_len,), "scale": (1,)}
        self.state = {
            f"{role}_{part}": self.add_weight(
                name=f"{role}_{part}",
                shape=shape,
                dtype="float32",
                initializer="zeros" if part == "amax_history" else "ones",
                overwrite_with_gradient=True,
                autocast=False,
            )
            for role in ("input", "kernel", "output_grad")
            for part, shape in shapes.items()
        }

    def call(self, inputs, training=None):
        quantizers = (
            jaxfp8.recipes.QuantizerState(
                self.state[f"{role}_amax_history"].value,
                self.state[f"{role}_scale"].value,
            )
            for role in ("input", "kernel", "output_grad")
        )
        y = jaxfp8.dot_general(
            inputs,
            keras.ops.convert_to_tensor(self.kernel),
            (((inputs.ndim - 1,), (0,)), ((), ())),
            recipe=self.recipe,
            state=jaxfp8.DotGeneralState(*quantizers),
        )
        if self.bias is not None:
            y = y + keras.ops.convert_to_tensor(self.bias)
        return y if self.activation is None else self.activation(y)
