"""Fp8DotGeneral, the `dot_general_cls` of Linen layers, and Fp8Einsum: products that hold their own state."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from .. import recipes
from .._jax import _warnings
from ..dot import Activated, Normalized, _frozen, _wrapping, dot_general, einsum_by
from ..numerics import E4M3, E5M2, HYBRID
from ..recipes import OVERWRITE_WITH_GRADIENT, DelayedScaling, DotGeneralState, QTensor, Recipe

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

    @nn.nowrap
    def _call_wrapped_method(self, fun, args, kwargs):
        """Refuse the call of a product that no Linen module holds, as a layer of NNX makes it."""
        if self.scope is None and fun.__name__ == "__call__":
            name = type(self).__name__
            raise TypeError(
                f"{name}: expected a call from a Linen module, or by init or apply, got a call of an unbound product; "
                f"a layer of NNX takes dot_general=jaxfp8.nnx.{name}(recipe), and attention is changed by "
                "jaxfp8.quantize(model, rules) when it is made"
            )
        return super()._call_wrapped_method(fun, args, kwargs)

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

        def variable(name, first):
            if not self.has_variable(OVERWRITE_WITH_GRADIENT, name):
                missing.append(name)
                if not is_mutable:
                    return None
            return self.variable(OVERWRITE_WITH_GRADIENT, name, first).value

        # Ask for each variable of the recipe, and note those that are missing.
        state = recipes.map_variables(recipe, variable)
        if missing and self.is_initializing() and not is_mutable:
            raise ValueError(
                f"{'/'.join(self.path)}: {type(recipe).__name__} keeps state, and the collection "
                f"{OVERWRITE_WITH_GRADIENT!r} cannot be written here: treat it as the parameters. Where an "
                f"nn.scan broadcasts parameters, as nn.RNN does, pass variable_broadcast=('params', "
                f"{OVERWRITE_WITH_GRADIENT!r}); where an nn.scan or nn.vmap stacks them, add it to the variable_axes. "
                "Or add it to the mutable of init, or take a recipe without state"
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
                    recipes.FP8StateWarning,
                )
                return

    @nn.nowrap
    def named_recipe(self) -> Any:
        """Get the recipe that the code names, by `recipe` or by Flax's fields; None where the code names no recipe."""
        recipe = self._recipe_of_fields() if self.recipe is None else self.recipe
        return None if self.recipe is None and recipe == DelayedScaling() else recipe

    @nn.nowrap
    def _recipe(self):
        return recipes.resolve(self.named_recipe(), self._recipe_of_fields)

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


class Fp8DotGeneral(Fp8Module):
    """FP8 products for any Linen layer that takes a `dot_general_cls`; a plain swap for `nn.Fp8DotGeneral`.

        nn.Dense(features, dot_general_cls=jaxfp8.Fp8DotGeneral)
        nn.Dense(features, dot_general_cls=jaxfp8.make_dot_general_cls(recipe))

    State is in the collection `_overwrite_with_gradient`, under Flax's names: for each of `input`, `kernel` and
    `output_grad` an `{name}_amax_history` f32 `(H,)`, slot 0 newest, and a `{name}_scale` f32 `(1,)`,
    `amax / FP8_MAX`. The gradient with respect to the collection is its next value; Flax's `TrainState` stores it.
    Applied to variables without the collection, the module takes its scales from the tensors at hand.

    Attributes:
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`, outside of it
            `DelayedScaling(amax_history_len=amax_history_length)` in the format that the two dtypes name.
        amax_history_length, e4m3_dtype, e5m2_dtype: the fields of Flax's class, for use without a recipe. A layer that
            sets one of these fields has a recipe of its own, which `jaxfp8.autocast` does not replace.

    Raises:
        TypeError: a layer was given an instance as its `dot_general_cls`.
        ValueError: no `jaxfp8.Format` has the forward `e4m3_dtype` and the backward `e5m2_dtype`; or `init` makes state
            inside an `nn.scan` or `nn.vmap` that does not carry the collection of state.
    """

    def __post_init__(self) -> None:
        # Flax makes a module in a field a submodule named like the field. A layer calls its dot_general_cls without
        # arguments, for a product; an instance would take that call for a product without operands.
        if (self.name or "").endswith("dot_general_cls"):
            raise TypeError(
                f"{type(self.parent).__name__}: {self.name}: expected a class or a function that makes a product, got "
                f"an instance; pass {self.name}=jaxfp8.Fp8DotGeneral, or with a recipe "
                f"{self.name}=jaxfp8.make_dot_general_cls(recipe)"
            )
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: ArrayLike | Activated | Normalized,
        kernel: ArrayLike | QTensor,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
        *,
        bias: ArrayLike | None = None,
        activation: str | None = None,
    ) -> jax.Array:
        """Compute `jax.lax.dot_general` in FP8; see `jaxfp8.dot_general`."""
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        options |= {"bias": bias, "activation": activation}
        with self.naming():
            return self.product()(x, kernel, dimension_numbers, precision=precision, **options)


class Fp8Einsum(Fp8Module):
    """An FP8 einsum of an input and a kernel; a plain swap for `nn.Fp8Einsum`.

        y = jaxfp8.linen.Fp8Einsum(recipe=recipe)("gecm,emh->gech", x, kernel)

    The first operand is always the input and the second always the kernel. Unlike Flax's class it does not round the
    input to the kernel's dtype: the result has `jnp.result_type(x, kernel)`, or `preferred_element_type`.

    State and fields are those of `Fp8DotGeneral`.
    """

    @nn.compact
    def __call__(
        self,
        eqn: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Compute `jnp.einsum(eqn, lhs, rhs)` in FP8, `lhs` the input and `rhs` the kernel; see `jaxfp8.einsum`."""
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        with self.naming():
            return einsum_by(self.product(), eqn, lhs, rhs, precision=precision, **options)


def make_dot_general_cls(recipe: Recipe) -> Callable[..., Fp8DotGeneral]:
    """Return `Fp8DotGeneral` with a recipe, as a `dot_general_cls`; equal recipes give the same object.

        nn.Dense(features, dot_general_cls=jaxfp8.make_dot_general_cls(jaxfp8.MXFP8BlockScaling()))

    An NNX layer takes an object instead: `dot_general=jaxfp8.nnx.Fp8DotGeneral(recipe)`.

    Raises:
        TypeError: `recipe` is not a Recipe.
    """
    return _cached_cls(recipes.checked("make_dot_general_cls: recipe", recipe))


@functools.cache
def _cached_cls(recipe):
    # One object for equal recipes: `partial` compares by identity, and layers are compared when programs are cached.
    return functools.partial(Fp8DotGeneral, recipe=recipe)
