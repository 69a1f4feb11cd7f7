"""memory: report the bytes of an optimizer's state, in total and for each parameter."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from .._jax._table import aligned
from ._moments import Moment
from ._quantized import leaves


@dataclasses.dataclass(frozen=True, repr=False)
class Memory:
    """The bytes of an optimizer's state; `str` and `repr` give a table of `rows`.

    Attributes:
        rows: a dict for each kind of leaf, the largest kind first, then a dict for all leaves. `kind` is a class of
            moments in FP8 or a dtype; `leaves`, `elements` and `bytes` are counts; `bytes_per_parameter` is a float.
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
        opt_state: the state of any optax transformation: arrays, or the shapes and dtypes that `jax.eval_shape`
            returns. The bytes are those of whole arrays, over all devices.
        params: the parameters of the optimizer, whose elements are counted.

    Returns:
        The `Memory`.

    Raises:
        ValueError: `params` has no elements.
    """
    parameters = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params))
    if not parameters:
        raise ValueError("jaxfp8.optim.memory: params: expected arrays with elements, got none; pass the parameters")
    # A moment in FP8 counts as one leaf, which has three arrays.
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
