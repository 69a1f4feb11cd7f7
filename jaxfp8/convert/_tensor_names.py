"""The names that the parameters of a model have in a safetensors file."""

import re
from collections.abc import Callable, Mapping

from ._tree import Path, at

# The names of Flax for parameters that PyTorch calls "weight".
_WEIGHTS = ("kernel", "embedding", "scale")
# A name: the texts between the places of an index.
Template = tuple[str, ...]
Name = str | tuple[str, ...] | None


class Names:
    """Find the names of a parameter in the file.

    Attributes:
        where: the function, for messages.
        names: its argument `names`: a dict of expressions, a function of a path, or None; see `to_safetensors`.
        unused: the expressions that have decided about no parameter so far.
    """

    def __init__(self, where: str, names: Mapping[str, Name] | Callable[[str], Name] | None):
        self.where, self.names = where, names
        self.unused = {} if names is None or callable(names) else dict.fromkeys(names)

    def __call__(self, path: Path) -> tuple[Template, ...]:
        """Return a template for each part of a parameter's rows; an empty tuple where `names` leaves it out."""
        if self.names is None:
            return ((".".join((*path[:-1], "weight" if path[-1] in _WEIGHTS else path[-1])),),)
        if callable(self.names):
            return self._templates(path, self.names(at(path)), str)
        for pattern, name in self.names.items():
            if match := re.fullmatch(pattern, at(path)):
                self.unused.pop(pattern, None)
                # Groups are names of the model: braces in them are no places of an index.
                return self._templates(path, name, match.expand)
        raise ValueError(f"{self.where}: names: {at(path)} matches no expression; map it to None to leave it out")

    def _templates(self, path, name, expand) -> tuple[Template, ...]:
        parts = () if name is None else (name,) if isinstance(name, str) else tuple(name)
        templates = tuple(tuple(map(expand, part.split("{}"))) for part in parts)
        if len(set(map(len, templates))) > 1:
            raise ValueError(f"{self.where}: names: {at(path)}: expected as many {{}} in each of {parts}")
        return templates

    def check_used(self) -> None:
        """Raise a ValueError for an expression that decided about no parameter."""
        if self.unused:
            raise ValueError(
                f"{self.where}: names: {list(self.unused)} match no parameter, or none that is left by those before"
            )


def filled(template: Template, index: tuple[int, ...]) -> str:
    """Return the name of one of stacked parameters."""
    return template[0] + "".join(f"{i}{text}" for i, text in zip(index, template[1:], strict=True))
