"""Types that public signatures share."""

from typing import TypeVar

# A pytree, or a model, that comes back as what it was.
Tree = TypeVar("Tree")
