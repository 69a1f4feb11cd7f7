"""The jaxprs inside of an equation, such as a loop, a branch or a call."""

from collections.abc import Iterator
from typing import Any


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation; closed jaxprs are opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)  # opens a closed jaxpr
            if hasattr(item, "eqns"):
                yield item
