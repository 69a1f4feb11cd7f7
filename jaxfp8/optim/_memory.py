"""memory: how many bytes a parameter the state of an optimizer takes."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from .._jax._table import aligned
from ._moments import Moment
from ._state import leaves


@dataclasses.dataclass(frozen=True, repr=False)
class Memory:
    """The bytes of an optimizer's state; `str` and `repr` are a table of them.

    Attributes:
        rows: a dict for each kind of leaf, the largest first, and one for all: `kind`, a class of moments in FP8 or a
            dtype; `leaves`, `elements` and `bytes`, numbers; `bytes_per_parameter`.
    """

    rows: list[dict[str, Any]]

    def __repr__(self) -> str:
        lines = [("kind", "leaves", "elements", "bytes", "bytes per parameter")]
        lines += [(*map(str, list(row.values())[:-1]), f"{row['bytes_per_parameter']:.3f}") for row in self.rows]
        return aligned(lines, right=1)


def memory(opt_state: Any, params: Any) -> Memory:
    """Add up the bytes of an optimizer's state, by kind.

        print(jaxfp8.optim.memory(opt_state, params))

    Args:
        opt_state: of any optax transformation: arrays, or the shapes and dtypes that `jax.eval_shape` returns. The
            bytes are those of whole arrays, over all devices.
        params: the parameters that it is the state of, whose elements are counted.

    Returns:
        The `Memory`.

    Raises:
        ValueError: `params` has no elements.
    """
    parameters = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params))
    if not parameters:
        raise ValueError("jaxfp8.optim.memory: params: expected arrays with elements, got none; pass the parameters")
    # A moment in FP8 is one leaf, of three arrays.
    by_kind: dict[str, list] = {}
    for leaf in leaves(opt_state):
        kind = type(leaf).__name__ if isinstance(leaf, Moment) else jax.numpy.result_type(leaf).name
        by_kind.setdefault(kind, []).append(leaf)
    rows = [_row(kind, parameters, group) for kind, group in by_kind.items()]
    rows.sort(key=lambda row: -row["bytes"])
    return Memory([*rows, _row("all", parameters, [leaf for group in by_kind.values() for leaf in group])])


def _row(kind, parameters, group) -> dict[str, Any]:
    elements = sum(math.prod(np.shape(leaf.data if isinstance(leaf, Moment) else leaf)) for leaf in group)
    size = sum(math.prod(np.shape(x)) * jax.numpy.result_type(x).itemsize for x in jax.tree.leaves(group))
    return {
        "kind": kind,
        "leaves": len(group),
        "elements": elements,
        "bytes": size,
        "bytes_per_parameter": size / parameters,
    }
