"""quantize: a Linen model whose layers take their recipes from rules, without an edit of its code.

The model gets a subclass of its own class, with the same name and fields. While one of its methods runs, Flax's method
interceptor hands each layer the `dot_general_cls` that its rule asks for, and takes it back afterwards. So layers that
transforms, `setup` or other modules make are met where they run.
"""

import contextlib
import dataclasses
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from .._jax._typing import Tree
from ..dot import _scopes
from ..recipes import Rule, Rules, checked_rules, first_match, kind, relative
from ._dot_general import Fp8DotGeneral
from ._einsum import Fp8Einsum
from ._state import Fp8Module


def quantize(model: Tree, rules: Rules) -> Tree:
    """The model with its layers in FP8 as the rules say: `rules` are pairs `(path_regex, recipe or None)`.

        model = jaxfp8.linen.quantize(model, [("head", None), (r"block\\d+/mlp/.*", jaxfp8.DelayedScaling())])

    The first rule whose regex matches the whole path of a layer holds (`re.fullmatch`; the path as in `params`, joined
    by `/`, from this model on). None is high precision, also for a layer whose code asks for FP8: state that it has is
    left alone. A layer that no rule matches runs as its code says.

    Layers are the modules with a field `dot_general_cls` (`nn.Dense`, `nn.DenseGeneral` and those inside attention),
    `nn.Einsum`, and whatever holds a `jaxfp8.linen.Fp8DotGeneral` or `Fp8Einsum`, such as `jaxfp8.linen.Dense`: a rule
    may name it or them. A rule takes the place of the `dot_general` and `dot_general_cls` in the code. Parameters and
    state are where `dot_general_cls=Fp8DotGeneral` has them, so checkpoints interchange; the state of an `nn.Einsum`
    is under `Fp8Einsum_0`. Convolutions, attention scores and `nn.Embed.attend` have no FP8 product;
    `jaxfp8.report` names those that a rule matches.

    Args:
        model: an unbound Linen module; it is not changed. One that has rules already: the new ones come first.
        rules: the list.

    Returns:
        A module of the same name and fields. It equals another one made of an equal model and equal rules.

    Raises:
        TypeError: not a Linen module, or rules that are not pairs of a string and a recipe.
        ValueError: a bound module; a regex that does not compile. While tracing: a layer inside `nn.jit`.
    """
    rules = checked_rules("linen.quantize", rules)
    if isinstance(model, type) or not isinstance(model, nn.Module):
        raise TypeError(
            f"linen.quantize: model: expected an instance of a Linen module, got {kind(model)}; an NNX module goes "
            "through jaxfp8.nnx.quantize"
        )
    if model.scope is not None:
        raise ValueError(
            f"linen.quantize: model: expected an unbound module, got a {type(model).__name__} with variables; call "
            "quantize outside of apply and of modules' methods, or make the module with parent=None"
        )
    base = type(model)
    if issubclass(base, _Quantized):
        rules, base = rules + base._region.rules, base.__mro__[2]
    quantized = model.clone()
    object.__setattr__(quantized, "__class__", _quantized_class(base, _Region(rules)))
    return quantized


class _Region(NamedTuple):
    """Rules, and the path of the model that they are for; None where that is the module that has the region."""

    rules: tuple[Rule, ...]
    root: tuple[str, ...] | None = None


# The regions around the running method, outermost first. A context of jit's cache key: a program traced with other
# rules, or with none, is traced again.
_regions = jax.make_user_context(())


class Decision(NamedTuple):
    """What rules say of a layer: the rule, its index and the region it is of."""

    rule: Rule
    index: int
    region: _Region


def decision(module) -> Decision | None:
    """The first match of a bound layer in the regions around it, the outermost region first; None: no rule."""
    op = "einsum" if isinstance(module, (nn.Einsum, Fp8Einsum)) else "dot_general"
    for region in _regions.value:
        paths = [relative(module.path, region.root)]
        if isinstance(module, Fp8Module) and module.path:  # the layer is the module that holds it
            paths.append(relative(module.path[:-1], region.root))
        index = first_match(region.rules, [path for path in paths if path is not None], op)
        if index is not None:
            return Decision(region.rules[index], index, region)
    return None


def is_layer(module) -> bool:
    """Whether rules can change the products of a module."""
    return isinstance(module, (Fp8Module, nn.Einsum)) or _has_field(module, "dot_general_cls")


def regions() -> tuple[_Region, ...]:
    return _regions.value


def _has_field(module, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(module))


class _Quantized:
    """Mixed into a model's class: its methods run with its region around them."""

    def _call_wrapped_method(self, fun, args, kwargs):  # an unbound method of the plain class comes by here alone
        with _inside(self):
            return super()._call_wrapped_method(fun, args, kwargs)

    def clone(self, *, parent=None, **options):
        """As Flax's; a submodule taken out of a bound model is, unbound, one of the model's own again."""
        module = super().clone(parent=parent, **options)
        if parent is None and type(self)._region.root is not None:
            object.__setattr__(module, "__class__", type(self).__mro__[2])
        return module

    # A submodule that is taken out of a bound model (`model.bind(variables).encoder`) keeps the rules. Before `setup`
    # has run Python asks the second method, which runs it.
    def __getattribute__(self, name):
        return _kept(self, name, super().__getattribute__(name))

    def __getattr__(self, name):
        return _kept(self, name, super().__getattr__(name))


def _kept(module, name, value):
    """An attribute of a quantized module; where no region is around, modules in it get the module's."""
    if isinstance(value, (nn.Module, list, tuple, dict)) and not name.startswith("_") and name != "parent":
        region = _region_of(module)
        if region is not None and region not in _regions.value:
            for leaf in jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, nn.Module)):
                if isinstance(leaf, nn.Module) and leaf.scope is not None and not isinstance(leaf, _Quantized):
                    object.__setattr__(leaf, "__class__", _quantized_class(type(leaf), region))
    return value


@functools.cache
def _quantized_class(base, region: _Region):
    """The subclass of `base` for a region: one for each pair, so that equal models have equal classes."""
    names = [name for name in dir(base) if hasattr(getattr(base, name, None), "method_handler_wrapped")]
    same = ("__module__", "__qualname__", "__doc__", "__init__", "__eq__", "__hash__")
    return type(
        base.__name__,
        (_Quantized, base),
        {name: getattr(base, name) for name in same}
        | {name: _method(getattr(base, name)) for name in names if name != "setup"}
        | {"_region": region},
    )


def _method(method):
    """A method with the region around it, and around the transform that it may be (`nn.remat(Block)`)."""

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        with _inside(self):
            return method(self, *args, **kwargs)

    return wrapped


def _region_of(module) -> _Region | None:
    """The region of a quantized module, with its root; None where it is not bound, and so has no path."""
    region, scope = type(module)._region, object.__getattribute__(module, "scope")
    if scope is None:
        return None
    return region._replace(root=scope.path) if region.root is None else region


@contextlib.contextmanager
def _inside(module):
    region = _region_of(module)
    if region is None or region in _regions.value:
        yield
        return
    with contextlib.ExitStack() as stack:
        if not _regions.value:
            stack.enter_context(nn.intercept_methods(_interceptor))
        stack.enter_context(_regions((*_regions.value, region)))
        yield


def _interceptor(next_method, args, kwargs, context):
    """Flax calls it in place of each method of each module while a quantized model runs."""
    module = context.module
    if not is_layer(module):
        return next_method(*args, **kwargs)
    decided = decision(module)
    _refuse_nn_jit(module)
    if decided is None:
        return next_method(*args, **kwargs)
    rule = decided.rule
    if isinstance(module, Fp8Module):
        changes = {"recipe": rule.layer_recipe}
    elif isinstance(module, nn.Einsum):
        is_flax_own = getattr(context.orig_method, "func", None) is nn.Einsum.__call__.__wrapped__
        if is_flax_own and rule.recipe is not None:
            return _einsum_layer(module, rule.recipe, *args, **kwargs)
        changes = {}
    elif rule.recipe is None:
        changes = {"dot_general_cls": None, "dot_general": lax.dot_general}
    else:
        changes = {"dot_general_cls": functools.partial(Fp8DotGeneral, recipe=rule.recipe), "dot_general": None}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_changed(module, changes))
        if rule.recipe is None:
            stack.enter_context(_scopes.high_precision(f"rule {decided.index} says None"))
        return next_method(*args, **kwargs)


@contextlib.contextmanager
def _changed(module, fields):
    """A bound module with some fields changed for a while; it is a clone that Flax made for this call of `apply`."""
    fields = {name: value for name, value in fields.items() if _has_field(module, name)}
    before = {name: getattr(module, name) for name in fields}
    try:
        for name, value in fields.items():
            object.__setattr__(module, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _einsum_layer(layer, recipe, inputs, einsum_str=None):
    """`nn.Einsum.__call__` in FP8: that layer has no field for its product."""
    eqn = nn.merge_param("einsum_str", layer.einsum_str, einsum_str).replace(" ", "")
    if "->" not in eqn or eqn.count(",") != 1:
        raise ValueError(f"nn.Einsum: einsum_str: expected two operands and an explicit output, got {eqn!r}")
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    bias, broadcast = None, ()
    if layer.use_bias:
        shape, broadcast = layer._get_bias_shape(eqn, inputs, kernel)
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    inputs, kernel, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    y = Fp8Einsum(recipe=recipe)(
        eqn, inputs, kernel, precision=layer.precision, preferred_element_type=layer.preferred_element_type
    )
    return y if bias is None else y + jnp.reshape(bias, broadcast)


def _refuse_nn_jit(module):
    """Rules are by path, but `nn.jit` runs what it traced for one block for all like it, wherever they are."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "jitted" and frame.f_globals.get("__name__") == "flax.core.lift":
            raise ValueError(
                f"linen.quantize: {'/'.join(module.path)} is inside nn.jit, which keeps one program for all equal "
                "blocks, whatever their paths; take nn.jit away and use jax.jit around the step"
            )
        frame = frame.f_back
