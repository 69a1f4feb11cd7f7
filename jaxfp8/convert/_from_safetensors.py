"""Fill a model with the weights of safetensors files, to train on from them or to
freeze them.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..dot import _frozen
from ..recipes import _state_tree, some
from ._frozen_kernels import parameters
from ._read_safetensors import Name, Names, StoredTensor, read_safetensors
from ._tree import Path, at


def from_safetensors(
    variables: Any,
    path: str | os.PathLike | Sequence[str | os.PathLike],
    names: Mapping[str, Name] | None = None,
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
            None. A parameter with the name None stays as it is, so it has to be an
            array. Tensors of the file that have no parameter are left out.

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
    leaves, products = parameters(f"{where}: variables", variables)
    tensors = read_safetensors(path)
    find = Names(where, names)
    new = {}
    # 1. The codes of frozen kernels.
    for product in products:
        codes = product.arrays[_frozen.KERNEL]
        parts = list(_parts(product.kernel, find, codes.shape, tensors))
        if parts:
            arrays = _frozen_kernel(product.kernel, parts, product.arrays)
            new |= {(*product.path, name): array for name, array in arrays.items()}
    # 2. All others, in the dtypes of the model.
    for path_, leaf in leaves.items():
        if parts := list(_parts(path_, find, leaf.shape, tensors)):
            new[path_] = _master(path_, parts, leaf)
    find.check_used()
    return _with_leaves(variables, new)


def _master(path: Path, weights: list[tuple], leaf) -> jax.Array:
    """Return a parameter in the dtype of `leaf`: matrices `[out, in]` become kernels
    `[*in, *out]`.
    """
    values = np.empty(leaf.shape, np.float32)
    for index, where, parts in weights:
        decoded = [part.decode() for part in parts]
        whole = np.concatenate(decoded) if parts[1:] else decoded[0]
        if path[-1] == _frozen.KERNEL:
            whole = whole.T
        values[index] = _reshaped(path, where, whole, values[index].shape)
    return _placed(values.astype(leaf.dtype), leaf)


def _frozen_kernel(path: Path, weights: list[tuple], old: dict) -> dict[str, jax.Array]:
    """Return the arrays of a frozen product by name: codes of the file as
    `[*stacked, *out, *in]`, and scales.
    """
    new = {name: np.empty(a.shape, a.dtype) for name, a in old.items() if a is not None}
    for index, where, parts in weights:
        codes = new[_frozen.KERNEL][index]
        scale_inv = new[_frozen.KERNEL_SCALE_INV][index]
        data = np.concatenate([part.data for part in parts])
        if data.dtype != codes.dtype:
            needed = f"codes in {codes.dtype}"
            advice = "load a model that is not frozen"
            raise _error(where, needed, f"{data.dtype}", advice)
        codes[...] = _reshaped(path, where, data, codes.shape)
        scale_inv[...] = _scales(where, [part.scale_inv for part in parts], scale_inv)
        if _frozen.INPUT_SCALE in new:
            fixed = new[_frozen.INPUT_SCALE_INV][index]
            inputs = [part.input_scale_inv for part in parts]
            fixed[...] = _scales(f"{where}: input", inputs, fixed)
            new[_frozen.INPUT_SCALE][index] = 1 / fixed
    return {name: _placed(array, old[name]) for name, array in new.items()}


def _parts(path, find: Names, shape, tensors) -> Iterator[tuple]:
    """Yield `(index, where, parts)` for each stacked parameter in one of this shape:
    its name for messages, and the tensors of its rows.
    """
    for index, names in find(path, shape):
        parts = [_tensor(f"{name}, for {at(path)}", name, tensors) for name in names]
        yield index, f"{names[0]}, for {at(path)}", parts


def _scales(where, scales: list, old: np.ndarray) -> np.ndarray:
    """Return the scales of the parts of a frozen kernel, in the shape and the dtype
    that the model has.
    """
    if all(scale is not None for scale in scales):
        joined = np.concatenate(scales)
        if joined.ndim == 1 and len(np.unique(joined)) == 1:
            joined = joined[:1]  # parts that have one scale for all
        rounded = joined.astype(old.dtype)
        exact = rounded.astype(np.float32)
        if joined.shape == old.shape and np.array_equal(exact, joined):
            return rounded
    raise _error(
        where,
        f"scales {old.dtype}{list(old.shape)}, as the model's recipe has",
        f"scales of shapes {list(map(np.shape, scales))}",
        "freeze a model with the recipe of the file, or load one that is not frozen",
    )


def _tensor(where: str, name: str, tensors: dict[str, StoredTensor]) -> StoredTensor:
    """Return a tensor of the file, with its scales where it is codes."""
    tensor = tensors.get(name)
    if tensor is None:
        present = f"the file has {some(sorted(tensors), 4)}"
        raise _error(where, "this tensor in the file", "none", present)
    if not jnp.issubdtype(tensor.data.dtype, jnp.floating):
        raise _error(where, "floats", tensor.dtype, "no other weights are read")
    if tensor.dtype.startswith("F8") and tensor.scale_inv is None:
        needed = f"scales {name}_scale or {name}_scale_inv"
        raise _error(
            where,
            needed,
            "none",
            "give all files of the model; scales may be in another one",
        )
    return tensor


def _reshaped(path: Path, where: str, array: np.ndarray, shape) -> np.ndarray:
    """Return an array of the file in the shape that the model has; a matrix may have
    its first and its last dimensions merged.
    """
    splits = range(len(shape) + 1)
    shapes = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in splits]
    shapes.append(shape)
    if path[-1] == "bias":
        shapes.append((math.prod(shape),))
    if array.shape not in shapes:
        raise _error(
            where,
            f"shape {list(shape)}, or a matrix of it",
            f"{list(array.shape)}",
            "check the model's sizes; a kernel is [out, in] in the file, and was "
            "transposed unless it is frozen",
        )
    return array.reshape(shape)


def _error(where: str, needed: str, got: str, advice: str) -> ValueError:
    return ValueError(
        f"from_safetensors: {where}: expected {needed}, got {got}; {advice}"
    )


def _placed(array: np.ndarray, leaf) -> jax.Array:
    """Return `array` where `leaf` lies, if it was put somewhere."""
    if getattr(leaf, "committed", isinstance(leaf, jax.ShapeDtypeStruct)):
        return jax.device_put(array, leaf.sharding)
    return jnp.asarray(array)


def _with_leaves(variables, leaves: dict[Path, jax.Array]):
    """Return `variables` with other leaves at these paths, as `parameters` names them,
    and the FP8 state of `init` where only shapes of it are given.

    Raises:
        ValueError: another leaf is a shape.
    """
    is_module = isinstance(variables, nnx.Module)
    flat = _state_tree.flatten(nnx.state(variables) if is_module else variables)
    first, new = {}, {}
    for quantizer in flat.quantizers:
        first |= zip(quantizer.positions, (0, 1), strict=True)
    for i, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
        key = path[1:] if path[0] == "params" and not is_module else path
        if key in leaves:
            new[i] = leaves[key]
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            if i not in first:
                raise ValueError(
                    f"from_safetensors: variables: {flat.name(i)}: expected arrays "
                    "where no tensor of the file is read, got jax.ShapeDtypeStruct; "
                    "put arrays there first, for example those of init"
                )
            new[i] = _placed(np.full(leaf.shape, first[i], leaf.dtype), leaf)
    if not is_module:
        return flat.replace(new)
    nnx.update(variables, flat.replace(new))
    return variables
