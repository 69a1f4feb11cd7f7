"""Equinox's linear layers in FP8. Import this file, or copy it into your program."""

import equinox as eqx
import jax

import jaxfp8

CONTRACT = (((0,), (1,)), ((), ()))  # x[in] with weight[out, in]


class Fp8Linear(eqx.Module):
    """`eqx.nn.Linear` with a product in FP8.

    Call it with one vector, as Equinox's. Under `jax.vmap` it is one product of the
    whole batch, with one amax. The gradient of `state` is the next state.
    """

    weight: jax.Array  # [out, in]
    bias: jax.Array | None
    state: jaxfp8.DotGeneralState
    recipe: jaxfp8.recipes.Recipe = eqx.field(static=True)

    def __call__(self, x, *, key=None):
        y = jaxfp8.dot_general(
            x, self.weight, CONTRACT, recipe=self.recipe, state=self.state
        )
        return y if self.bias is None else y + self.bias


def quantized(model, recipe):
    """Return a copy of `model` in which each `eqx.nn.Linear` is an `Fp8Linear`.

    The copy has the weights of `model` and empty state. Layers with
    `in_features="scalar"` stay as they are. To convert a part of a model, pass
    `quantized` to `eqx.tree_at` as `replace_fn`.
    """

    def is_linear(node):
        return isinstance(node, eqx.nn.Linear)

    def convert(node):
        if not is_linear(node) or "scalar" in (node.in_features, node.out_features):
            return node
        state = jaxfp8.init_state(recipe)
        return Fp8Linear(node.weight, node.bias, state, recipe)

    return jax.tree.map(convert, model, is_leaf=is_linear)
