"""What jaxfp8.inspect needs of NNX: functions of modules as functions of arrays, and the names of layers."""

import contextlib
import functools

import jax
from flax import nnx

from .._jax._arrays import split_arrays
from ..dot import _scopes, _wrapping
from ..recipes import first_match
from ._dot_general import _Fp8Product
from ._quantize import RULES, layers, names, operation, product


def is_model(x) -> bool:
    return isinstance(x, nnx.Module)


def of_arrays(fn, args, kwargs):
    """`(function of a tree of arrays, the tree)` for `fn(*args, **kwargs)`; NNX modules in it name what they run."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
    objects = tuple(filter(_is_object, leaves))
    graphdef, state = nnx.split(objects)
    arrays, joined = split_arrays([leaf for leaf in leaves if not _is_object(leaf)])

    def run(state_and_arrays):
        state, arrays = state_and_arrays
        objects, others = nnx.merge(graphdef, state), iter(joined(arrays))
        name_modules(objects)
        objects = iter(objects)
        args, kwargs = tree.unflatten([next(objects) if _is_object(leaf) else next(others) for leaf in leaves])
        return fn(*args, **kwargs)

    return run, (state, arrays)


def _is_object(x) -> bool:
    return isinstance(x, (nnx.Module, nnx.Optimizer))


def name_modules(tree) -> None:
    """Has every module in a tree say its path while it is called: its class becomes a subclass of itself."""
    for top in filter(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)):
        held = {id(layer) for _, layer, attribute in layers(top) if attribute is None}
        _note_rules(top)
        for path, module in list(nnx.iter_modules(top)):
            if isinstance(module, _Fp8Product) and id(module) not in held:
                continue  # the layer that holds it names it
            if path and callable(module):
                module.inspected_path = "/".join(map(str, path))
                object.__setattr__(module, "__class__", _named(type(module)))


def _note_rules(top) -> None:
    """Has layers that run no FP8 because of a rule know its index."""
    for _, model in list(nnx.iter_modules(top)):
        rules = getattr(model, RULES, ())
        for path, layer, _ in layers(model) if rules else ():
            index = first_match(rules, names(path, layer), operation(layer))
            if index is not None and rules[index].recipe is None and product(layer) is None:
                layer.inspected_rule = index


@functools.cache
def _named(base):
    def __call__(self, *args, **kwargs):
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.named_scope(self.inspected_path))
            stack.enter_context(_wrapping.layer(self.inspected_path))
            if getattr(self, "inspected_rule", None) is not None:
                stack.enter_context(_scopes.high_precision(f"rule {self.inspected_rule} says None"))
            return base.__call__(self, *args, **kwargs)

    same = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (base,), {"__call__": __call__, **same})
