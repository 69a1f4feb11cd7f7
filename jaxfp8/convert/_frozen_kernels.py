"""Read the parameters of a frozen model by path, and its FP8 kernels as matrices
`[out, in]` with their scales.

Loaders of FP8 weights expect scales under names and in shapes of their own, and a
config that tells them so.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from ..dot import _frozen
from ..numerics import E4M3
from ..ops import _blocks
from ..recipes import OVERWRITE_WITH_GRADIENT, _state_tree
from ._read_safetensors import StoredTensor
from ._tree import Path, at

_ARRAYS = (
    _frozen.KERNEL,
    _frozen.KERNEL_SCALE_INV,
    _frozen.INPUT_SCALE_INV,
    _frozen.INPUT_SCALE,
)


class Layout(NamedTuple):
    """The place of the scales of a weight `[out, in]` in a file.

    Attributes:
        recipes: the recipes whose kernels have such scales, in words.
        suffix: the end of the name of the scales, after the name of the weight.
        block: `(r, c)`, the rows and columns that share a scale; None for one scale.
        dtype: the dtype of the scales.
    """

    recipes: str
    suffix: str
    block: tuple[int, int] | None
    dtype: np.dtype

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of the scales of `[n, k]` codes."""
        return (1,) if self.block is None else _blocks.count(self.block, n, k)


_F32, _E8M0 = np.dtype(np.float32), jnp.dtype(jnp.float8_e8m0fnu)
LAYOUTS = {
    "tensor": Layout("DelayedScaling or Float8CurrentScaling", "_scale", None, _F32),
    "block128": Layout("Float8BlockScaling", "_scale_inv", (128, 128), _F32),
    "mxfp8": Layout(
        "MXFP8BlockScaling and inputs a multiple of 32", "_scale", (1, 32), _E8M0
    ),
}


def quantization_config(
    layout: str, ignored: list[str], is_static: bool
) -> dict[str, Any]:
    """Return the `quantization_config` of a model's `config.json`.

    Args:
        layout: a name in `LAYOUTS`.
        ignored: the modules whose kernels are in high precision.
        is_static: whether inputs have fixed scales.

    References:
        DeepSeek-V3's `config.json`, which transformers' `FineGrainedFP8Config` and
        vLLM's `Fp8Config` read; `QuantizationConfig` and the presets FP8 and MXFP8 of
        compressed-tensors 0.20.
    """
    if layout == "block128":
        config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        # Transformers reads `modules_to_not_convert`, older versions of vLLM read
        # `ignored_layers`.
        return config | {"modules_to_not_convert": ignored, "ignored_layers": ignored}
    scales = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    if layout == "mxfp8":
        scales |= {
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        }
    group = {
        "weights": scales | {"dynamic": False},
        "input_activations": scales | {"dynamic": not is_static},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if layout == "mxfp8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"]} | group},
        "ignore": ignored,
    }


class Product(NamedTuple):
    """A frozen product of a model; the products of stacked layers are one.

    Attributes:
        path: the path of the product.
        kernel: the path of its kernel, in the layer; in the product where the layer has
            no placeholder.
        placeholder: the placeholder of the kernel, or None where the kernel was kept.
        arrays: by name, None for what is not there: codes `[*stacked, *out, *in]`,
            their scales, and the fixed scales of the input.
    """

    path: Path
    kernel: Path
    placeholder: Any
    arrays: dict[str, Any]


def parameters(where: str, frozen: Any) -> tuple[dict[Path, Any], list[Product]]:
    """Return the parameters by path, and the frozen products, of a Linen model's
    variables or an NNX model.

    `where` names the function and its argument, for messages. A path in another
    collection of Linen than `params` begins with the collection's name. State of
    quantizers is left out.

    Raises:
        TypeError: `frozen` is neither a dict of variables nor an NNX module.
        ValueError: the variables have no collection `params`.
    """
    if isinstance(frozen, nnx.Module):
        tree = nnx.state(frozen, (nnx.Param, nnx.BatchStat))
        kernels = {}
        for path, module in nnx.iter_modules(frozen):
            kernel = (*map(str, path), _frozen.KERNEL)
            kernels[kernel] = getattr(module, _frozen.KERNEL, None)
    elif not isinstance(frozen, Mapping):
        raise TypeError(
            f"{where}: expected variables, or an NNX model, got {type(frozen).__name__}"
        )
    elif "params" not in frozen:
        raise ValueError(
            f"{where}: expected variables, got a dict without 'params': "
            f"{sorted(frozen)}"
        )
    else:
        collections = dict(frozen)
        params = collections.pop("params")
        collections.pop(OVERWRITE_WITH_GRADIENT, None)
        tree = {**params, **collections}
        kernels = traverse_util.flatten_dict(params)
    leaves = _state_tree.flatten(tree).by_path()
    return leaves, list(_take_products(leaves, kernels))


def _take_products(leaves: dict[Path, Any], kernels: dict) -> Iterator[Product]:
    """Remove the frozen products from parameters by path, and yield them; `kernels`
    has the placeholders.
    """
    for *path, last in list(leaves):
        if last == _frozen.KERNEL_SCALE_INV:
            arrays = {name: leaves.pop((*path, name), None) for name in _ARRAYS}
            kernel = (*path[:-1], _frozen.KERNEL)
            placeholder = kernels.get(kernel)
            if not isinstance(placeholder, _frozen.Placeholder):
                kernel, placeholder = (*path, _frozen.KERNEL), None
            yield Product(tuple(path), kernel, placeholder, arrays)


def matrix(product: Product, layout: str, index: tuple[int, ...]) -> StoredTensor:
    """Return one of the stacked kernels of a product, with its scales.

    Args:
        product: a product of `parameters`, whose arrays are on the host.
        layout: the layout in `LAYOUTS` that the scales must have.
        index: the place of the kernel along the leading dimensions.

    Raises:
        ValueError: see `to_safetensors`.
    """
    codes, scale, input_scale, _ = map(product.arrays.get, _ARRAYS)
    n, k = _matrix_shape(product, len(index))
    lead = index[: _stacked_scales(product, len(index), n, k, layout)]
    inputs = None if input_scale is None else input_scale[lead]
    codes, scale = codes[index].reshape(n, k), scale[lead]
    is_bad = np.any(codes.view(np.uint8) & 127 == 127)
    for scales in jax.tree.leaves((scale, inputs)):
        scales = scales.astype(np.float32)
        is_bad |= not np.all(np.isfinite(scales) & (scales > 0))
    if is_bad:
        advice = "repair the parameters, and freeze again"
        raise _error(product, "finite codes and scales", "NaN", advice)
    if scale.itemsize == 1:  # E8M0 is stored as its codes
        scale = scale.view(np.uint8)
    return StoredTensor(codes, "F8_E4M3", scale, LAYOUTS[layout].block, inputs)


def _matrix_shape(product, stacked) -> tuple[int, int]:
    """Return `(rows, columns)` of each kernel: the sizes of outputs and inputs."""
    shape = product.arrays[_frozen.KERNEL].shape
    codes = shape[stacked:]
    kernel = getattr(product.placeholder, "shape", None)
    counts = []
    if kernel is not None:  # a placeholder of NNX has no stacked dimensions
        kernel = shape[: len(shape) - len(kernel)] + kernel
    if kernel is None or kernel[:stacked] == shape[:stacked]:
        if len(codes) == 2:
            return codes
        # A kernel of Flax is `[*in, *out]`.
        splits = range(1, len(codes)) if kernel else ()
        counts = [i for i in splits if kernel[stacked:] == codes[-i:] + codes[:-i]]
    if len(counts) != 1:
        raise _error(
            product,
            "a matrix, or a kernel [*inputs, *outputs]",
            f"codes {shape} of a kernel {kernel or 'that was kept'}",
            "where kernels are stacked, stack along the first dimension and write {} "
            "in the name",
        )
    return math.prod(codes[: -counts[0]]), math.prod(codes[-counts[0] :])


def _stacked_scales(product, stacked, n, k, layout) -> int:
    """Return along how many dimensions of stacked kernels the scales are stacked: one
    for a whole tensor may hold for several kernels.

    Raises:
        ValueError: scales, codes or k are not as the layout needs them.
    """
    codes, scale, *_ = map(product.arrays.get, _ARRAYS)
    needed = LAYOUTS[layout]
    shape = needed.scale_shape(n, k)
    lead = min(stacked, max(scale.ndim - len(shape), 0))
    fits = scale.dtype == needed.dtype and scale.shape == codes.shape[:lead] + shape
    if layout == "mxfp8":
        fits &= k % 32 == 0  # loaders take no part of a block
    if not fits or codes.dtype != E4M3.dtype:
        raise _error(
            product,
            f"{E4M3.dtype} codes with scales of layout {layout!r}, from "
            f"{needed.recipes}",
            f"{codes.dtype}{list(codes.shape)} with scales "
            f"{scale.dtype}{list(scale.shape)}",
            f"write the layout of the layer's recipe, one of {sorted(LAYOUTS)}, and "
            "train with E4M3 or HYBRID",
        )
    return lead


def _error(product, needed: str, got: str, advice: str) -> ValueError:
    where = f"to_safetensors: {at(product.kernel)}"
    return ValueError(f"{where}: expected {needed}, got {got}; {advice}")
