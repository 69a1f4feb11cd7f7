"""NNX for jaxfp8.inspect: turn functions of modules into functions of arrays, and name
the layers in programs.
"""

import dataclasses
import functools

import jax
from flax import nnx

from .._jax._trees import is_array
from ..dot import _contexts
from ._dot_general import _Fp8Product
from ._layers_by_rule import subclass
from ._quantize_by_rules import layers, product


def function_of_arrays(fn, args, kwargs):
    """Turn `fn(*args, **kwargs)` into `(function of a tree of arrays, the tree)`, whose
    modules name their programs; `fn` may be a module itself.
    """
    leaves, tree = jax.tree.flatten((fn, args, kwargs), is_leaf=_is_object)
    arrays = {}
    for i, leaf in enumerate(leaves):
        if is_array(leaf):
            arrays[i], leaves[i] = leaf, None
    graphdef, state = nnx.split(leaves)
    # nnx.merge makes the modules anew, from these classes, whose calls put the path of
    # the module into the program.
    graphdef = dataclasses.replace(
        graphdef, nodes=list(map(_with_named_class, graphdef.nodes))
    )

    def run(state_and_arrays):
        state, arrays = state_and_arrays
        leaves = nnx.merge(graphdef, state)
        for top in filter(_is_object, leaves):
            _set_names(top)
        for i, array in arrays.items():
            leaves[i] = array
        fn, args, kwargs = tree.unflatten(leaves)
        return fn(*args, **kwargs)

    return run, (state, arrays)


def traced(fn, arrays):
    """Return the jaxpr of `fn(arrays)`; `fn` may return any object."""

    # JAX would refuse a result that is not an array. Without results all equations
    # still stay in the jaxpr.
    def without_result(arrays):
        fn(arrays)

    return jax.make_jaxpr(without_result)(arrays).jaxpr


def _is_object(x) -> bool:
    return isinstance(x, (nnx.Module, nnx.Optimizer))


def _with_named_class(node):
    """Exchange the class of a module in an `nnx.GraphDef` for that of `_named`; other
    nodes stay.
    """
    cls = getattr(node, "type", None)
    is_module = isinstance(cls, type) and issubclass(cls, nnx.Module)
    if not is_module or not any("__call__" in vars(base) for base in cls.__mro__):
        return node
    return dataclasses.replace(node, type=_named(cls), metadata=_named(cls))


@functools.cache
def _named(base):
    """Return a subclass of a module class; its `__call__` runs in scopes with the path
    of the instance.
    """

    def __call__(self, *args, **kwargs):
        path = self.inspected_path
        if path in (None, _contexts.current_layer()):
            return base.__call__(self, *args, **kwargs)
        with _contexts.layer(path), jax.named_scope(path):
            return base.__call__(self, *args, **kwargs)

    return subclass(base, __call__=__call__, inspected_path=None)


def _set_names(top) -> None:
    """Set the path of each module. A product has the path of the layer that holds it,
    which may call it in any method; where several do, the product has the name of the
    layer that is called.
    """
    holders = {}
    for path, layer, _ in layers(top):
        holders.setdefault(id(product(layer)), []).append(path)
    for path, module in list(nnx.iter_modules(top)):
        paths = [path]
        if isinstance(module, _Fp8Product):
            paths = holders.get(id(module), [])
        if callable(module) and len(paths) == 1:
            module.inspected_path = "/".join(map(str, paths[0]))
