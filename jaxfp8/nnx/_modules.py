"""edit_nodes: adds and removes members of the nodes of an NNX object."""

from flax import nnx


def edit_nodes(obj, edit) -> bool:
    """Replace the members of every node by `edit(members by name)`, in place; False where `obj` is of no such kind.

    Args:
        obj: an `nnx.Module` or `nnx.Optimizer`.
        edit: may add members and leave some out; those that stay are not touched.
    """
    if not isinstance(obj, (nnx.Module, nnx.Optimizer)):
        return False
    for _, node in list(nnx.iter_graph(obj)):
        if isinstance(node, (dict, nnx.State)):
            before, remove, put = dict(node), node.__delitem__, node.__setitem__
        elif isinstance(node, nnx.Module):
            before, remove, put = dict(vars(node)), node.__delattr__, node.__setattr__
        else:
            continue
        after = edit(before)
        for name in before.keys() - after.keys():
            remove(name)
        for name in after.keys() - before.keys():
            put(name, after[name])
    return True
