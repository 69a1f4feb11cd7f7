"""The jaxprs inside of an equation: of a loop, a branch, a call."""

from collections.abc import Iterator
from typing import Any


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation, open."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)  # closed ones
            if hasattr(item, "eqns"):
                yield item
