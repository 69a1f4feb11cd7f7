"""quantize: a Linen model whose layers take their recipes from rules, without an edit
of its code.

The quantized model is an instance of a subclass of the model's class, with the same
name and fields. `isinstance`, `method=Model.encode` and lifted transforms need the
class of the model, and Flax makes every module anew from its class and its fields. So
the rules are stored in the class: an attribute would be lost, and transforms would hand
a field to the class of the model. There is one subclass for each class and rules, so
that equal models are equal. Pickle cannot find the subclass by its name, so a quantized
model is pickled and copied as the plain model and its rules.

While a method of the model runs, Flax's method interceptor hands each layer the
`dot_general_cls` that its rule asks for, and takes it back afterwards. So layers that
transforms, `setup` or other modules make get their rules where they run.
"""

import contextlib
import copy
import functools
import threading
import weakref
from typing import NamedTuple

import jax
from flax import core, linen as nn

from .._jax._trees import Tree, with_class
from ..dot import _contexts
from ..recipes import (
    Rule,
    Rules,
    checked_rules,
    first_match,
    kind,
    layer_names,
    module_rule,
)
from ..train import apply_with_max_grad
from ._dot_general import Fp8Einsum, Fp8Module, make_dot_general_cls
from ._layers import Dense
from ._layers_by_rule import is_compared, run_together
from ._scopes import Region, add_rules, check_rules, regions, restore_path


def quantize(model: Tree, rules: Rules) -> Tree:
    """Run the layers of a model in FP8 as the rules say: `rules` are pairs
    `(path_regex, recipe or None)`.

        model = jaxfp8.linen.quantize(
            model, [("head", None), (r"block\\d+/mlp/.*", jaxfp8.DelayedScaling())]
        )

    The first rule whose regex matches the whole path of a layer decides
    (`re.fullmatch`; the path as in `params`, joined by `/`, from this model on). The
    recipe None is high precision, also for a layer whose code asks for FP8: state that
    the layer has is left alone. A layer that no rule matches runs as its code says.

    Layers are the modules with a field `dot_general_cls` (`nn.Dense`, `nn.DenseGeneral`
    and the layers inside attention), `nn.Einsum`, and modules that hold a
    `jaxfp8.linen.Fp8DotGeneral`, `Fp8Einsum` or `Fp8RaggedDot`, such as
    `jaxfp8.linen.Dense`: a rule may name the module or its product. A rule takes the
    place of the `dot_general` and `dot_general_cls` in the code. Parameters and state
    have the names that `dot_general_cls=Fp8DotGeneral` gives them, so checkpoints
    interchange; the state of an `nn.Einsum` is under `Fp8Einsum_0`. Convolutions,
    attention scores and `nn.Embed.attend` have no FP8 product; `jaxfp8.report` names
    those of them that a rule matches. No rule reaches a call of `jax.lax.ragged_dot`.

    In place of a recipe `Dense.of("query", "key", "value")` makes layers of a module
    that the regex matches one product, and `GatedMLP.of(gate=, up=, down=)` makes three
    layers a GatedMLP.

    Args:
        model: an unbound Linen module; it is not changed. If it has rules already, the
            new rules come first.
        rules: the list of pairs.

    Returns:
        A module of the same name and fields. Equal models with equal rules give equal
        modules. The result can be pickled, copied and hashed if `model` can.

    Raises:
        TypeError: `model` is not a Linen module, or `rules` are not pairs of a string
            and a recipe.
        FP8StateWarning: while `apply` is traced, no rule gives a layer of the model
            FP8, a rule matches no layer of the model, or a module that a rule matches
            multiplies its parameters itself.
        ValueError: `model` is bound, or a regex does not compile. While tracing: a
            block in `nn.jit` is in a field of a module in another transform, which
            hides the path of the block; or a module does not compute what `Dense.of` or
            `GatedMLP.of` says.
    """
    rules = checked_rules("linen.quantize", rules)
    if not isinstance(model, nn.Module):
        raise TypeError(
            "linen.quantize: model: expected an instance of a Linen module, got "
            f"{kind(model)}; an NNX module goes through jaxfp8.nnx.quantize"
        )
    if model.scope is not None:
        raise ValueError(
            "linen.quantize: model: expected an unbound module, got a "
            f"{type(model).__name__} with variables; call quantize outside of apply "
            "and of modules' methods, or make the module with parent=None"
        )
    plain = _plain(model.clone())
    rules += getattr(model, "_fp8_rules", ())
    return _with_rules(plain, rules) if rules else plain


class Decision(NamedTuple):
    """A rule that decides about a layer, the index of the rule in its region, and the
    region.
    """

    rule: Rule
    index: int
    region: Region


def decision(module) -> Decision | None:
    """Find the first rule that matches a bound module, in the outermost region first;
    None where no rule matches.
    """
    for region in regions(module.scope):
        names = layer_names(module.path, isinstance(module, Fp8Module), region.root)
        index = first_match(region.rules, names)
        if index is not None:
            return Decision(region.rules[index], index, region)
    return None


def _module_rule(module) -> Rule | None:
    """Find the rule that runs layers of a bound module together; None where no rule
    does.
    """
    for region in regions(module.scope):
        rule = module_rule(region.rules, module.path, region.root)
        if rule is not None:
            return rule
    return None


def is_layer(module) -> bool:
    """Tell whether rules can change the products of a module."""
    is_ours = isinstance(module, (Fp8Module, nn.Einsum, Dense))
    return is_ours or "dot_general_cls" in module.__dataclass_fields__


class _Quantized:
    """Mixin for a model's class: puts the rules into the scope of the model, and runs
    its methods intercepted.

    A submodule of a bound model that is used outside of the model's methods
    (`model.bind(variables).encoder`) is handed out as an instance of such a class
    without rules: the scope of the submodule has the rules of the model.

    Attributes:
        _fp8_rules: the rules of the model; empty for a submodule that was handed out.
        _fp8_class: the class of the plain model.
        _fp8_has_checked: whether the rules were compared with a model's layers.
    """

    _fp8_has_checked = False
    _fp8_rules: tuple[Rule, ...]
    _fp8_class: type[nn.Module]

    # Flax calls a method of the plain class by this alone
    def _call_wrapped_method(self, fun, args, kwargs):
        with _intercepting(self):
            return super()._call_wrapped_method(fun, args, kwargs)

    def apply(self, variables, *args, **options):
        """Apply as Flax does, with the state of stacked layers read outside of the
        loops over them.
        """
        return apply_with_max_grad(super().apply, variables, *args, **options)

    def clone(self, *, parent=None, **options):
        """Clone as Flax does; without a parent, a submodule that was handed out gets
        its plain class again.
        """
        module = super().clone(parent=parent, **options)
        return module if parent is not None or self._fp8_rules else _plain(module)

    def __reduce_ex__(self, protocol):  # pickle, copy and deepcopy
        return _with_rules, (copy.copy(_plain(self)), self._fp8_rules)

    # Python calls `__getattr__` for names that `__getattribute__` does not find. Before
    # `setup` has run these are its submodules, and Flax's `__getattr__` runs `setup`.
    def __getattribute__(self, name):
        return _hand_out(self, name, super().__getattribute__(name))

    def __getattr__(self, name):
        return _hand_out(self, name, super().__getattr__(name))


def _scope(model):
    return vars(model).get("scope")


def _set_scope(model, scope) -> None:
    """Set the attribute `scope` of a quantized model: each scope that Flax sets gets
    the rules before submodules bind.
    """
    if scope is not None and model._fp8_rules:
        scope = add_rules(scope, model._fp8_rules)
    vars(model)["scope"] = scope


_classes = weakref.WeakValueDictionary()
_classes_lock = threading.Lock()


def _quantized_class(plain_class, rules: tuple[Rule, ...]) -> type[nn.Module]:
    """Make the subclass for a class and rules."""
    namespace = {"_fp8_rules": rules, "_fp8_class": plain_class}
    for name in _OF_PLAIN_CLASS:
        namespace[name] = getattr(plain_class, name)
    for name in dir(plain_class):
        method = getattr(plain_class, name, None)
        if hasattr(method, _WRAPPED) and name != "setup":
            namespace[name] = _method(method)
    quantized = type(plain_class.__name__, (_Quantized, plain_class), namespace)
    # each module class has a `scope` of its own from Flax
    quantized.scope = property(_scope, _set_scope)
    return quantized


# What a subclass would get anew.
_OF_PLAIN_CLASS = (
    "__module__",
    "__qualname__",
    "__doc__",
    "__init__",
    "__eq__",
    "__hash__",
)
_WRAPPED = "method_handler_wrapped"  # Flax's mark of the methods that it manages


def _method(method):
    """Wrap a method in the interceptor; the method may be that of a transformed class
    (`nn.remat(Block)`).
    """

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        with _intercepting(self):
            return method(self, *args, **kwargs)

    return wrapped


def _with_rules(plain: nn.Module, rules: tuple[Rule, ...]) -> nn.Module:
    """Make a copy of a model with rules. Equal ones have one class, in all threads, as
    long as a model has it.
    """
    key = type(plain), rules
    with _classes_lock:
        cls = _classes.get(key) or _quantized_class(*key)
        _classes[key] = cls
    return with_class(cls, plain)


def _plain(module: nn.Module) -> nn.Module:
    return with_class(getattr(module, "_fp8_class", type(module)), module)


def _hand_out(model, name: str, value):
    """Return an attribute of a model to code outside of the model's methods: bound
    modules in it run with the rules.
    """
    is_own = name.startswith("_") or name == "parent"
    if is_own or _is_intercepting.value or vars(model).get("scope") is None:
        return value
    if not isinstance(value, (nn.Module, tuple, core.FrozenDict)):
        return value
    return jax.tree.map(_with_interceptor, value)


def _with_interceptor(leaf):
    is_plain = isinstance(leaf, nn.Module) and not isinstance(leaf, _Quantized)
    if not is_plain or leaf.scope is None:
        return leaf
    # `setup` runs again in the new module, and the rewound scope has the names free
    # that `setup` took before.
    return _with_rules(leaf.clone(parent=leaf.scope.rewound()), ())


# Whether the interceptor is active. Each thread has its own stack of Flax interceptors,
# and its own JAX context.
_is_intercepting = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def _intercepting(model):
    """Enter a context in which layers get the recipes of their rules; warn if it was no
    layer of the model.
    """
    if _is_intercepting.value:
        yield
        return
    # The layers that ran, and other modules, by the names that rules have for them.
    layers, modules = {}, {}

    def intercept(next_method, args, kwargs, context):
        """Run a method of any module in place of Flax."""
        module = context.module
        # 1. Restore the path in a scope that a lifted transform made: blocks in nn.jit
        #    that this module makes need it.
        object.__setattr__(module, "scope", restore_path(module.scope))
        # 2. Note what ran.
        has_product = is_layer(module)
        # A module that holds a product is a layer too.
        names = layer_names(module.path, isinstance(module, Fp8Module), model.path)
        if not is_compared.value:
            ran = layers if has_product else modules
            ran.update(dict.fromkeys(names, module))
        # 3. Run the module with the recipe of its rule, with layers that run together,
        #    or as it is.
        if has_product:
            decided = decision(module)
            if decided is not None:
                return _run_layer(decided, next_method, args, kwargs, context)
        elif context.method_name == "__call__":
            rule = _module_rule(module)
            if rule is not None:
                plain = _plain(module.clone(parent=None))
                with run_together(args, kwargs, context, plain, rule):
                    return next_method(*args, **kwargs)
        return next_method(*args, **kwargs)

    with _is_intercepting(True), nn.intercept_methods(intercept):
        yield
    # A submodule that was handed out has the rules of a model that does not run here.
    if model._fp8_rules and model.scope is not None and (layers or modules):
        check_rules(model, layers, modules)


def _run_layer(decided: Decision, next_method, args, kwargs, context):
    """Run a method of a layer with the recipe of its rule."""
    layer, rule = context.module, decided.rule
    function = getattr(context.orig_method, "func", None)
    reason = contextlib.nullcontext()
    if rule.recipe is None:
        reason = _contexts.high_precision(f"rule {decided.index} says None")
    elif function is nn.Einsum.__call__.__wrapped__:
        return _einsum_layer(layer, rule.recipe, *args, **kwargs)
    with _with_recipe(layer, rule), reason:
        return next_method(*args, **kwargs)


@contextlib.contextmanager
def _with_recipe(layer, rule: Rule):
    """Give a bound layer the recipe of its rule for a while: Flax made the layer for
    this call of `apply`. The recipe None is high precision.
    """
    fields = {"dot_general_cls": None, "dot_general": jax.lax.dot_general}
    if isinstance(layer, Fp8Module):
        fields = {"recipe": rule.layer_recipe}
    elif rule.recipe is not None:
        cls = make_dot_general_cls(rule.recipe)
        fields = {"dot_general_cls": cls, "dot_general": None}
    before = {name: vars(layer)[name] for name in fields.keys() & vars(layer).keys()}
    vars(layer).update((name, fields[name]) for name in before)
    try:
        yield
    finally:
        vars(layer).update(before)


def _einsum_layer(layer, recipe, inputs, einsum_str=None):
    """Compute `nn.Einsum.__call__` in FP8, here because `nn.Einsum` has no field for
    its product.
    """
    eqn = nn.merge_param("einsum_str", layer.einsum_str, einsum_str)
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    bias, broadcast = None, ()
    if layer.use_bias:
        shape, broadcast = layer._get_bias_shape(eqn, inputs, kernel)
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    inputs, kernel, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    y = Fp8Einsum(recipe=recipe)(
        eqn, inputs, kernel, layer.precision, layer.preferred_element_type
    )
    return y if bias is None else y + jax.numpy.reshape(bias, broadcast)
