"""Types that public signatures share."""

from typing import TypeVar

# A pytree or a model: the result has the type of the argument.
Tree = TypeVar("Tree")
