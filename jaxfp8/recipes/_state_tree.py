"""Find the leaves of a tree that are quantizer state, in dicts, Flax and NNX variables,
or dataclasses.

A quantizer is two leaves side by side that are named `{p}amax_history` and `{p}scale`:
Flax's variables (`input_amax_history`, `input_scale`) and the fields of
`QuantizerState` alike. A `scale` on its own, which normalization layers have, is a
parameter. All other leaves below the key `_overwrite_with_gradient`, in an NNX variable
of that name, or in a `DotGeneralState`, are state of a user's own quantizer. In a plain
dict of arrays no type tells such state from parameters.
"""

from typing import Any, NamedTuple

import jax

from ._state import DotGeneralState

# The collection of variables whose gradient is their next value. Flax's TrainState
# knows it by this name.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_HISTORY, _SCALE = "amax_history", "scale"


class Quantizer(NamedTuple):
    """The leaves of one quantizer.

    Attributes:
        name: the path of the quantizer, for messages: `Dense_0/Fp8DotGeneral_0/input`.
        positions: those of the history and the scale in `StateTree.leaves`.
        leaves: the history and the scale.
    """

    name: str
    positions: tuple[int, int]
    leaves: tuple[Any, Any]


class StateTree(NamedTuple):
    """A flat tree with its quantizers found.

    Attributes:
        treedef: the structure of the whole tree.
        leaves: all leaves, parameters included, in the order of `jax.tree.leaves`.
        paths: a tuple of strings for each leaf, the same whether NNX variables are
            boxed or pure.
        quantizers: all quantizers, in the order of their histories in `leaves`.
        unpaired: positions of the state leaves that belong to none of `quantizers`.
    """

    treedef: Any
    leaves: list
    paths: list[tuple[str, ...]]
    quantizers: list[Quantizer]
    unpaired: list[int]

    def positions(self) -> list[int]:
        """Return the positions of all state leaves, ascending."""
        positions = list(self.unpaired)
        for quantizer in self.quantizers:
            positions += quantizer.positions
        return sorted(positions)

    def replace(self, values: dict[int, Any]):
        """Return the tree with some leaves replaced; a value may be a subtree."""
        leaves = [values.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return self.treedef.unflatten(leaves)

    def by_path(self) -> dict[tuple[str, ...], Any]:
        """Return all leaves by their path."""
        return dict(zip(self.paths, self.leaves, strict=True))

    def name(self, position: int) -> str:
        """Return the path of a leaf, for messages."""
        return "/".join(self.paths[position])


def flatten(tree) -> StateTree:
    """Flatten any pytree and find its quantizer state.

    Args:
        tree: a state collection, a variables dict, an NNX state or module, a
            `DotGeneralState`, or a pytree that mixes parameters with any of these.

    Raises:
        ValueError: `nn.WeightNorm` has made a parameter of quantizer state.
    """
    leaves, paths, state = [], [], set()
    flatten_with_path = jax.tree_util.tree_flatten_with_path
    for path, node in flatten_with_path(tree, is_leaf=_is_state)[0]:
        inside = flatten_with_path(node)[0] if _is_state(node) else [((), node)]
        for rest, leaf in inside:
            names = _names((*path, *rest))
            if _is_state(node) or OVERWRITE_WITH_GRADIENT in names:
                state.add(len(leaves))
            leaves.append(leaf)
            paths.append(names)
    _refuse_weight_norm(paths)
    quantizers = _pairs(paths, leaves)
    for quantizer in quantizers:
        state.difference_update(quantizer.positions)
    treedef = jax.tree.structure(tree)
    return StateTree(treedef, leaves, paths, quantizers, sorted(state))


def _refuse_weight_norm(paths) -> None:
    for path in paths:
        if path and path[-1].endswith(f"{_HISTORY}/{_SCALE}"):
            raise ValueError(
                "nn.WeightNorm: variable_filter: expected a filter of kernels, got one "
                f"that matches FP8 state, and made of it {'/'.join(path)}: name the "
                f"kernel alone, variable_filter={{'layer_instance/kernel'}}"
            )


def check_slots(where: str, history, scale) -> None:
    """Raise unless the slots of a history are on its last axis; all other axes are
    rows.

    Args:
        where: the function, the argument and the quantizer, for the message.
        history, scale: the arrays of the quantizer.

    Raises:
        ValueError: they are not, or the scale does not have one element for each row.
    """
    if not history.shape or scale.shape != (*history.shape[:-1], 1):
        raise ValueError(
            f"{where}: expected a history (..., H) and a scale (..., 1), got shapes "
            f"{history.shape} and {scale.shape}; transforms of layers stack state on "
            "axis 0"
        )


def is_variable(x) -> bool:
    """Tell whether `x` is an NNX variable of state: recipes know no NNX, but its class
    has the collection's name.
    """
    return type(x).__name__ == OVERWRITE_WITH_GRADIENT


def _is_state(x) -> bool:
    """Tell whether all leaves of `x` are state."""
    return isinstance(x, DotGeneralState) or is_variable(x)


def _names(path) -> tuple[str, ...]:
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    if names[-1:] == ["value"]:
        # The box of an NNX variable, which a checkpoint that is restored without a
        # target has as a dict.
        is_attribute = isinstance(path[-1], jax.tree_util.GetAttrKey)
        if is_attribute or "".join(names[-2:-1]).endswith((_HISTORY, _SCALE)):
            names.pop()
    return tuple(names)


def _pairs(paths, leaves) -> list[Quantizer]:
    where = {path: i for i, path in enumerate(paths)}
    pairs = []
    for i, path in enumerate(paths):
        *parent, leaf = path or ("",)
        prefix = leaf.removesuffix(_HISTORY)
        is_history = prefix != leaf and (not prefix or prefix.endswith("_"))
        scale = where.get((*parent, prefix + _SCALE))
        if is_history and scale is not None:
            name = "/".join(filter(None, (*parent, prefix.rstrip("_"))))
            pairs.append(Quantizer(name, (i, scale), (leaves[i], leaves[scale])))
    return pairs
