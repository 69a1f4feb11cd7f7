"""Flax's own FP8 classes: the same variables under other module names."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import traverse_util

from ..recipes import OVERWRITE_WITH_GRADIENT
from ..train import unstack_state
from ._tree import Path, as_dtype, at

_MODULE = "Fp8DotGeneral"
_FLAX = ("Fp8DirectDotGeneralOp", "Fp8DotGeneralOp")
_FNUZ_MODULE = "NANOOFp8DotGeneralOp"
_KERNEL = ("kernel_amax_history", "kernel_scale")
_INPUT = ("input_amax_history", "input_scale")
_OUTPUT_GRAD = ("output_grad_amax_history", "output_grad_scale")
_NAMES = _INPUT + _KERNEL + _OUTPUT_GRAD
_EXCHANGED = dict(zip(_NAMES, _KERNEL + _INPUT + _OUTPUT_GRAD, strict=True))


def from_flax(
    variables: Mapping[str, Any], *, swapped: Iterable[str] = ()
) -> dict[str, Any]:
    """Convert state of Flax's `nn.Fp8DotGeneral`, `nn.Fp8DotGeneralOp` and
    `nn.Fp8Einsum` for jaxfp8's classes.

    Flax and jaxfp8 store the same six arrays with the same meaning; histories and
    scales are kept to the bit. Only the names of modules differ:

        Flax                                                  jaxfp8
        <layer>/Fp8DirectDotGeneralOp_0 (nn.Fp8DotGeneral)    <layer>/Fp8DotGeneral_0
        <layer>/Fp8DotGeneralOp_0                             <layer>/Fp8DotGeneral_0
        <layer>/Fp8Einsum_0, and any name the user has given  the same

    **Einsum.** `nn.Fp8Einsum` stores the kernel's amaxes as `input_…` and those of x as
    `kernel_…` wherever `jnp.einsum` exchanges the operands: when the output has the
    kernel's own dimensions before those of x, as in `"bsd,edf->ebsf"`. jaxfp8 keeps x
    in `input_…` whatever the equation. The tree does not tell the equation, so name
    these modules in `swapped`.

    Args:
        variables: all variables of a model (other collections are kept as they are), or
            its `_overwrite_with_gradient` collection alone. Leaves may be stacked
            (`nn.scan`, `nn.vmap`).
        swapped: regular expressions; modules whose "/"-joined path one of them matches
            in full have `input` and `kernel` exchanged.

    Returns:
        Nested dicts with state in float32 (a tree that was cast to bfloat16 is
        widened).

    Raises:
        ValueError: the tree has no FP8 state, an incomplete module, two modules that
            would get one name, or NANOO state, whose scales refer to the fnuz formats
            of AMD; or a pattern matches no module.
        TypeError: `variables` is not a dict, or a leaf is not a floating array.
    """

    return _convert("from_flax", variables, dict.fromkeys(_FLAX, _MODULE), swapped)


def to_flax(
    variables: Mapping[str, Any], *, swapped: Iterable[str] = ()
) -> dict[str, Any]:
    """Convert jaxfp8's state for Flax's `nn.Fp8DotGeneral` and `nn.Fp8Einsum`, the
    inverse of `from_flax`.

    Args:
        variables: all variables of a model, or its `_overwrite_with_gradient`
            collection alone.
        swapped: as for `from_flax`; regular expressions for paths of `variables`.

    Returns:
        Nested dicts with state in float32.

    Raises:
        ValueError, TypeError: as `from_flax`.
    """
    return _convert("to_flax", variables, {_MODULE: _FLAX[0]}, swapped)


def _convert(where, variables, classes, swapped):
    """Convert state whose modules are named after a class in `classes`, which gives the
    class of the result.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"{where}: variables: expected a dict of variables or of one collection, "
            f"got {type(variables).__name__}; of a TrainState pass `.params`"
        )
    # Variables without the collection of state are that collection itself.
    state = variables.get(OVERWRITE_WITH_GRADIENT, variables)
    leaves = traverse_util.flatten_dict(unstack_state(state))
    products = {path[:-1] for path in leaves if path[-1] in _NAMES}
    if not products:
        raise ValueError(
            f"{where}: variables: expected a collection {OVERWRITE_WITH_GRADIENT!r} "
            f"with FP8 state, or such a collection itself, got {sorted(variables)}"
        )
    # Rename the state. Leaves that are no state stay where they are.
    converted = {}
    unused = set(swapped)
    for path, leaf in leaves.items():
        *product, name = path
        if name in _NAMES:
            if missing := {(*product, each) for each in _NAMES} - leaves.keys():
                raise ValueError(
                    f"{where}: {at(min(missing))}: missing beside the other state; "
                    "drop the module from the tree to start it with empty state"
                )
            leaf = as_dtype(f"{where}: {at(path)}", leaf, jnp.float32)
            matching = {each for each in swapped if re.fullmatch(each, at(product))}
            unused -= matching
            if matching:
                name = _EXCHANGED[name]
            path = (*_renamed(where, product, classes), name)
        if path in converted:
            raise ValueError(
                f"{where}: {at(path)}: two quantizers would get this name; rename one "
                "module first"
            )
        converted[path] = leaf
    # A pattern that matches nothing is a typo: x and the kernel of that einsum would
    # have each other's state.
    if unused:
        raise ValueError(
            f"{where}: swapped: {sorted(unused)} match no module with FP8 state; there "
            f"are {sorted(map(at, products))}"
        )
    collection = traverse_util.unflatten_dict(converted)
    if state is variables:
        return collection
    return {**variables, OVERWRITE_WITH_GRADIENT: collection}


def _renamed(where, path: Path, classes) -> Path:
    # Flax names a module after its class unless the user has; names of users are the
    # same in both libraries.
    if not path:
        return path
    name, number = re.fullmatch(r"(.*?)(_\d+)?", path[-1]).groups(default="")
    if name == _FNUZ_MODULE:
        raise ValueError(
            f"{where}: {at(path)}: expected state of float8_e4m3fn and "
            "float8_e5m2, got NANOO state, whose scales refer to float8_e4m3fnuz "
            "(largest value 240); drop the module from the tree to start it with "
            "empty state"
        )
    return (*path[:-1], classes.get(name, name) + number)
