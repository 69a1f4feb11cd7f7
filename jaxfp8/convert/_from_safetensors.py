"""Fill a model with the weights of safetensors files, to train on from them or to
freeze them.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import core, nnx, traverse_util
from flax.core import meta

from ..dot import _frozen
from ..linen._freeze import PARAMS
from ..recipes import _state_tree, some
from ._frozen_kernels import PLACEHOLDERS, parameters
from ._read_safetensors import (
    Name,
    Names,
    StoredTensor,
    Template,
    filled,
    read_safetensors,
)
from ._tree import Path, at

_CODES = (
    _frozen.KERNEL,
    _frozen.KERNEL_SCALE_INV,
    _frozen.INPUT_SCALE,
    _frozen.INPUT_SCALE_INV,
)
_FLOATS = ("F8_E4M3", "F8_E5M2", "BF16", "F16", "F32", "F64")


def from_safetensors(
    variables: Any,
    path: str | os.PathLike | Sequence[str | os.PathLike],
    names: Mapping[str, Name] | Callable[[str], Name] | None = None,
) -> Any:
    """Fill the parameters of a model with weights of safetensors files; the inverse of
    `to_safetensors`.

        variables = model.init(key, x)
        variables = jaxfp8.convert.from_safetensors(
            variables, "model.safetensors", names
        )

    The model decides what becomes of FP8 weights. A parameter becomes a master copy in
    its own dtype: codes times scales, rounded to float32 and, where it is narrower, to
    its dtype. The kernels of a model that `jaxfp8.freeze` gave become the codes and
    scales of the file as they are, so that adapters train beside them.

    Args:
        variables: the variables of a Linen model or an NNX model, frozen or not, whose
            shapes and dtypes stay. The leaves may be `jax.ShapeDtypeStruct` too, from
            `jax.eval_shape` or `nnx.eval_shape`. Where a leaf has a sharding, the
            result is put there.
        path: a file that `read_safetensors` reads, or several files.
        names: as for `to_safetensors`: a dict of expressions and names in the file, or
            None; or a function that takes a path of the model, joined by `/`, and
            returns what that dict holds for it. A parameter with the name None stays as
            it is, so it has to be an array. Tensors of the file that have no parameter
            are left out.

    Returns:
        New variables of arrays; for an NNX model the same object, changed in place. FP8
        state stays as it is; that of `jax.eval_shape` becomes that of `init`, empty
        histories and scale 1.

    Raises:
        ValueError: the file lacks a tensor, its scales or the fixed scale of an input,
            or has it in another shape, as integers, or, for codes, in another format or
            with scales of other blocks; a path has no name, or an expression matches no
            parameter; or a leaf that the file does not fill is a
            `jax.ShapeDtypeStruct`, and no state of delayed scaling. The message has the
            tensor's name. Nothing is changed then. Also what `read_safetensors` raises.
        TypeError: `variables` is neither a dict of variables nor an NNX model.
    """
    where = "from_safetensors"
    leaves = parameters(f"{where}: variables", variables)
    tensors, find = read_safetensors(path), Names(where, names)
    filled_leaves = {}
    # 1. The codes of frozen kernels.
    for product in [
        path_[:-1] for path_ in leaves if path_[-1] == _frozen.KERNEL_SCALE_INV
    ]:
        kernel = (*product[:-1], _frozen.KERNEL)
        if not isinstance(leaves.get(kernel), PLACEHOLDERS):
            kernel = (*product, _frozen.KERNEL)
        old = {name: leaves.pop((*product, name), None) for name in _CODES}
        new = _frozen_kernel(kernel, find(kernel), old, tensors)
        filled_leaves |= {(*product, name): array for name, array in new.items()}
    # 2. All others, in the dtypes of the model.
    for path_, leaf in leaves.items():
        if not isinstance(leaf, PLACEHOLDERS) and (templates := find(path_)):
            filled_leaves[path_] = _master(path_, templates, leaf, tensors)
    find.check_used()
    return _with_leaves(_with_fresh_state(variables, set(filled_leaves)), filled_leaves)


def _master(path: Path, templates: tuple[Template, ...], leaf, tensors) -> jax.Array:
    """Return a parameter in the dtype of `leaf`: matrices `[out, in]` become kernels
    `[*in, *out]`.
    """
    stacked = len(templates[0]) - 1
    _check_stacked(path, templates, leaf.shape)
    values = np.empty(leaf.shape, np.float32)
    for index in np.ndindex(leaf.shape[:stacked]):
        parts = [
            _tensor(path, filled(template, index), tensors).decode()
            for template in templates
        ]
        name, needed = filled(templates[0], index), leaf.shape[stacked:]
        whole = np.concatenate(parts) if parts[1:] else parts[0]
        if path[-1] == _frozen.KERNEL:
            _check_shape(
                path,
                name,
                whole,
                needed[::-1] if len(needed) == 2 else "[out, in]",
                _fits(whole.T, needed),
            )
            whole = whole.T
        else:
            is_right = whole.shape == needed or (
                path[-1] == "bias"
                and whole.ndim == 1
                and whole.size == math.prod(needed)
            )
            _check_shape(path, name, whole, needed, is_right)
        values[index] = whole.reshape(needed)
    return _placed(values.astype(leaf.dtype), leaf)


def _frozen_kernel(
    path: Path, templates: tuple[Template, ...], old: dict, tensors
) -> dict[str, jax.Array]:
    """Return the arrays of a frozen product by name: codes of the file as
    `[*stacked, *out, *in]`, and scales.
    """
    if not templates:
        return {}
    codes, scale_inv, has_input = (
        old[_frozen.KERNEL],
        old[_frozen.KERNEL_SCALE_INV],
        old[_frozen.INPUT_SCALE] is not None,
    )
    stacked, new = (
        len(templates[0]) - 1,
        {name: np.empty(a.shape, a.dtype) for name, a in old.items() if a is not None},
    )
    _check_stacked(path, templates, codes.shape)
    for index in np.ndindex(codes.shape[:stacked]):
        name = filled(templates[0], index)
        parts = [
            _tensor(path, filled(template, index), tensors) for template in templates
        ]
        for part in parts:
            if part.data.dtype != codes.dtype:
                raise _error(
                    path,
                    name,
                    f"codes in {codes.dtype.name}",
                    part.dtype,
                    "load a model that is not frozen",
                )
        data = np.concatenate([part.data for part in parts])
        _check_shape(path, name, data, "[out, in]", _fits(data, codes.shape[stacked:]))
        new[_frozen.KERNEL][index] = data.reshape(codes.shape[stacked:])
        new[_frozen.KERNEL_SCALE_INV][index] = _scales(
            path, name, parts, scale_inv, scale_inv.shape[stacked:]
        )
        if has_input:
            inputs = {
                None if part.input_scale_inv is None else float(part.input_scale_inv[0])
                for part in parts
            }
            if len(inputs) > 1 or None in inputs:
                needed = "one fixed scale of the input, as the model has"
                raise _error(
                    path,
                    name,
                    needed,
                    f"{sorted(map(str, inputs))}",
                    "freeze a model with Float8CurrentScaling",
                )
            new[_frozen.INPUT_SCALE_INV][index] = np.float32(inputs.pop())
            new[_frozen.INPUT_SCALE][index] = (
                np.float32(1) / new[_frozen.INPUT_SCALE_INV][index]
            )
    return {name: _placed(array, old[name]) for name, array in new.items()}


def _scales(path, name, parts: list[StoredTensor], scale_inv, shape) -> np.ndarray:
    """Return the scales of the parts of a frozen kernel, in the shape and the dtype
    that the model has.
    """
    scales = np.concatenate([part.scale_inv for part in parts])
    if (
        scales.shape != shape
        and all(part.block is None for part in parts)
        and len(np.unique(scales)) == 1
    ):
        scales = scales[:1]  # parts that have one scale for all
    with np.errstate(over="ignore"):
        rounded = scales.astype(scale_inv.dtype)
    if scales.shape != shape or not np.array_equal(rounded.astype(np.float32), scales):
        blocks = sorted({str(part.block or "the tensor") for part in parts})
        needed = f"scales {scale_inv.dtype}{list(shape)}, as the model's recipe has"
        advice = (
            "freeze a model with the recipe of the file, or load one that is not frozen"
        )
        raise _error(
            path,
            name,
            needed,
            f"{list(scales.shape)}, a scale for each of {', '.join(blocks)}",
            advice,
        )
    return rounded


def _tensor(path: Path, name: str, tensors: dict[str, StoredTensor]) -> StoredTensor:
    """Return a tensor of the file, with its scales where it is codes."""
    tensor = tensors.get(name)
    if tensor is None:
        raise _error(
            path,
            name,
            "this tensor in the file",
            "none",
            f"the file has {some(sorted(tensors), 4)}",
        )
    if tensor.dtype not in _FLOATS:
        raise _error(
            path,
            name,
            f"a dtype of {_FLOATS}",
            tensor.dtype,
            "no other weights are read",
        )
    if tensor.dtype.startswith("F8") and tensor.scale_inv is None:
        needed = f"scales {name}_scale or {name}_scale_inv"
        raise _error(
            path,
            name,
            needed,
            "none",
            "give all files of the model; scales may be in another one",
        )
    return tensor


def _fits(array, shape) -> bool:
    """Tell whether a matrix is an array of this shape with its first and its last
    dimensions merged.
    """
    splits = range(len(shape) + 1)
    return array.ndim == 2 and any(
        array.shape == (math.prod(shape[:i]), math.prod(shape[i:])) for i in splits
    )


def _check_shape(path, name, array, needed, is_right: bool) -> None:
    if not is_right:
        needed = needed if isinstance(needed, str) else list(needed)
        raise _error(
            path,
            name,
            f"shape {needed} for the model's",
            f"{list(array.shape)}",
            "check the model's sizes",
        )


def _check_stacked(path, templates, shape) -> None:
    stacked = len(templates[0]) - 1
    if stacked > len(shape):
        needed = f"at least {stacked} dimensions, one for each {{}} of the name"
        raise _error(
            path, "{}".join(templates[0]), needed, f"{list(shape)}", "write fewer {}"
        )


def _error(path: Path, name: str, needed: str, got: str, advice: str) -> ValueError:
    return ValueError(
        f"from_safetensors: {name}, for {at(path)}: expected {needed}, got {got}; "
        f"{advice}"
    )


def _placed(array: np.ndarray, leaf) -> jax.Array:
    """Return `array` where `leaf` lies, if it was put somewhere."""
    is_placed = getattr(leaf, "committed", isinstance(leaf, jax.ShapeDtypeStruct))
    return (
        jax.device_put(array, leaf.sharding if is_placed else None)
        if is_placed
        else jnp.asarray(array)
    )


def _with_fresh_state(variables, filled: set[Path]):
    """Return `variables` with the FP8 state of `init` in the place of shapes, where
    only shapes of it are given.

    Args:
        variables: those of the model.
        filled: paths, as `parameters` names them, whose shapes get arrays of the file.

    Raises:
        ValueError: another leaf is a shape.
    """
    is_module = isinstance(variables, nnx.Module)
    flat = _state_tree.flatten(
        nnx.state(variables) if is_module else dict(core.unfreeze(variables))
    )
    shapes = {
        i
        for i, leaf in enumerate(flat.leaves)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    }
    fresh = {}
    for quantizer in flat.quantizers:
        for i, value in zip(quantizer.positions(), (0, 1), strict=True):
            if i in shapes:
                leaf = flat.leaves[i]
                fresh[i] = _placed(np.full(leaf.shape, value, leaf.dtype), leaf)
    left = [
        flat.name(i)
        for i in sorted(shapes - set(fresh))
        if (path := flat.paths[i]) not in filled
        and (path[0] != PARAMS or path[1:] not in filled)
    ]
    if left:
        raise ValueError(
            f"from_safetensors: variables: {some(left, 4)}: expected arrays where no "
            "tensor of the file is read, got jax.ShapeDtypeStruct; put arrays there "
            "first, for example those of init"
        )
    if not fresh:
        return variables
    if is_module:
        nnx.update(variables, flat.replace(fresh))
        return variables
    return flat.replace(fresh)


def _with_leaves(variables, leaves: dict[Path, jax.Array]):
    """Return `variables` with other leaves at these paths, as `parameters` names
    them.
    """
    if isinstance(variables, nnx.Module):
        for path, variable in nnx.to_flat_state(
            nnx.state(variables, (nnx.Param, nnx.BatchStat))
        ):
            if (key := tuple(map(str, path))) in leaves:
                variable.set_value(leaves.pop(key))
        return variables
    flat = traverse_util.flatten_dict(dict(core.unfreeze(variables)))
    for path, old in flat.items():
        key = path[1:] if path[0] == PARAMS else path
        if key in leaves:
            flat[path] = (
                old.replace_boxed(leaves[key])
                if isinstance(old, meta.AxisMetadata)
                else leaves[key]
            )
    return traverse_util.unflatten_dict(flat)
