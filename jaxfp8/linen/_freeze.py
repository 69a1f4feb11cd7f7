"""`jaxfp8.freeze` for the variables of a Linen model: its products put their codes
beside the parameters.

The model runs once, for the codes alone. Each product gets its kernel in the compute
dtype of its layer, and stores the arrays that `_frozen` makes of the kernel as
parameters of its own, so that a scan stacks them like kernels. Parameters that codes
were made of, and that nothing else reads, are then replaced by placeholders.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import core, linen as nn, struct, traverse_util
from flax.core import meta
from jax.interpreters import partial_eval

from .._jax._trees import split_arrays
from ..dot import _contexts, _frozen
from ..recipes import OVERWRITE_WITH_GRADIENT
from ..train import unstack_state
from . import _mistakes
from ._quantize_by_rules import decision


@struct.dataclass
class FrozenKernel(_frozen.Placeholder, meta.AxisMetadata):
    """Placeholder for a kernel whose codes are in its product: shape and dtype, no
    array.

    Layers get NaNs in place of the kernel. Their product does not read the NaNs, so
    compiled programs do not hold them.

    Attributes:
        shape: the shape of the kernel.
        dtype: the name of the kernel's dtype.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)

    def unbox(self):
        """Return NaNs of this shape and dtype.

        Raises:
            ValueError: a layer of Flax without an FP8 product reads the kernel.
        """
        layer = nn.module._context.module_stack[-1]  # no public name tells it
        if layer is not None:
            decided = decision(layer)
            has_rule = decided is not None and decided.rule.recipe is not None
            _mistakes.refuse_frozen_kernel(layer, has_rule)
        return self.get_value()

    def replace_boxed(self, val):
        """Return `val`: the box holds nothing."""
        return val

    def add_axis(self, index: int, params):
        """Insert an axis, for a transform that stacks kernels."""
        shape = list(self.shape)
        shape.insert(index, params.get("axis_size", 1))
        return self.replace(shape=tuple(shape))

    def remove_axis(self, index: int, params):
        """Remove an axis, for a transform that takes a slice of stacked kernels."""
        shape = list(self.shape)
        shape.pop(index)
        return self.replace(shape=tuple(shape))


def _shape_and_dtype_from_bytes(text) -> tuple:
    shape, dtype = json.loads(text)
    return tuple(shape), dtype


jax.export.register_pytree_node_serialization(
    FrozenKernel,
    serialized_name="jaxfp8.FrozenKernel",
    serialize_auxdata=lambda shape_and_dtype: json.dumps(shape_and_dtype).encode(),
    deserialize_auxdata=_shape_and_dtype_from_bytes,
)


# Name of the flag that a product, while it is being frozen, was called with a second
# kernel.
_HAS_ANOTHER = "has_another_kernel"


def _store_codes(product, x, kernel, dimension_numbers) -> None:
    """Store the codes of the kernel in a product that is called; where it has some,
    whether it gets another kernel now.
    """
    recipe, frozen = product._current_recipe(), product._frozen_arrays()
    if recipe is None:
        return
    if frozen is not None:
        recipe = dataclasses.replace(recipe, min_size=0)
    state = product._read_state(recipe)
    operands = x.shape, kernel, dimension_numbers
    new = _frozen.freeze_operands(*operands, recipe, state) or {}
    if new and frozen is not None:
        has_another = frozen.get(_HAS_ANOTHER, False)
        for name in (_frozen.KERNEL, _frozen.KERNEL_SCALE_INV):
            if frozen[name].shape != new[name].shape:
                raise _several_kernels(product.path)
            has_another |= ~jnp.array_equal(frozen[name], new[name], equal_nan=True)
        new = {_HAS_ANOTHER: has_another}
    for name, leaf in new.items():
        product.put_variable("params", name, leaf)


def freeze(model: nn.Module, variables, args, kwargs):
    """Freeze `variables`; see `jaxfp8.freeze`."""
    tree = core.unfreeze(unstack_state(variables))
    if "params" not in tree:
        raise ValueError(
            f"freeze: variables: expected a collection 'params', got {sorted(tree)}"
        )
    # by path, which begins with the collection
    variables = traverse_util.flatten_dict(tree)
    mutable = kwargs.pop("mutable", False)
    arrays, joined = split_arrays((args, kwargs))
    # codes that depend on their values are left out, and jax.ShapeDtypeStruct has none
    arrays = list(map(jnp.zeros_like, arrays))

    def apply(variables, arrays, mutable=mutable):
        args, kwargs = joined(arrays)
        tree = traverse_util.unflatten_dict(variables)
        return model.apply(tree, *args, mutable=mutable, **kwargs)

    def results(variables, arrays):
        return split_arrays(apply(variables, arrays))[0]

    def with_codes(variables, arrays):
        written = core.scope.union_filters(mutable, "params")
        with _contexts.observed_by(_store_codes):
            _, changed = apply(variables, arrays, written)
        leaves = traverse_util.flatten_dict({"params": changed["params"]})
        return {path: leaf for path, leaf in leaves.items() if path not in variables}

    # 1. Make the codes, and find the variables that they are made of.
    codes, quantized = _codes(with_codes, variables, arrays)
    # 2. Refuse products with several kernels, and those without an amax.
    codes = _without_flags(codes)
    if not codes:
        raise _frozen.nothing_to_freeze()
    products, dropped = {path[1:-1] for path in codes}, {}
    for path in list(variables):
        if path[0] == OVERWRITE_WITH_GRADIENT and path[1:-1] in products:
            dropped[path[1:]] = variables.pop(path)
    _frozen.refuse_untouched(traverse_util.unflatten_dict(dropped))
    # 3. Take away the parameters that nothing but their codes reads.
    frozen = variables | codes
    program = jax.make_jaxpr(results)(frozen, arrays).jaxpr
    read, _ = _read(program, frozen, arrays, [True] * len(program.outvars))
    for path in quantized - read:
        if path[0] == "params":
            (kernel,) = jax.tree.leaves(variables[path])  # it may be in a box
            frozen[path] = FrozenKernel(tuple(kernel.shape), kernel.dtype.name)
    return traverse_util.unflatten_dict(frozen)


def _without_flags(codes: dict[tuple, jax.Array]) -> dict[tuple, jax.Array]:
    """Return the codes of products that were called with one kernel.

    Raises:
        ValueError: a product was called with another kernel as well.
    """
    kept = {path: leaf for path, leaf in codes.items() if path[-1] != _HAS_ANOTHER}
    for path in kept:
        differs = codes.get((*path[:-1], _HAS_ANOTHER), False)
        if not isinstance(differs, jax.core.Tracer) and np.any(np.asarray(differs)):
            raise _several_kernels(path[1:-1])
    return kept


def _several_kernels(product: tuple[str, ...]) -> ValueError:
    return ValueError(
        "freeze: model: expected one kernel for each FP8 product, got a product with "
        f"several kernels: {'/'.join(product)}; give each kernel a product of its own"
    )


def _codes(with_codes, variables, arrays) -> tuple[dict[tuple, jax.Array], set]:
    """Make the codes of products, and find the variables that they are made of. A
    product whose kernel depends on `arrays`, as in attention, is left out.
    """
    program = jax.make_jaxpr(with_codes)(variables, arrays).jaxpr
    codes = jax.jit(with_codes)(variables, arrays)
    paths, quantized = sorted(codes), set()
    for product in {path[:-1] for path in paths}:
        of_product = [path[:-1] == product for path in paths]
        read, reads_arrays = _read(program, variables, arrays, of_product)
        if reads_arrays:
            codes = {path: codes[path] for path in codes if path[:-1] != product}
        else:
            quantized |= read
    return codes, quantized


def _read(program, variables, arrays, outputs: list[bool]) -> tuple[set, bool]:
    """Return the paths of the variables that some outputs of a program depend on, and
    whether they depend on `arrays`.
    """
    _, used = partial_eval.dce_jaxpr(program, outputs)
    structure = jax.tree.structure((variables, arrays))
    variables, arrays = structure.unflatten(used)
    read = {path for path, leaves in variables.items() if any(jax.tree.leaves(leaves))}
    return read, any(arrays)
