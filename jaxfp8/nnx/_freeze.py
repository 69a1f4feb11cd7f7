"""`jaxfp8.freeze` for NNX models: products get the codes of their layers' kernels,
placeholders replace the kernels.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .._jax._primitives import inner_jaxprs
from .._jax._trees import split_arrays
from ..dot import _frozen, dot_general
from ._dot_general import (
    Fp8DotGeneral,
    Fp8Einsum,
    Fp8RaggedDot,
    OverwriteWithGradient,
    current_recipe,
    frozen_arrays,
    read_state,
)
from ._quantize_by_rules import _forget_unused, _stacked, layers, product

# The name of the kernel of a product while a model is traced, with the number of the
# product.
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

    def get_value(self):
        """Return NaNs of this shape and dtype."""
        return self.stand_in()

    def __getitem__(self, index):
        return self.get_value()[index]


def freeze(model, args, kwargs):
    """Freeze the model in place; see `jaxfp8.freeze`."""
    candidates = [each for each in layers(model) if _has_kernel(*each[1:])]
    calls, program = recorded_calls(model, candidates, args, kwargs)
    for i in _computed(program):
        raise ValueError(
            f"freeze: {'/'.join(map(str, candidates[i][0]))}: expected a layer that "
            "gives its product its kernel as it is, got a layer that computes another "
            "kernel from it; leave that layer in high precision"
        )
    frozen = []
    for (path, layer, attribute), call in zip(candidates, calls, strict=True):
        codes = None if call is None else _codes(path, layer, call)
        if codes is not None:
            frozen.append((layer, attribute, call.kernel.shape, codes))
    if not frozen:
        raise _frozen.nothing_to_freeze()
    # All codes exist before the first layer changes: an error above leaves the model as
    # it was.
    for layer, attribute, shape, codes in frozen:
        new = nnx.clone(product(layer))  # other layers may hold the old product
        for name, value in list(vars(new).items()):
            if isinstance(value, OverwriteWithGradient):
                delattr(new, name)
        for name, leaf in codes.items():
            setattr(new, name, nnx.Param(leaf))
        setattr(layer, attribute, nnx.data(new))
        # Layers read the shape and the dtype of their kernel; the array itself would be
        # kept twice.
        placeholder = FrozenKernel(shape, layer.kernel.get_value().dtype)
        layer.kernel = nnx.static(placeholder)
    _forget_unused(model)
    return model


def _has_kernel(layer, attribute) -> bool:
    """Tell whether a layer holds an FP8 product, and the kernel that the product
    reads.
    """
    has_product = attribute is not None and product(layer) is not None
    return has_product and isinstance(getattr(layer, "kernel", None), nnx.Param)


class Call(NamedTuple):
    """The call of a product: the shape of x, the type of the kernel, and the dimension
    numbers.
    """

    x_shape: tuple[int, ...]
    kernel: jax.ShapeDtypeStruct
    dimension_numbers: tuple


class _Recorder(NamedTuple):
    """The product of layer `i` while a model is traced in high precision; records the
    first call among `calls`.
    """

    i: int
    calls: list[Call | None]

    def _product(self, x, kernel, dimension_numbers, by=dot_general):
        """Record the call; return `by` in high precision."""
        call = Call(
            x.shape, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype), dimension_numbers
        )
        self.calls[self.i] = self.calls[self.i] or call

        def multiply(x, kernel, dimension_numbers, **options):
            kernel = checkpoint_name(kernel, f"{_KERNEL_NAME}{self.i}")
            return by(x, kernel, dimension_numbers, recipe=None, **options)

        return multiply

    def _naming(self, kernel):
        return contextlib.nullcontext()

    dot_general = Fp8DotGeneral.__call__
    einsum_op = Fp8Einsum.__call__
    ragged_dot = Fp8RaggedDot.__call__


def recorded_calls(model, candidates, args, kwargs) -> tuple[list[Call | None], Any]:
    """Record how layers call their products, by a trace in high precision; the model is
    as before afterwards.

    Args:
        model: the NNX module.
        candidates: `(path, layer, attribute)` of each layer, with the attribute that
            holds its product.
        args, kwargs: the arguments of the model.

    Returns:
        `(calls, program)`: the first call of each layer, None for a layer without a
        call; and the jaxpr of the model.
    """
    calls = [None] * len(candidates)
    before = [getattr(layer, attribute) for _, layer, attribute in candidates]
    try:
        for i, (_, layer, attribute) in enumerate(candidates):
            recorder = _Recorder(i, calls)
            setattr(layer, attribute, nnx.static(getattr(recorder, attribute)))
        graph, state = nnx.split(model)
        arrays, joined = split_arrays((args, kwargs))

        def run(state, arrays):
            args, kwargs = joined(arrays)
            return split_arrays(nnx.merge(graph, state)(*args, **kwargs))[0]

        program = jax.make_jaxpr(run)(state, arrays).jaxpr
    finally:
        for (_, layer, attribute), value in zip(candidates, before, strict=True):
            setattr(layer, attribute, nnx.data(value))
    return calls, program


def _computed(jaxpr) -> Iterator[int]:
    """Yield the recorders whose kernel is the result of an equation other than a change
    of dtype.
    """
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", ""))
        if eqn.primitive.name == "name" and name.startswith(_KERNEL_NAME):
            (kernel,) = eqn.invars
            producer = producers.get(kernel)
            while producer and producer.primitive.name == "convert_element_type":
                producer = producers.get(producer.invars[0])
            if producer:
                yield int(name.removeprefix(_KERNEL_NAME))
        for inner in inner_jaxprs(eqn.params):
            yield from _computed(inner)


def _codes(path, layer, call: Call):
    """Compute the codes and scales of a layer's product, stacked like its kernel.

    The result is None for a product that is frozen already, or that stays in high
    precision.
    """
    fp8_product = product(layer)
    recipe = current_recipe(fp8_product) if frozen_arrays(fp8_product) is None else None
    if recipe is None:
        return None
    state = read_state(fp8_product, recipe)
    _frozen.refuse_untouched({"/".join(map(str, path)): nnx.state(fp8_product)})

    def codes_of_kernel(kernel, state):
        kernel = kernel.astype(call.kernel.dtype)
        return _frozen.freeze_operands(
            call.x_shape, kernel, call.dimension_numbers, recipe, state
        )

    # A stacked layer has a kernel and a state for each of its members.
    for _ in _stacked("freeze", path, layer):
        codes_of_kernel = jax.vmap(codes_of_kernel)
    return jax.jit(codes_of_kernel)(layer.kernel.get_value(), state)
