"""Write a frozen model to a safetensors file, which loaders of FP8 weights read."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .._jax import _files
from ..dot import _frozen
from ..ops import _checks
from ._frozen_kernels import (
    LAYOUTS,
    matrix,
    parameters,
    quantization_config,
)
from ._read_safetensors import Names, StoredTensor
from ._tree import Path, at


def to_safetensors(
    frozen: Any,
    path: str | os.PathLike,
    names: Mapping[str, str | tuple[str, ...] | None] | None = None,
    *,
    layout: str,
) -> dict[str, Any]:
    r"""Write a frozen model to a safetensors file, with the codes and the scales of
    training.

        config["quantization_config"] = jaxfp8.convert.to_safetensors(
            frozen, path, names, layout="block128"
        )

    Each layout, its recipes, and the scales of `x.weight`, `[out, in]`:

    - `"tensor"`, `DelayedScaling` or `Float8CurrentScaling`: `x.weight_scale` f32[1],
      and `x.input_scale` where fixed
    - `"block128"`, `Float8BlockScaling`: `x.weight_scale_inv` f32
      `[out / 128, in / 128]`, rounded up
    - `"mxfp8"`, `MXFP8BlockScaling`: `x.weight_scale` uint8 `[out, in / 32]`, the codes
      of E8M0

    A weight is its codes times their scale: every scale in the file is a scale_inv. FP8
    kernels become matrices, whose rows are the outputs. Other parameters keep their
    dtype; kernels are transposed, and biases have one dimension.

    `names` maps regular expressions to names in the file. The first expression that
    matches a whole parameter path (`re.fullmatch`), such as `"layers_3/mlp/up/kernel"`,
    decides. In a name `\1` is a group of the expression, and each `{}` the index along
    a leading dimension of stacked parameters (`nn.scan`, experts). A tuple of names
    divides the rows into equal parts; the name None leaves the parameter out.

    Args:
        frozen: the result of `jaxfp8.freeze`: the variables of a Linen model, or the
            NNX model.
        path: the file to write.
        names: the mapping above; None gives each parameter its path joined by `.`, with
            `weight` in place of a last part `kernel`, `embedding` or `scale`.
        layout: `"tensor"`, `"block128"` or `"mxfp8"`, for all FP8 kernels. No kernel is
            quantized again to fit it.

    Returns:
        The `quantization_config` of the model's `config.json`.

    Raises:
        ValueError: `frozen` holds no frozen product; the scales of a layer's recipe fit
            another layout, or no layout; some layers have fixed scales for their inputs
            and others not; codes are not float8_e4m3fn, or are NaN; a parameter has no
            name, or two have the same name; an expression matches no parameter; a
            kernel is not a matrix, or cannot be divided. No file is written then.
        TypeError: `frozen` is neither variables nor an NNX model.
        ImportError: the package safetensors is not installed.
    """
    _checks.one_of("to_safetensors", "layout", layout, sorted(LAYOUTS))
    import safetensors.numpy  # no dependency

    leaves, products = parameters("to_safetensors: frozen", frozen)
    if not products:
        raise ValueError(
            "to_safetensors: frozen: expected the variables, or the NNX model, that "
            "jaxfp8.freeze gave, found no frozen product in it"
        )
    find = Names("to_safetensors", names)
    tensors = {}
    ignored = []
    # the first layer whose input has a fixed scale, and the first other
    fixed = {}

    def add(name, array):
        if name in tensors:
            raise ValueError(
                f"to_safetensors: names: two tensors would be {name!r}; every "
                "parameter needs its own name"
            )
        # safetensors reads its memory as it lies
        tensors[name] = np.ascontiguousarray(array).reshape(array.shape)

    # 1. FP8 kernels and their scales.
    for product in products:
        product = product._replace(arrays=jax.device_get(product.arrays))
        places = find(product.kernel, product.arrays[_frozen.KERNEL].shape)
        for name, weight in _parts(product.kernel, places, matrix, product, layout):
            if name.rpartition(".")[2] != "weight":
                raise ValueError(
                    f"to_safetensors: names: {at(product.kernel)}: expected a name "
                    f"<module>.weight, got {name!r}"
                )
            fixed.setdefault(weight.input_scale_inv is not None, at(product.kernel))
            add(name, weight.data)
            add(name + LAYOUTS[layout].suffix, weight.scale_inv)
            if weight.input_scale_inv is not None:
                module = name.removesuffix("weight")
                add(f"{module}input_scale", weight.input_scale_inv)
    if len(fixed) > 1:
        raise ValueError(
            "to_safetensors: frozen: expected inputs with fixed scales in all layers "
            f"or in none, got {fixed[True]} with one and {fixed[False]} without; the "
            "config is that of all layers"
        )
    # 2. Everything else, in the dtype that it has.
    for path_, leaf in leaves.items():
        array = np.asarray(jax.device_get(leaf))
        places = find(path_, array.shape)
        for name, weight in _parts(path_, places, _high_precision, path_, array):
            add(name, weight.data)
            if path_[-1] == "kernel":
                ignored.append(name.removesuffix(".weight"))
    find.check_used()
    with _files.replaced(path, "wb") as file:
        file.write(safetensors.numpy.save(tensors, {"format": "pt"}))
    return quantization_config(layout, ignored, True in fixed)


def _high_precision(path: Path, array, index) -> StoredTensor:
    """Return one of stacked parameters in high precision, with the dimensions that
    PyTorch has.
    """
    array = array[index]
    if path[-1] == "bias":
        array = array.reshape(-1)
    if path[-1] == "kernel":
        if array.ndim != 2:
            raise ValueError(
                f"to_safetensors: {at(path)}: expected 2 dimensions of a kernel, got "
                f"{list(array.shape)}; write {{}} in its name for each dimension that "
                "counts stacked kernels, or reshape it in the tree, under another name "
                "where it is not [in, out]"
            )
        array = array.T
    return StoredTensor(array, "")


def _parts(path: Path, places, weight_of, *args) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name and the weight of each of equal parts of the rows of a parameter,
    of which `weight_of(*args, index)` gives one of those that are stacked.
    """
    for index, names in places:
        weight, count = weight_of(*args, index), len(names)
        if count == 1:
            yield names[0], weight
            continue
        rows, block = len(weight.data), weight.block
        # otherwise one row of scales holds for all parts
        is_divided = block is not None and rows > block[0]
        if rows % count or (is_divided and rows // count % block[0]):
            raise ValueError(
                f"to_safetensors: {at(path)}: expected rows that divide into {count} "
                f"parts, of whole blocks {block}, got {rows} rows; write it under one "
                "name"
            )
        scales = [weight.scale_inv] * count
        if is_divided:
            scales = np.split(weight.scale_inv, count)
        data = np.split(weight.data, count)
        for name, part, scale_inv in zip(names, data, scales, strict=True):
            yield name, dataclasses.replace(weight, data=part, scale_inv=scale_inv)
