"""haliax's linear layers in FP8. Import this file, or copy it into your program."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax

import jaxfp8


class Fp8DotGeneral(hax.quantization.OverwriteWithGradient):
    """The field `dot_general` of a `hax.nn.Linear`: its product runs in FP8.

    The gradient of `state` is the next state.
    """

    state: jaxfp8.DotGeneralState
    recipe: jaxfp8.recipes.Recipe = eqx.field(static=True)

    def __call__(
        self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None
    ):
        return jaxfp8.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            preferred_element_type=preferred_element_type,
            recipe=self.recipe,
            state=self.state,
        )


def quantized(model, recipe):
    """Return a copy of `model` in which each `hax.nn.Linear` multiplies in FP8.

    The copy has the weights of `model` and empty state. Layers of a `hax.nn.Stacked`
    have a state each.
    """

    def is_layer(node):
        return isinstance(node, (hax.nn.Linear, hax.nn.Stacked))

    def convert(node):
        if isinstance(node, hax.nn.Stacked):
            blocks = hax.vmap(quantized, node.Block)(node.stacked, recipe)
            return dataclasses.replace(node, stacked=blocks)
        if isinstance(node, hax.nn.Linear):
            product = Fp8DotGeneral(jaxfp8.init_state(recipe), recipe)
            return dataclasses.replace(node, dot_general=product)
        return node

    return jax.tree.map(convert, model, is_leaf=is_layer)
