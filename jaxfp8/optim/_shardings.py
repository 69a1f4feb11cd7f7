"""shardings: where the state of an optimizer lies on a mesh."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ._moments import block_sharding
from ._quantized import is_moment


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
    # 1. Collect the parameters by their paths and shapes; the path of a leaf of state
    #    ends with that of its parameter.
    placed = {}
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
        if names[:1] == ("params",):
            names = names[1:]
        placed[names, leaf.shape] = leaf.sharding
    if not placed:
        raise ValueError(
            "jaxfp8.optim.shardings: params: expected arrays on a mesh, got none"
        )
    mesh = next(iter(placed.values())).mesh

    # 2. Give each leaf the sharding of its parameter; amaxes and exponents get the mesh
    #    axes that divide their shape.
    def sharding(path, leaf):
        names = _names(path)
        whole = leaf.data if is_moment(leaf) else leaf
        param_sharding = NamedSharding(mesh, PartitionSpec())
        # The longest path that a parameter has comes last, and wins.
        for i in reversed(range(len(names) + 1)):
            key = names[i:], whole.shape
            param_sharding = placed.get(key, param_sharding)
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
