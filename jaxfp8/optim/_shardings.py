"""shardings and memory: where the state of an optimizer lies on a mesh, and how many
bytes it takes.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._jax._table import table
from ._moments import block_sharding
from ._quantized import is_moment, leaves


def shardings(opt_state: Any, params: Any) -> Any:
    """Return shardings that place an optimizer's state like its parameters.

        shapes = jax.eval_shape(tx.init, params)
        shardings = jaxfp8.optim.shardings(shapes, params)
        opt_state = jax.jit(tx.init, out_shardings=shardings)(params)

    A leaf of the state gets the sharding of the parameter that has the same shape and
    whose path is the end of the leaf's path. Amaxes and exponents of a moment in FP8
    get the sharding of its codes, without axes of the mesh that do not divide the
    number of blocks. All other leaves are replicated.

    Args:
        opt_state: the state of any optax transformation, or its shapes.
        params: the parameters, arrays on one mesh with a `NamedSharding` each; or their
            shapes with such shardings.

    Returns:
        A tree in the structure of `opt_state`, for `out_shardings`, `jax.device_put`
        and checkpoints.

    Raises:
        ValueError: a parameter has no NamedSharding, or there are no parameters.
    """
    # 1. Collect the parameters by their paths; the path of a leaf of state ends with
    #    that of its parameter.
    by_path = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            raise ValueError(
                "jaxfp8.optim.shardings: params: expected a NamedSharding of each "
                f"leaf, got {getattr(leaf, 'sharding', None)} of "
                f"params{jax.tree_util.keystr(path)}; put them on a mesh first"
            )
        names = _names(path)
        # `jaxfp8.train.optimizer` gives optax the collection "params" of the variables
        # of Linen.
        by_path[names[1:] if names[:1] == ("params",) else names] = leaf
    if not by_path:
        raise ValueError(
            "jaxfp8.optim.shardings: params: expected arrays on a mesh, got none"
        )
    mesh = next(iter(by_path.values())).sharding.mesh

    # 2. Give each leaf the sharding of its parameter; amaxes and exponents get the mesh
    #    axes that divide their shape.
    def sharding(path, leaf):
        names = _names(path)
        whole = leaf.data if is_moment(leaf) else leaf
        param_sharding = NamedSharding(mesh, PartitionSpec())
        # The longest path that a parameter has comes last, and wins.
        for i in reversed(range(len(names) + 1)):
            owner = by_path.get(names[i:])
            if owner is not None and owner.shape == whole.shape:
                param_sharding = owner.sharding
        if not is_moment(leaf):
            return param_sharding
        blocks_sharding = block_sharding(param_sharding, leaf.amax.shape)
        return type(leaf)(param_sharding, blocks_sharding, blocks_sharding)

    return jax.tree_util.tree_map_with_path(sharding, opt_state, is_leaf=is_moment)


def _names(path):
    """Return a path without the kinds of its keys, which differ in a state that was
    restored, and without boxes.
    """
    box = jax.tree_util.GetAttrKey("value")  # of flax.linen.Partitioned
    return tuple(
        jax.tree_util.keystr((key,), simple=True) for key in path if key != box
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Memory:
    """The bytes of an optimizer's state; `str` and `repr` give a table of `rows`.

    Attributes:
        rows: a dict for each kind of leaf, the largest kind first, then a dict for all
            leaves. `kind` is a class of moments in FP8 or a dtype; `leaves`, `elements`
            and `bytes` are counts; `bytes_per_parameter` is a float.
    """

    rows: list[dict[str, Any]]

    def __repr__(self) -> str:
        head = "bytes per parameter"
        rows = [row | {head: row["bytes_per_parameter"]} for row in self.rows]
        return table(rows, ("kind", "leaves", "elements", "bytes", head), ".3f")


def memory(opt_state: Any, params: Any) -> Memory:
    """Add up the bytes of an optimizer's state, by kind.

        print(jaxfp8.optim.memory(opt_state, params))

    Args:
        opt_state: the state of any optax transformation: arrays, or the shapes and
            dtypes that `jax.eval_shape` returns. The bytes are those of whole arrays,
            over all devices.
        params: the parameters of the optimizer, whose elements are counted.

    Returns:
        The `Memory`.

    Raises:
        ValueError: `params` has no elements.
    """
    parameters = sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(params))
    if not parameters:
        raise ValueError(
            "jaxfp8.optim.memory: params: expected arrays with elements, got none; "
            "pass the parameters"
        )
    # A moment in FP8 counts as one leaf, which has three arrays.
    by_kind, all_leaves = {}, leaves(opt_state)
    for leaf in all_leaves:
        kind = type(leaf).__name__
        if not is_moment(leaf):
            kind = jax.numpy.result_type(leaf).name
        by_kind.setdefault(kind, []).append(leaf)
    rows = [_row(kind, parameters, group) for kind, group in by_kind.items()]
    rows.sort(key=lambda row: -row["bytes"])
    rows.append(_row("all", parameters, all_leaves))
    return Memory(rows)


def _row(kind, parameters, group):
    elements = size = 0
    for leaf in group:
        elements += math.prod(np.shape(leaf.data if is_moment(leaf) else leaf))
        for x in jax.tree.leaves(leaf):
            size += math.prod(np.shape(x)) * jax.numpy.result_type(x).itemsize
    return {
        "kind": kind,
        "leaves": len(group),
        "elements": elements,
        "bytes": size,
        "bytes_per_parameter": size / parameters,
    }
