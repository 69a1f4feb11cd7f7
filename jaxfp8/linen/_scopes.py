"""The rules of `linen.quantize` while a model runs, which are stored in the flags of
Flax's scopes.

A quantized model puts its rules into the flags of its scope. Flax hands flags on to the
scopes of submodules and to those that lifted transforms make, so every layer below the
model reads the rules from its own scope. The flags also hold the path of the scope:
`nn.jit` keys its programs by the flags, and without the path it would run the program
of one block, with the recipes of that block, for every equal block.
"""

from typing import NamedTuple

from flax import core, linen as nn
from flax.traverse_util import flatten_dict

from ..recipes import (
    Rule,
    relative,
    warn_of_idle_rules,
    warn_of_no_fp8,
    warn_of_own_arrays,
)

_FLAG = "jaxfp8_rules"


class Region(NamedTuple):
    """The rules of a quantized model, and the path of that model."""

    rules: tuple[Rule, ...]
    root: tuple[str, ...]


class _RuledScope(core.Scope):
    """A scope whose children have their own paths in their flags."""

    def push(self, name=None, prefix="", reuse=False):
        return _ruled(super().push(name, prefix, reuse), regions(self))

    def rewound(self, rewind_rngs=False):
        return _ruled(super().rewound(rewind_rngs), regions(self))


def regions(scope: core.Scope | None) -> tuple[Region, ...]:
    """Return the regions around a scope, the outermost first."""
    return () if scope is None else scope.flags.get(_FLAG, ((), None))[0]


def add_rules(scope: core.Scope, rules: tuple[Rule, ...]) -> core.Scope:
    """Return the scope with a region of `rules` that begins at its path."""
    around, region = regions(scope), Region(rules, scope.path)
    return _ruled(scope, around if region in around else (*around, region))


def restore_path(scope: core.Scope | None) -> core.Scope | None:
    """Return a scope below rules with its own path in the flags, where a lifted
    transform left another path.
    """
    if regions(scope) and not isinstance(scope, _RuledScope):
        return _ruled(scope, regions(scope))
    return scope


def _ruled(scope, scope_regions) -> _RuledScope:
    """Return an alias of the scope: the same variables and counters, and other flags.

    Raises:
        ValueError: the scope belongs to a block in `nn.jit`, and the key of the block's
            program has another path.
    """
    _, path = scope.flags.get(_FLAG, ((), scope.path))
    if path != scope.path and "jit(" in "".join(scope.debug_path[-1:]):
        raise ValueError(
            f"linen.quantize: {'/'.join(scope.path)} is in nn.jit, inside of another "
            "transform that hides its path: nn.jit would run one program for all "
            "equal blocks; make the block in a method of its parent in place of a "
            "field, or take nn.jit away and use jax.jit around the step"
        )
    alias = object.__new__(_RuledScope)
    flags = core.freeze({**scope.flags, _FLAG: (scope_regions, scope.path)})
    vars(alias).update(vars(scope), flags=flags)
    return alias


def check_rules(model, ran, foreign) -> None:
    """Warn of rules of a bound model that give no FP8, or match no layer, among modules
    that may not have run too.

    Args:
        model: the model.
        ran: the modules that ran, by their paths: whether a rule gives a layer FP8,
            None for other modules.
        foreign: the paths of modules that are neither Flax's nor layers by a field.
    """
    # 1. Find what a rule may match: layers that ran, and modules that hold variables. A
    #    method may run some of these only, and a block that nn.jit has kept runs
    #    unseen.
    held = set()
    for tree in model.variables.values():
        for path in flatten_dict(tree):
            held.update((*model.path, *path[:i]) for i in range(len(path)))
    if not held:
        return
    rest = held - ran.keys()
    layers = [path for path, gets_fp8 in ran.items() if gets_fp8 is not None]
    # 2. See whether there is FP8, or could be in the rest.
    fp8_rules = []
    gets_fp8 = True in ran.values()
    for region in regions(model.scope):
        names = _names(rest, region.root)
        for rule in region.rules:
            if rule.recipe is not None:
                fp8_rules.append(rule)
                gets_fp8 |= rule.matches_a_product(names)
    if fp8_rules and not gets_fp8:
        name = type(model).__name__
        warn_of_no_fp8("linen.quantize", name, fp8_rules, _names(layers))
    # 3. See whether each rule matches, once for equal rules of models of one class;
    #    `init` may make a part of a model.
    elif not model.is_initializing() and not type(model)._fp8_has_checked:
        type(model)._fp8_has_checked = True
        _check_each_rule(model, layers, rest, foreign)


def _check_each_rule(model, layers, rest, foreign) -> None:
    """Warn of rules that match no layer, and of products that no rule reaches.

    Args:
        model: the model, bound.
        layers: the paths of layers that ran.
        rest: the paths of modules that did not run.
        foreign: see `check_rules`.
    """
    where, rules = "linen.quantize", model._fp8_rules
    names = {name: [name] for name in _names([*layers, *rest], model.path)}
    without_product = set()
    arrays = {}
    params = flatten_dict(nn.meta.unbox(model.variables.get("params", {})))
    for path, leaf in params.items():
        module = (*model.path, *path[:-1])
        if module in layers:
            continue
        without_product.add("/".join(path[:-1]))
        if module in foreign:
            arrays[path] = getattr(leaf, "shape", ())
    warn_of_idle_rules(where, type(model).__name__, rules, names, without_product)
    warn_of_own_arrays(where, rules, arrays)


def _names(paths, root: tuple[str, ...] = ()) -> list[str]:
    """Return the names that rules of a model at `root` have for modules at `paths`."""
    names = (relative(path, root) for path in paths)
    return [name for name in names if name is not None]
