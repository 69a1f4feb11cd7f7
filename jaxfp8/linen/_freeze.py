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
        layer = _mistakes.running_module()
        if layer is not None:
            decided = decision(layer)
            has_rule = decided is not None and decided.rule.recipe is not None
            _mistakes.refuse_frozen_kernel(layer, has_rule)
        return self.stand_in()

    def replace_boxed(self, val):
        """Return `val`: the box holds nothing."""
        return val

    def add_axis(self, index: int, params):
        """Insert an axis, for a transform that stacks kernels."""
        size = params.get("axis_size", 1)
        return self.replace(shape=(*self.shape[:index], size, *self.shape[index:]))

    def remove_axis(self, index: int, params):
        """Remove an axis, for a transform that takes a slice of stacked kernels."""
        index %= len(self.shape)
        return self.replace(shape=self.shape[:index] + self.shape[index + 1 :])


def _shape_and_dtype_to_bytes(shape_and_dtype) -> bytes:
    return json.dumps(shape_and_dtype).encode()


def _shape_and_dtype_from_bytes(text) -> tuple:
    shape, dtype = json.loads(text)
    return tuple(shape), dtype


jax.export.register_pytree_node_serialization(
    FrozenKernel,
    serialized_name="jaxfp8.FrozenKernel",
    serialize_auxdata=_shape_and_dtype_to_bytes,
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
                raise _several_kernels("/".join(product.path))
            has_another |= ~jnp.array_equal(frozen[name], new[name], equal_nan=True)
        new = {_HAS_ANOTHER: has_another}
    for name, leaf in new.items():
        product.put_variable("params", name, leaf)


def _refuse_other_kernels(product, differs) -> None:
    """Raise a ValueError where a product had several kernels that differ."""
    if not isinstance(differs, jax.core.Tracer) and np.any(np.asarray(differs)):
        raise _several_kernels("/".join(product))


def _several_kernels(product: str) -> ValueError:
    return ValueError(
        "freeze: model: expected one kernel for each FP8 product, got a product with "
        f"several kernels: {product}; give each kernel a product of its own"
    )


def freeze(model: nn.Module, variables, args, kwargs):
    """Freeze `variables`; see `jaxfp8.freeze`."""
    collections = dict(core.unfreeze(unstack_state(variables)))
    if "params" not in collections:
        raise ValueError(
            f"freeze: variables: expected a collection 'params', got "
            f"{sorted(collections)}"
        )
    params = traverse_util.flatten_dict(collections.pop("params"))
    mutable = kwargs.pop("mutable", False)
    arrays, joined = split_arrays((args, kwargs))
    arrays = [
        jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a
        for a in arrays
    ]

    def apply(params, collections, arrays, mutable=mutable):
        args, kwargs = joined(arrays)
        return model.apply(
            _variables(params, collections), *args, mutable=mutable, **kwargs
        )

    def with_codes(params, collections, arrays):
        written = core.scope.union_filters(mutable, "params")
        with _contexts.observed_by(_store_codes):
            _, changed = apply(params, collections, arrays, written)
        leaves = traverse_util.flatten_dict(changed["params"])
        return {path: leaf for path, leaf in leaves.items() if path not in params}

    # 1. Make the codes, and find the parameters that they are made of.
    codes, quantized = _codes(with_codes, (params, collections, arrays))
    # 2. Refuse products with several kernels, and those without an amax.
    flags = [path for path in codes if path[-1] == _HAS_ANOTHER]
    has_another = {path[:-1]: codes.pop(path) for path in flags}
    if not codes:
        raise _frozen.nothing_to_freeze()
    products = {path[:-1] for path in codes}
    for product in sorted(products & has_another.keys()):
        _refuse_other_kernels(product, has_another[product])
    state = traverse_util.flatten_dict(collections.pop(OVERWRITE_WITH_GRADIENT, {}))
    dropped, kept = {}, {}
    for path, leaf in state.items():
        (dropped if path[:-1] in products else kept)[path] = leaf
    _frozen.refuse_untouched(traverse_util.unflatten_dict(dropped))
    if kept:
        collections[OVERWRITE_WITH_GRADIENT] = traverse_util.unflatten_dict(kept)
    # 3. Take away the parameters that nothing but their codes reads.
    arguments = params | codes, collections, arrays
    read, _ = _read(_program(apply, *arguments), arguments)
    for path in quantized - read:
        (kernel,) = jax.tree.leaves(params[path])  # it may be in a box
        params[path] = FrozenKernel(tuple(kernel.shape), kernel.dtype.name)
    return _variables(params | codes, collections)


def _codes(with_codes, arguments) -> tuple[dict[tuple, jax.Array], set]:
    """Make the codes of products, and find the parameters that they are made of. A
    product whose kernel depends on `arrays`, as in attention, is left out.
    """
    program = _program(with_codes, *arguments)
    codes = jax.jit(with_codes)(*arguments)
    paths, quantized = sorted(codes), set()
    for product in {path[:-1] for path in paths}:
        of_product = [path[:-1] == product for path in paths]
        read, reads_arrays = _read(program, arguments, of_product)
        if reads_arrays:
            codes = {path: codes[path] for path in codes if path[:-1] != product}
        else:
            quantized |= read
    return codes, quantized


def _variables(params, collections):
    return {"params": traverse_util.unflatten_dict(params), **collections}


def _program(function, *arguments):
    """Trace `function(*arguments)`; return the jaxpr of the arrays in its result.

    Raises:
        ValueError: products are in branches.
    """

    def results(*arguments):
        return split_arrays(function(*arguments))[0]

    try:
        return jax.make_jaxpr(results)(*arguments).jaxpr
    except TypeError as error:
        if "branch" not in str(error):
            raise
        raise ValueError(
            "freeze: model: products in the branches of nn.cond or nn.switch cannot "
            "be frozen: each branch would store codes of its own; branch outside of "
            "the model, or leave such layers in high precision"
        ) from error


def _read(program, arguments, outputs: list[bool] | None = None) -> tuple[set, bool]:
    """Find the parameters that the outputs of a program, or some of them, depend on,
    and whether they depend on `arrays`, the first and the last of its arguments.
    """
    outputs = outputs or [True] * len(program.outvars)
    _, used = partial_eval.dce_jaxpr(program, outputs)
    params, _, arrays = jax.tree.unflatten(jax.tree.structure(arguments), used)
    read = {path for path, leaves in params.items() if any(jax.tree.leaves(leaves))}
    return read, any(arrays)
