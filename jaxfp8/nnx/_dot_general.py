"""Fp8DotGeneral, Fp8Einsum and Fp8RaggedDot for NNX layers, and the variables of their
state, whose gradient is the next value.
"""

import contextlib
import contextvars

import jax
import numpy as np
from flax import nnx

from ..dot import (
    DotGeneralCall,
    EinsumCall,
    RaggedDotCall,
    StatefulProduct,
    _contexts,
)
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    DelayedScaling,
    DotGeneralState,
    HighPrecision,
    NamedLayers,
    Recipe,
    init_state,
    resolve,
    variable_names,
)
from . import _mistakes

# The paths of the modules by id, while a gradient is taken: an NNX module does not
# know its own path.
_paths = contextvars.ContextVar("paths", default=None)


@contextlib.contextmanager
def paths_in(trees: tuple):
    """Name the modules in `trees`, products by their layers, for warnings, while the
    context lasts.
    """
    paths = {}
    for path, module in nnx.iter_modules(trees):
        # a product that the code named has its own path
        end = -1 if path[-1] in PRODUCTS else None
        paths[id(module)] = "/".join(map(str, path[1:end]))
    token = _paths.set(paths)
    try:
        yield
    finally:
        _paths.reset(token)


class _Fp8Product(StatefulProduct, nnx.Module):
    """The state of one product: for each operand `{name}_amax_history` and
    `{name}_scale`, as Linen names them.

    Attributes:
        named_layers: the layers that run together by the rule that made the product.
    """

    named_layers: NamedLayers | None = None

    def __init__(self, recipe: Recipe | None = None):
        _mistakes.refuse_inside_a_call(type(self).__name__)
        self.names_recipe = recipe is not None
        self.recipe = resolve(recipe, DelayedScaling()) or HighPrecision()

        def create(name, first):
            setattr(self, name, OverwriteWithGradient(first))

        names = variable_names(self.recipe)
        jax.tree.map(create, names, init_state(self.recipe))

    def _layer_name(self, kernel) -> str:
        """Get the path of the layer, for warnings; its kernel where the path is
        unknown.
        """
        _mistakes.refuse_linen_layer(type(self).__name__)
        path = _contexts.current_layer()
        if path is None:
            path = path_of(self)
        if path is None:
            return f"{type(self).__name__} with a kernel {list(np.shape(kernel))}"
        return path

    # The names have an underscore because nnx.tabulate traces each public method of a
    # module that runs.

    def _current_recipe(self) -> Recipe | None:
        """Get the recipe, here in the program; None where `autocast` turned FP8 off."""
        return resolve(self.recipe if self.names_recipe else None, self.recipe)

    def _frozen_arrays(self) -> dict[str, jax.Array] | None:
        """Get the codes and scales that `jaxfp8.freeze` made; None where the product is
        not frozen.
        """
        arrays = {}
        for name, value in vars(self).items():
            if isinstance(value, nnx.Param):
                arrays[name] = value.get_value()
        return arrays or None

    def _read_state(self, recipe: Recipe | None) -> DotGeneralState | None:
        """Read the state of the product; None without a recipe, where `autocast` turned
        FP8 off.
        """
        if recipe is None:
            return None

        def read(name):
            if not hasattr(self, name):
                raise ValueError(
                    f"{type(self).__name__}: {recipe!r} has state {name!r}, which this "
                    f"layer lacks: the layer was made for {self.recipe!r}; make the "
                    "model in the region of jaxfp8.autocast that it is used in, or "
                    "change its recipe with jaxfp8.nnx.quantize"
                )
            return getattr(self, name).get_value()

        return jax.tree.map(read, variable_names(recipe))


def path_of(module: nnx.Module) -> str | None:
    """Return the path of a module, or of the layer of a product, while a gradient is
    taken; else None.
    """
    return (_paths.get() or {}).get(id(module))


class Fp8DotGeneral(_Fp8Product):
    """FP8 products for any NNX layer that takes a `dot_general`.

        nnx.Linear(64, 256, dot_general=jaxfp8.nnx.Fp8DotGeneral(recipe), rngs=rngs)
        nnx.MultiHeadAttention(
            ...,
            qkv_dot_general=Fp8DotGeneral(),
            out_dot_general=Fp8DotGeneral(),
            rngs=rngs,
        )

    An instance holds the state of one product. Layers that share an instance share its
    scales: each amax is the maximum over all these layers. Pass an instance as
    `dot_general`, not the class as `dot_general_cls`: NNX calls a `dot_general_cls`
    anew in every forward pass, so that its state would be lost. The state is in
    `OverwriteWithGradient` variables, which the forward pass only reads and the
    training step overwrites with their gradients (`jaxfp8.nnx.update_state`).

    Args:
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`,
            outside of it `jaxfp8.DelayedScaling()`. The constructor makes state for the
            recipe that holds where it is called.

    Raises:
        TypeError: a layer makes the object in its forward pass (`dot_general_cls=`), or
            a layer was given the class. When called: a Linen layer was given the
            object.
        ValueError: when called, in another region of `jaxfp8.autocast`, whose recipe
            has state that the object lacks.
    """

    __call__ = DotGeneralCall.__call__


class Fp8Einsum(_Fp8Product):
    """FP8 products for `nnx.Einsum`, and for any code that calls an einsum of two
    operands.

        einsum_op = jaxfp8.nnx.Fp8Einsum(recipe)
        nnx.Einsum("bld,dhk->blhk", (64, 4, 16), einsum_op=einsum_op, rngs=rngs)

    State, arguments and errors are those of `Fp8DotGeneral`.
    """

    __call__ = EinsumCall.__call__


class Fp8RaggedDot(_Fp8Product):
    """An FP8 `ragged_dot`, with its state: the product of experts whose rows the code
    around it sorts; `Experts` is a whole layer.

        self.ragged_dot = jaxfp8.nnx.Fp8RaggedDot(recipe)
        y = self.ragged_dot(rows, kernel, group_sizes)

    State, arguments and errors are those of `Fp8DotGeneral`.
    """

    __call__ = RaggedDotCall.__call__


# The product of a layer, by the attribute that holds it.
PRODUCTS = {
    "dot_general": Fp8DotGeneral,
    "einsum_op": Fp8Einsum,
    "ragged_dot": Fp8RaggedDot,
}


class OverwriteWithGradient(nnx.Variable):
    """Quantizer state: one amax history f32 `(H,)` or one scale f32 `(1,)`. The forward
    pass only reads it.

    `nnx.bridge` translates these variables to Linen's collection
    `_overwrite_with_gradient`, and back.
    """


# Flax names the types that it makes for collections after them, and trainers (MaxText)
# look for that name.
OverwriteWithGradient.__name__ = OVERWRITE_WITH_GRADIENT
# overwrite: a Linen model that was bridged before this import has made a type of its
# own for the collection.
nnx.register_variable_name(
    OVERWRITE_WITH_GRADIENT, OverwriteWithGradient, overwrite=True
)

# The filter of the variables that a training step changes:
# `nnx.DiffState(0, jaxfp8.nnx.trainable)`.
trainable = nnx.Any(nnx.Param, OverwriteWithGradient)
