"""Fp8DotGeneral, the `dot_general_cls` of Linen layers, Fp8Einsum and Fp8RaggedDot:
products that hold their own state.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .. import recipes
from ..dot import (
    DotGeneralCall,
    EinsumCall,
    RaggedDotCall,
    StatefulProduct,
    _frozen,
)
from ..numerics import E4M3, E5M2, HYBRID
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    DelayedScaling,
    DotGeneralState,
    Recipe,
)
from . import _mistakes

# The recipe of layers that name none.
DEFAULT_RECIPE = DelayedScaling()


class Fp8Module(StatefulProduct, nn.Module):
    """Base of modules that hold the state of one FP8 product; `Fp8DotGeneral` documents
    state and fields.
    """

    recipe: Any = None
    amax_history_length: int = 1024
    e4m3_dtype: Any = jnp.float8_e4m3fn
    e5m2_dtype: Any = jnp.float8_e5m2

    @nn.nowrap
    def _call_wrapped_method(self, fun, args, kwargs):
        _mistakes.refuse_unbound(self, fun)
        return super()._call_wrapped_method(fun, args, kwargs)

    @nn.nowrap
    def layer_path(self) -> tuple[str, ...]:
        """Get the path of the layer: the module that holds this product, unless the
        code named the product.
        """
        path = self.path
        is_unnamed = path[-1:] == (f"{type(self).__name__}_0",)
        return path[:-1] if is_unnamed else path

    @nn.nowrap
    def _layer_name(self, kernel: Any) -> str:
        """Get the path of the layer, for warnings and `inspect.compare`."""
        return "/".join(self.layer_path())

    @nn.nowrap
    def _current_recipe(self) -> Recipe | None:
        """Get the recipe, here in the program; None where `autocast` turned FP8 off."""
        return recipes.resolve(self.named_recipe(), DEFAULT_RECIPE)

    @nn.nowrap
    def _frozen_arrays(self) -> Mapping[str, jax.Array] | None:
        """Get the codes and scales that `jaxfp8.freeze` made, which are parameters of
        the product; None where it is not frozen.
        """
        is_frozen = self.has_variable("params", _frozen.KERNEL)
        return self.variables["params"] if is_frozen else None

    @nn.nowrap
    def _read_state(self, recipe: Recipe | None) -> DotGeneralState | None:
        """Read the state of the product; None without a recipe, where `autocast` turned
        FP8 off.

        With variables that have no state, for inference, scales come from the tensors
        at hand.

        Raises:
            ValueError: `init` cannot write the state; the model would silently train
                without state.
        """
        if recipe is None:
            return None
        names = recipes.variable_names(recipe)
        variables = self.variables.get(OVERWRITE_WITH_GRADIENT, {})
        missing = set(jax.tree.leaves(names)) - variables.keys()
        is_mutable = self.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
        if missing and not self.is_initializing():
            # A model that was initialized elsewhere may carry the state of another
            # library, which is not read here.
            _mistakes.warn_of_foreign_state(self.parent, self.layer_path())
        elif missing and not is_mutable:
            _mistakes.refuse_immutable_state(self, recipe)
        if missing and not is_mutable:
            return DotGeneralState(None, None, None)

        def variable(name, first):
            return self.variable(OVERWRITE_WITH_GRADIENT, name, lambda: first).value

        first = names
        if missing:
            first = recipes.init_state(recipe)
        return jax.tree.map(variable, names, first)

    @nn.nowrap
    def named_recipe(self) -> Any:
        """Get the recipe that the code names, by `recipe` or by Flax's fields; None
        where the code names no recipe.
        """
        if self.recipe is not None:
            return self.recipe
        dtypes = [jnp.dtype(self.e4m3_dtype), jnp.dtype(self.e5m2_dtype)]
        length = self.amax_history_length
        for fp8_format in (HYBRID, E4M3, E5M2):
            if [fp8_format.dtype, fp8_format.backward_dtype] == dtypes:
                default = DEFAULT_RECIPE.fp8_format, DEFAULT_RECIPE.amax_history_len
                if (fp8_format, length) == default:
                    return None
                return DelayedScaling(amax_history_len=length, fp8_format=fp8_format)
        raise ValueError(
            f"{type(self).__name__}: e4m3_dtype, e5m2_dtype: expected float8_e4m3fn "
            f"or float8_e5m2 forward and backward, got {dtypes[0].name} and "
            f"{dtypes[1].name}; use one of the two, or pass recipe="
        )


class Fp8DotGeneral(Fp8Module):
    """FP8 products for any Linen layer that takes a `dot_general_cls`; a plain swap for
    `nn.Fp8DotGeneral`.

        nn.Dense(features, dot_general_cls=jaxfp8.Fp8DotGeneral)
        nn.Dense(features, dot_general_cls=jaxfp8.make_dot_general_cls(recipe))

    State is in the collection `_overwrite_with_gradient`, under Flax's names: for each
    of `input`, `kernel` and `output_grad` an `{name}_amax_history` f32 `(H,)`, slot 0
    newest, and a `{name}_scale` f32 `(1,)`, `amax / FP8_MAX`. The gradient with respect
    to the collection is its next value; Flax's `TrainState` stores it. Applied to
    variables without the collection, the module takes its scales from the tensors at
    hand.

    Attributes:
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`,
            outside of it `DelayedScaling(amax_history_len=amax_history_length)` in the
            format that the two dtypes name.
        amax_history_length, e4m3_dtype, e5m2_dtype: the fields of Flax's class, for use
            without a recipe. A layer that sets one of these fields has a recipe of its
            own, which `jaxfp8.autocast` does not replace.

    Raises:
        TypeError: a layer was given an instance as its `dot_general_cls`.
        ValueError: no `jaxfp8.Format` has the forward `e4m3_dtype` and the backward
            `e5m2_dtype`; or `init` makes state inside an `nn.scan` or `nn.vmap` that
            does not carry the collection of state.
    """

    __call__ = nn.compact(DotGeneralCall.__call__)


class Fp8Einsum(Fp8Module):
    """An FP8 einsum of an input and a kernel; a plain swap for `nn.Fp8Einsum`.

        y = jaxfp8.linen.Fp8Einsum(recipe=recipe)("gecm,emh->gech", x, kernel)

    The first operand is always the input and the second always the kernel. Unlike
    Flax's class it does not round the input to the kernel's dtype: the result has
    `jnp.result_type(x, kernel)`, or `preferred_element_type`.

    State and fields are those of `Fp8DotGeneral`.
    """

    __call__ = nn.compact(EinsumCall.__call__)


class Fp8RaggedDot(Fp8Module):
    """An FP8 `ragged_dot`, with its state: the product of experts whose rows the code
    around it sorts; `Experts` is a whole layer.

        y = jaxfp8.linen.Fp8RaggedDot(recipe=recipe)(rows, kernel, group_sizes)

    State and fields are those of `Fp8DotGeneral`.
    """

    __call__ = nn.compact(RaggedDotCall.__call__)


def make_dot_general_cls(recipe: Recipe) -> Callable[..., Fp8DotGeneral]:
    """Return `Fp8DotGeneral` with a recipe, as a `dot_general_cls`; equal recipes give
    the same object.

        dot_general_cls = jaxfp8.make_dot_general_cls(jaxfp8.MXFP8BlockScaling())
        nn.Dense(features, dot_general_cls=dot_general_cls)

    An NNX layer takes an object instead:
    `dot_general=jaxfp8.nnx.Fp8DotGeneral(recipe)`.

    Raises:
        TypeError: `recipe` is not a Recipe.
    """
    return _cached_cls(recipes.checked("make_dot_general_cls: recipe", recipe))


@functools.cache
def _cached_cls(recipe):
    # One object for equal recipes: `partial` compares by identity, and layers are
    # compared when programs are cached.
    return functools.partial(Fp8DotGeneral, recipe=recipe)
