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

from ..recipes import Rule, is_foreign, warn_of_rules

_FLAG = "jaxfp8_rules"


class Region(NamedTuple):
    """The rules of a quantized model, and the path of that model."""

    rules: tuple[Rule, ...]
    root: tuple[str, ...]


class _RuledScope(core.Scope):
    """A scope whose children have their own paths in their flags."""

    def push(self, name=None, prefix="", reuse=False):
        return _ruled(super().push(name, prefix, reuse))

    def rewound(self, rewind_rngs=False):
        return _ruled(super().rewound(rewind_rngs))


def regions(scope: core.Scope | None) -> tuple[Region, ...]:
    """Return the regions around a scope, the outermost first."""
    return () if scope is None else scope.flags.get(_FLAG, ((), None))[0]


def add_rules(scope: core.Scope, rules: tuple[Rule, ...]) -> core.Scope:
    """Return the scope with a region of `rules` that begins at its path."""
    region = Region(rules, scope.path)
    return _ruled(scope) if region in regions(scope) else _ruled(scope, region)


def restore_path(scope: core.Scope | None) -> core.Scope | None:
    """Return a scope below rules with its own path in the flags, where a lifted
    transform left another path.
    """
    if regions(scope) and not isinstance(scope, _RuledScope):
        return _ruled(scope)
    return scope


def _ruled(scope, *added: Region) -> _RuledScope:
    """Return an alias of the scope: the same variables and counters, and flags with its
    own path and more regions.

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
    around = regions(scope)
    flags = core.freeze({**scope.flags, _FLAG: ((*around, *added), scope.path)})
    vars(alias).update(vars(scope), flags=flags)
    return alias


def check_rules(
    model: nn.Module, layers: dict[str, nn.Module], modules: dict[str, nn.Module]
) -> None:
    """Warn of rules of a bound model that give no FP8, or match no layer, among modules
    that may not have run too; once for equal rules of models of one class, when the
    model is applied, because `init` may make a part of it.

    Args:
        model: the model.
        layers, modules: the layers and the other modules that ran, by name.
    """
    cls = type(model)
    if model.is_initializing() or cls._fp8_has_checked:
        return
    # Find what a rule may match, layers that ran and modules that hold variables, and
    # the matrices of modules that are no layers. A method may run some modules only,
    # and a block that nn.jit has kept runs unseen.
    held, params = set(), {}
    variables = flatten_dict(nn.meta.unbox(model.variables))
    for (collection, *path), leaf in variables.items():
        held.update("/".join(path[:i]) for i in range(len(path)))
        name = "/".join(path[:-1])
        if collection == "params" and name not in layers:
            is_own = name in modules and is_foreign(modules[name])
            params[tuple(path)] = getattr(leaf, "shape", ()) if is_own else None
    if not held:
        return
    cls._fp8_has_checked = True
    names = {name: [name] for name in (*layers, *sorted(held - modules.keys()))}
    warn_of_rules("linen.quantize", cls.__name__, model._fp8_rules, names, params)
