"""`jaxfp8.freeze` for NNX models: products get the codes of their layers' kernels,
placeholders replace the kernels.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

from ..dot import _contexts, _frozen
from ..recipes import autocast
from ._dot_general import OverwriteWithGradient, _Fp8Product
from ._inspect import function_of_arrays, traced
from ._quantize_by_rules import _forget_unused, _stacked, layers, product

# The name of the kernel of a product while a model is traced, with the path of the
# layer.
_KERNEL_NAME = "jaxfp8_kernel_of_"


@dataclasses.dataclass(frozen=True)
class FrozenKernel(_frozen.Placeholder):
    """Placeholder for the kernel of a layer whose codes are in its product: shape and
    dtype, no array.

    The layer reads NaNs in place of the kernel. Its product does not read the NaNs, so
    compiled programs do not hold them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, index):
        return self.get_value()[index]


def freeze(model, args, kwargs):
    """Freeze the model in place; see `jaxfp8.freeze`."""
    calls, program = recorded_calls(model, args, kwargs)
    computed, frozen = set(_computed(program)), []
    for path, layer, attribute in layers(model):
        name = "/".join(map(str, path))
        call, kernel = calls.pop(name, None), getattr(layer, "kernel", None)
        if call is None or attribute is None or not isinstance(kernel, nnx.Param):
            continue
        leading = _stacked("freeze", path, layer)
        if name in computed:
            raise ValueError(
                f"freeze: {name}: expected a layer that gives its product its kernel "
                "as it is, got a layer that computes another kernel from it; leave "
                "that layer in high precision"
            )
        codes = _codes(path, layer, call, leading)
        if codes is not None:
            frozen.append((layer, attribute, call.kernel.shape, codes))
    for name in calls:
        raise ValueError(
            f"freeze: {name or 'model'}: expected layers that call a shared product in "
            "their __call__, got a call of one in other code; give each layer a "
            "product of its own"
        )
    if not frozen:
        raise _frozen.nothing_to_freeze()
    # All codes exist before the first layer changes: an error above leaves the model as
    # it was.
    for layer, attribute, shape, codes in frozen:
        setattr(layer, attribute, nnx.data(_frozen_product(layer, codes)))
        # Layers read the shape and the dtype of their kernel; the array itself would be
        # kept twice.
        placeholder = FrozenKernel(shape, layer.kernel.get_value().dtype)
        layer.kernel = nnx.static(placeholder)
    _forget_unused(model)
    return model


def _frozen_product(layer, codes: dict[str, jax.Array]):
    """Return the product of a layer with codes in place of state; other layers may hold
    the old product.
    """
    new = nnx.clone(product(layer))
    nnx.pop(new, OverwriteWithGradient)
    for name, leaf in codes.items():
        setattr(new, name, nnx.Param(leaf))
    return new


class Call(NamedTuple):
    """The call of a product: the shape of x, the type of the kernel, and the dimension
    numbers.
    """

    x_shape: tuple[int, ...]
    kernel: jax.ShapeDtypeStruct
    dimension_numbers: tuple


def recorded_calls(model, args, kwargs) -> tuple[dict[str, Call], Any]:
    """Record how layers call their FP8 products, by a trace of a copy of an NNX model
    in high precision.

    Returns:
        `(calls, program)`: the first call of each layer that is called, by its path;
        and the jaxpr of the model called with `args` and `kwargs`.
    """
    run_and_arrays = function_of_arrays(operator.call, (model, *args), kwargs)
    calls = {}

    def record(product, x, kernel, dimension_numbers):
        if not isinstance(product, _Fp8Product):
            return  # of a Linen module in a bridge
        path = _contexts.current_layer()
        kernel_type = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
        calls.setdefault(path, Call(x.shape, kernel_type, dimension_numbers))
        checkpoint_name(kernel, _KERNEL_NAME + path)

    with _contexts.observed_by(record), autocast(enabled=False):
        return calls, traced(*run_and_arrays)


def _computed(jaxpr, inputs=()) -> Iterator[str]:
    """Yield the paths of layers whose product gets the result of an equation, other
    than a change of dtype, as its kernel; `inputs` are inputs that are such results.
    """
    computed = set(map(id, inputs))
    for eqn in jaxpr.eqns:
        is_computed = [id(x) in computed for x in eqn.invars]
        if eqn.primitive.name != "convert_element_type" or any(is_computed):
            computed.update(map(id, eqn.outvars))
        name = str(eqn.params.get("name", ""))
        is_kernel = eqn.primitive.name == "name" and name.startswith(_KERNEL_NAME)
        if is_kernel and any(is_computed):
            yield name.removeprefix(_KERNEL_NAME)
        for inner in jaxprs_in_params(eqn.params):
            # the predicates of `cond` and `while_loop` come first
            outer = is_computed[-len(inner.invars) :]
            yield from _computed(inner, itertools.compress(inner.invars, outer))


def _codes(path, layer, call: Call, leading: tuple[int, ...]):
    """Compute the codes and scales of a layer's product, stacked like its kernel, whose
    leading dimensions are given.

    The result is None for a product that is frozen already, or that stays in high
    precision.
    """
    fp8_product = product(layer)
    recipe = fp8_product._current_recipe()
    if recipe is None or fp8_product._frozen_arrays() is not None:
        return None
    state = fp8_product._read_state(recipe)
    _frozen.refuse_untouched({"/".join(map(str, path)): nnx.state(fp8_product)})

    def codes_of_kernel(kernel, state):
        kernel = kernel.astype(call.kernel.dtype)
        return _frozen.freeze_operands(
            call.x_shape, kernel, call.dimension_numbers, recipe, state
        )

    # A stacked layer has a kernel and a state for each of its members.
    for _ in leading:
        codes_of_kernel = jax.vmap(codes_of_kernel)
    return jax.jit(codes_of_kernel)(layer.kernel.get_value(), state)
