"""What `jaxfp8.freeze` does to an NNX model: products get the codes of their layers' kernels, the kernels go."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .._jax._arrays import split_arrays
from .._jax._jaxprs import inner_jaxprs
from ..dot import _frozen, dot_general, einsum_by
from ..recipes import QuantizerState
from ._quantize import _forget_unused, _stacked, layers, product
from ._variables import OverwriteWithGradient

# What the tracing of a model calls the kernel that a product gets, with the number of the product.
_KERNEL_OF = "jaxfp8_kernel_of_"


@dataclasses.dataclass(frozen=True)
class FrozenKernel:
    """What is left of a layer's kernel whose codes are in its product: shape and dtype, no array.

    The layer reads NaNs, which the product does not, so that nothing of them is in a compiled program.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def get_value(self):
        """NaNs of this shape and dtype."""
        return _frozen.stand_in(self.shape, self.dtype)

    def __getitem__(self, index):
        return self.get_value()[index]


def freeze(model, args, kwargs):
    """Freezes the model in place; see `jaxfp8.freeze`."""
    found = [(path, layer, attribute) for path, layer, attribute in layers(model) if _has_kernel(layer, attribute)]
    calls = _calls(model, found, args, kwargs)
    frozen = [
        (layer, attribute, call, codes)
        for (path, layer, attribute), call in zip(found, calls, strict=True)
        if call is not None and (codes := _codes(path, layer, call)) is not None
    ]
    if not frozen:
        raise _frozen.nothing_to_freeze()
    for layer, attribute, call, codes in frozen:
        old = product(layer)
        new = type(old)(old.recipe)
        new.names_recipe = old.names_recipe
        for name in [name for name, value in vars(new).items() if isinstance(value, OverwriteWithGradient)]:
            delattr(new, name)
        for name, leaf in codes.items():
            setattr(new, name, nnx.Param(leaf))
        dtype = layer.kernel.get_value().dtype
        setattr(layer, attribute, nnx.data(new))
        layer.kernel = nnx.static(FrozenKernel(call.kernel.shape, dtype))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.MultiHeadAttention):
            _forget_unused(module)
    return model


def _has_kernel(layer, attribute) -> bool:
    """Whether a layer gives a kernel of its own to an FP8 product of its own."""
    is_own = attribute is not None and product(layer) is not None
    return is_own and isinstance(getattr(layer, "kernel", None), nnx.Param)


@dataclasses.dataclass(frozen=True)
class _Call:
    """How a layer called its product.

    Attributes:
        run: `(product, x, kernel)` to the result, by a product as `einsum_by` takes it.
        x, kernel: the types of what the layer gave it.
    """

    run: functools.partial
    x: jax.ShapeDtypeStruct
    kernel: jax.ShapeDtypeStruct


class _Recorder:
    """In place of a product: notes what it was given, and multiplies in high precision."""

    def __init__(self, calls: list, i: int, is_einsum: bool):
        self.calls, self.i, self.is_einsum = calls, i, is_einsum

    def __call__(self, *args, **options):
        args, names = list(args), ("precision", "preferred_element_type", "out_sharding")
        static = args.pop(0) if self.is_einsum else args.pop(2)
        (x, kernel, *more), by = args, _einsum if self.is_einsum else _plain
        of_x, of_kernel = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, kernel))
        call = _Call(functools.partial(by, static), of_x, of_kernel)
        self.calls[self.i] = self.calls[self.i] or call
        kernel = checkpoint_name(kernel, f"{_KERNEL_OF}{self.i}")
        options |= dict(zip(names, more, strict=False))
        return by(static, functools.partial(dot_general, recipe=None), x, kernel, **options)


def _plain(dimension_numbers, product, x, kernel, **options):
    return product(x, kernel, dimension_numbers, **options)


def _einsum(eqn, product, x, kernel, **options):
    return einsum_by(product, eqn, x, kernel, **options)


def _calls(model, found, args, kwargs) -> list:
    """How each layer calls its product: the model is traced with recorders in their place. None: it does not."""
    calls, before = [None] * len(found), [getattr(layer, attribute) for _, layer, attribute in found]
    try:
        for i, (_, layer, attribute) in enumerate(found):
            setattr(layer, attribute, nnx.static(_Recorder(calls, i, attribute == "einsum_op")))
        graph, state = nnx.split(model)
        arrays, joined = split_arrays((args, kwargs))

        def run(state, arrays):
            args, kwargs = joined(arrays)
            return jax.tree.leaves(nnx.merge(graph, state)(*args, **kwargs))

        program = jax.make_jaxpr(run)(state, arrays).jaxpr
    finally:
        for (_, layer, attribute), value in zip(found, before, strict=True):
            setattr(layer, attribute, nnx.data(value))
    for i in _computed(program):
        raise ValueError(
            f"freeze: {'/'.join(map(str, found[i][0]))}: expected a layer that gives its product its kernel as it is, "
            "got one that computes another from it; leave that layer in high precision"
        )
    return calls


def _computed(jaxpr) -> Iterator[int]:
    """Which recorders got what an equation computes, other than a change of dtype, in place of a kernel."""
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", ""))
        if eqn.primitive.name == "name" and name.startswith(_KERNEL_OF):
            maker = made_by.get(eqn.invars[0])
            while maker is not None and maker.primitive.name == "convert_element_type":
                maker = made_by.get(maker.invars[0])
            if maker is not None:
                yield int(name.removeprefix(_KERNEL_OF))
        for inner in inner_jaxprs(eqn):
            yield from _computed(inner)


def _codes(path, layer, call: _Call):
    """What inference needs of a layer's product; stacked as its kernel is. None where it has no FP8 kernel."""
    of = product(layer)
    found = of._recipe_and_state() if of._codes() is None else {"recipe": None}
    if found["recipe"] is None:
        return None
    recipe, state = found["recipe"], found["state"]
    for name in ("input", "kernel"):
        quantizer = getattr(state, name)
        if isinstance(quantizer, QuantizerState) and not isinstance(quantizer.scale, jax.core.Tracer):
            _frozen.refuse_untouched("/".join(map(str, (*path, name))), quantizer.amax_history, quantizer.scale)

    def of_one(kernel, state):
        kept = []

        def keep(x, kernel, dimension_numbers, **options):
            kept.append(_frozen.freeze_operands(x.shape, kernel, dimension_numbers, recipe, state))
            return dot_general(x, kernel, dimension_numbers, recipe=None, **options)

        call.run(keep, jnp.zeros(call.x.shape, call.x.dtype), kernel.astype(call.kernel.dtype))
        return kept[0]

    for _ in _stacked("freeze", path, layer):
        of_one = jax.vmap(of_one)
    return jax.jit(of_one)(layer.kernel.get_value(), state)
