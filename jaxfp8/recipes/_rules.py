"""Rules by layer: which recipe a layer runs, by the path of the layer. Linen and NNX
read the same lists.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._jax import _warnings
from ._recipe import HighPrecision, Recipe, checked
from ._warning import FP8StateWarning


@dataclasses.dataclass(frozen=True)
class NamedLayers:
    """Layers of a module that run together, for a rule: the result of `Dense.of` or
    `GatedMLP.of`.

    Attributes:
        names: the names of the layers in the module; of a GatedMLP gate, up and down.
        recipe: how operands of the layers become FP8.
        activation: the activation of a GatedMLP; None for layers of one x.
    """

    names: tuple[str, ...]
    recipe: Recipe
    activation: Any = None

    @property
    def kind(self) -> str:
        """Say what they run as, for messages."""
        return "one product" if self.activation is None else "a GatedMLP"


class Rule(NamedTuple):
    """A rule: layers whose path the regex matches as a whole run `recipe`.

    Attributes:
        path: a regex for `re.fullmatch` on the path of a layer, its parts joined by
            `/`; with `layers` on the path of the module that holds the layer.
        recipe: how operands become FP8; None for high precision.
        layers: the layers of a module that the rule is for, where they run together.
    """

    path: str
    recipe: Any
    layers: NamedLayers | None = None

    def matches(self, paths: Iterable[str]) -> bool:
        """Tell whether the rule matches one of `paths`."""
        for path in paths:
            holder, _, name = path.rpartition("/")
            if self.layers is not None:
                path = holder if name in self.layers.names else None
            if path is not None and re.fullmatch(self.path, path):
                return True
        return False

    @property
    def layer_recipe(self) -> Recipe:
        """The recipe for the field of a layer, in which `HighPrecision()` stands for
        None.
        """
        return HighPrecision() if self.recipe is None else self.recipe


# The type of the argument `rules` of `linen.quantize` and `nnx.quantize`.
Rules = Sequence[Rule | tuple[str, Recipe | NamedLayers | None]]


def checked_rules(op: str, rules) -> tuple[Rule, ...]:
    """Return the rules of a list of `(path_regex, recipe or None)`, the argument
    `rules` of the function `op`.

    Raises:
        TypeError: `rules` is not a list of pairs, a path is not a string, or a recipe
            is not a Recipe or does not hash.
        ValueError: a regex does not compile.
    """
    if isinstance(rules, (str, dict)) or not hasattr(rules, "__iter__"):
        raise TypeError(
            f"{op}: rules: expected a list of (path_regex, recipe or None), got "
            f"{rules!r}"
        )
    return tuple(_checked(f"{op}: rules[{i}]", rule) for i, rule in enumerate(rules))


def _checked(where: str, rule) -> Rule:
    if not isinstance(rule, Rule):
        if not isinstance(rule, (tuple, list)) or len(rule) != 2:
            raise TypeError(
                f"{where}: expected a pair (path_regex, recipe or None), got {rule!r}"
            )
        path, recipe = rule
        rule = Rule(path, recipe)
        if isinstance(recipe, NamedLayers):
            rule = Rule(path, recipe.recipe, layers=recipe)
    # Compile the regex now: otherwise it would raise while a model is traced, far from
    # the list that it stands in.
    try:
        re.compile(rule.path)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{where}: path_regex: expected a regular expression such as 'block0/.*', "
            f"got {rule.path!r}: {error}"
        ) from None
    if rule.recipe is not None:
        checked(f"{where}: recipe (None is high precision)", rule.recipe)
    return rule


def kind(value) -> str:
    """Describe a value in a message; it may be a whole model, whose repr is pages
    long.
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def some(names: list[str], most: int = 8) -> str:
    """Return the first of some names for a message, and how many there are beside
    them.
    """
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + rest


def is_foreign(module: Any) -> bool:
    """Tell whether the class of a module is neither Flax's nor ours."""
    return type(module).__module__.partition(".")[0] not in ("flax", "jaxfp8")


def warn_of_rules(
    where: str,
    model: str,
    rules: Sequence[Rule],
    layers: dict[str, list[str]],
    params: dict[tuple, tuple[int, ...] | None],
) -> None:
    """Warn of rules that give no layer of a model FP8, of rules that match no layer,
    and of matrices that the code of a module multiplies itself.

    Args:
        where: the function that the rules were given to.
        model: the name of the model's class.
        rules: the rules.
        layers: the names of each layer, by its path.
        params: the parameters of all other modules, by their paths: the shape where
            the class of the module is neither Flax's nor ours, else None.
    """
    paths = [rule.path for rule in rules if rule.recipe is not None]
    deciding = {first_match(rules, names) for names in layers.values()} - {None}
    if paths and all(rules[i].recipe is None for i in deciding):
        message = f"none of {paths} gives a layer of {model} FP8"
        _warn_of_paths(where, message, layers)
        return
    # 1. Rules that match no layer. Modules without a product, as embeddings and norms,
    #    are in high precision, as a rule may say.
    names = [name for names in layers.values() for name in names]
    without_product = {"/".join(map(str, path[:-1])) for path in params}
    idle = []
    for rule in rules:
        is_said = rule.recipe is None and rule.matches(without_product)
        if not is_said and not rule.matches(names):
            idle.append(rule.path)
    if idle:
        message = f"no layer of {model} matches {some(idle)}"
        _warn_of_paths(where, message, layers)
    # 2. Matrices that rules ask FP8 for.
    matrices = {path: shape for path, shape in params.items() if shape}
    largest = []
    for path, shape in sorted(matrices.items(), key=lambda item: -math.prod(item[1])):
        index = first_match(rules, layer_names(path[:-1], False))
        is_asked_for = index is not None and rules[index].recipe is not None
        name = "/".join(map(str, path))
        # An embedding is looked up, or added to.
        if is_asked_for and len(shape) > 1 and 1 not in shape and "emb" not in name:
            largest.append(f"{name} {'x'.join(map(str, shape))}")
    if largest:
        names = some(largest, 4)
        _warnings.warn(
            f"{where}: rules: no rule reaches the products that a module's own code "
            f"makes, as with {names}: where these are multiplied, use "
            f"jaxfp8.{where.partition('.')[0]}.Fp8Einsum, or give their modules the "
            "recipe None; see jaxfp8.report",
            FP8StateWarning,
        )


def _warn_of_paths(where, message, layers) -> None:
    _warnings.warn(
        f"{where}: rules: {message}: a regex has to match the whole path of a layer, "
        f"as '.*Dense_0' does. The layers are {some(list(layers)) or 'none'}; see "
        "jaxfp8.report",
        FP8StateWarning,
    )


def first_match(rules, paths) -> int | None:
    """Return the index of the first rule that matches one of `paths`, all names of one
    layer.
    """
    for i, rule in enumerate(rules):
        if rule.matches(paths):
            return i
    return None


def module_rule(rules: Sequence[Rule], path: tuple, root: tuple = ()) -> Rule | None:
    """Return the rule that runs layers of the module at `path` together: the one that
    decides about all of them; None where no rule does.
    """
    for i, rule in enumerate(rules):
        if rule.layers is not None:
            deciding = set()
            for name in rule.layers.names:
                names = layer_names((*path, name), False, root)
                deciding.add(first_match(rules, names))
            if deciding == {i}:
                return rule
    return None


def layer_names(path: tuple, is_product: bool, root: tuple = ()) -> list[str]:
    """Return the names that rules have for the layer at `path`, in a model at `root`:
    the path below the root, joined by `/`; empty outside of the model.

    A product also answers to the path of the layer around it.
    """
    if path[: len(root)] != root:
        return []
    parts = list(map(str, path[len(root) :]))
    names = ["/".join(parts)]
    if is_product and parts:
        names.append("/".join(parts[:-1]))
    return names
