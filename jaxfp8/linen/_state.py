"""Fp8Module: the base of Linen modules with FP8 state, with Flax's fields, a recipe and the state of one product."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import linen as nn

from .._jax import _warnings
from ..dot import _frozen, _wrapping, dot_general
from ..numerics import E4M3, E5M2, HYBRID
from ..recipes import OVERWRITE_WITH_GRADIENT, DelayedScaling, DotGeneralState, FP8StateWarning, map_variables, resolve

# The beginnings of names of modules and collections with state of other libraries, by the function that converts it.
_CONVERTERS = {
    "from_flax": ("Fp8DirectDotGeneralOp_", "Fp8DotGeneralOp_"),
    "from_transformer_engine": ("TEWrapper_dot_general_", "fp8_metas"),
}


class Fp8Module(nn.Module):
    """Base of modules that hold the state of one FP8 product; `Fp8DotGeneral` documents state and fields."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse the call of a layer that has the class in its field `dot_general`, and calls it as a product."""
        if "precision" in kwargs:
            raise TypeError(
                f"{cls.__name__}: a layer was given the class as its product; pass it as dot_general_cls to a layer of "
                f"Linen, and to a layer of NNX an instance of jaxfp8.nnx.{cls.__name__}"
            )
        return super().__new__(cls)

    recipe: Any = None
    amax_history_length: int = 1024
    e4m3_dtype: Any = jnp.float8_e4m3fn
    e5m2_dtype: Any = jnp.float8_e5m2

    @nn.nowrap
    def layer_path(self) -> tuple[str, ...]:
        """Get the path of the layer: the module that holds this product, unless the code named the product."""
        path = self.path
        return path[:-1] if path and path[-1] == f"{type(self).__name__}_0" else path

    @nn.nowrap
    def naming(self) -> contextlib.AbstractContextManager:
        """Return a context in which the product has the path of its layer, for warnings and `inspect.compare`."""
        return _wrapping.layer("/".join(self.layer_path()))

    @nn.nowrap
    def product(self) -> Callable[..., jax.Array]:
        """Bind `jaxfp8.dot_general` to this module's recipe and state, or to the codes that `jaxfp8.freeze` made."""
        codes = None
        if self.has_variable("params", _frozen.KERNEL):
            codes = {name: self.get_variable("params", name) for name in self.variables["params"]}
        if codes is None or _frozen.is_freezing():
            keywords = self.recipe_and_state()
        if codes is None:
            product = functools.partial(dot_general, **keywords)
        else:
            product = functools.partial(_frozen.dot_general, frozen=codes, recipe=self._recipe())
        return functools.partial(self._freeze, product, codes, keywords) if _frozen.is_freezing() else product

    @nn.nowrap
    def _freeze(self, product, codes, keywords, x, kernel, dimension_numbers, **options) -> jax.Array:
        """Multiply, and store the codes of the kernel; a later call stores whether it has another kernel."""
        if keywords["recipe"] is None:
            frozen = {}
        elif codes is None:
            frozen = _frozen.freeze_operands(x.shape, kernel, dimension_numbers, **keywords) or {}
        else:
            differs = _frozen.is_another(codes, x.shape, kernel, dimension_numbers, **keywords)
            frozen = {_frozen.HAS_ANOTHER: differs | codes.get(_frozen.HAS_ANOTHER, False)}
        for name, leaf in frozen.items():
            self.put_variable("params", name, leaf)
        return product(x, kernel, dimension_numbers, **options)

    @nn.nowrap
    def recipe_and_state(self) -> dict[str, Any]:
        """Get the keywords `recipe` and `state` of the product; `recipe` is None where `autocast` turned FP8 off.

        With variables that have no state, for inference, scales come from the tensors at hand.

        Raises:
            ValueError: `init` cannot write the state; the model would silently train without state.
        """
        recipe = self._recipe()
        if recipe is None:
            return {"recipe": None, "state": None}
        missing, is_mutable = [], self.is_mutable_collection(OVERWRITE_WITH_GRADIENT)

        def variable(name, leaf):
            if not self.has_variable(OVERWRITE_WITH_GRADIENT, name):
                missing.append(name)
                if not is_mutable:
                    return leaf
            return self.variable(OVERWRITE_WITH_GRADIENT, name, lambda: leaf).value

        # Ask for each variable of the recipe, and note those that are missing.
        state = map_variables(recipe, variable, lambda name: self.has_variable(OVERWRITE_WITH_GRADIENT, name))
        if missing and self.is_initializing() and not is_mutable:
            raise ValueError(
                f"{'/'.join(self.path)}: {type(recipe).__name__} keeps state, and the collection "
                f"{OVERWRITE_WITH_GRADIENT!r} cannot be written here: add it to the variable_axes of the nn.scan or "
                f"nn.vmap around it, or to the mutable of init, or take a recipe without state"
            )
        # A model that was initialized elsewhere may carry the state of another library, which is not read here.
        if missing and not self.is_initializing():
            self._warn_of_foreign_state()
        return {"recipe": recipe, "state": DotGeneralState(None, None, None) if missing and not is_mutable else state}

    @nn.nowrap
    def _warn_of_foreign_state(self) -> None:
        """Warn where the layer has the state of another library's product, which this product does not read."""
        collections = getattr(self.parent, "variables", {})
        for name in (*collections.get(OVERWRITE_WITH_GRADIENT, {}), *set(collections) - {"params"}):
            converter = next((to for to, prefixes in _CONVERTERS.items() if name.startswith(prefixes)), None)
            if converter is not None:
                _warnings.warn(
                    f"{'/'.join(self.layer_path())}: the variables have state {name!r} of another library, which this "
                    f"layer does not read; convert them once: variables = jaxfp8.convert.{converter}(variables)",
                    FP8StateWarning,
                )
                return

    @nn.nowrap
    def named_recipe(self) -> Any:
        """Get the recipe that the code names, by `recipe` or by Flax's fields; None where the code names no recipe."""
        recipe = self._recipe_of_fields() if self.recipe is None else self.recipe
        return None if self.recipe is None and recipe == DelayedScaling() else recipe

    @nn.nowrap
    def _recipe(self):
        return resolve(self.named_recipe(), self._recipe_of_fields)

    @nn.nowrap
    def _recipe_of_fields(self) -> DelayedScaling:
        dtypes = [jnp.dtype(self.e4m3_dtype), jnp.dtype(self.e5m2_dtype)]
        for fp8_format in (HYBRID, E4M3, E5M2):
            if [fp8_format.dtype, fp8_format.backward_dtype] == dtypes:
                return DelayedScaling(amax_history_len=self.amax_history_length, fp8_format=fp8_format)
        raise ValueError(
            f"{type(self).__name__}: e4m3_dtype, e5m2_dtype: expected float8_e4m3fn or float8_e5m2 forward and "
            f"backward, got {dtypes[0].name} and {dtypes[1].name}; use one of the two, or pass recipe="
        )
