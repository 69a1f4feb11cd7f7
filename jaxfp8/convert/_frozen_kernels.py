"""Read the parameters of a frozen model by path, and its FP8 kernels as matrices
`[out, in]` with their scales.

Loaders of FP8 weights expect scales under names and in shapes of their own, and a
config that tells them so.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import core, nnx, traverse_util
from flax.core import meta

from ..dot import _frozen
from ..numerics import E4M3
from ..ops import _blocks
from ..recipes import OVERWRITE_WITH_GRADIENT
from ._tree import Path, at

_ARRAYS = (
    _frozen.KERNEL,
    _frozen.KERNEL_SCALE_INV,
    _frozen.INPUT_SCALE_INV,
    _frozen.INPUT_SCALE,
)


@dataclasses.dataclass(frozen=True)
class Layout:
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
    "mxfp8": Layout("MXFP8BlockScaling", "_scale", (1, 32), _E8M0),
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


def parameters(where: str, frozen: Any) -> dict[Path, Any]:
    """Return the parameters and the placeholders of kernels, by path, of a Linen
    model's variables or an NNX model.

    `where` names the function and its argument, for messages. A path in another
    collection of Linen than `params` begins with the collection's name. State of
    quantizers is left out.

    Raises:
        TypeError: `frozen` is neither a dict of variables nor an NNX module.
        ValueError: the variables have no collection `params`.
    """
    if isinstance(frozen, nnx.Module):
        state = nnx.to_flat_state(nnx.state(frozen, (nnx.Param, nnx.BatchStat)))
        leaves = {path: variable.get_value() for path, variable in state}
        for path, module in nnx.iter_modules(frozen):
            kernel = getattr(module, _frozen.KERNEL, None)
            if isinstance(kernel, _frozen.Placeholder):
                leaves[*path, _frozen.KERNEL] = kernel
        return {tuple(map(str, path)): leaf for path, leaf in leaves.items()}
    if not isinstance(frozen, Mapping):
        raise TypeError(
            f"{where}: expected variables, or an NNX model, got {type(frozen).__name__}"
        )
    collections = dict(core.unfreeze(frozen))
    collections.pop(OVERWRITE_WITH_GRADIENT, None)
    if "params" not in collections:
        raise ValueError(
            f"{where}: expected variables, got a dict without 'params': "
            f"{sorted(frozen)}"
        )
    leaves = traverse_util.flatten_dict(collections.pop("params"))
    leaves |= traverse_util.flatten_dict(collections)
    for path, leaf in leaves.items():
        is_removed = isinstance(leaf, _frozen.Placeholder)
        if isinstance(leaf, meta.AxisMetadata) and not is_removed:
            leaves[path] = leaf.unbox()
    return leaves


@dataclasses.dataclass(frozen=True)
class FP8Kernel:
    """An FP8 kernel of a frozen model; the kernels of stacked layers are one FP8Kernel.

    Attributes:
        path: the path of the layer, then "kernel"; the path of the product, then
            "kernel", where the layer has no placeholder.
        placeholder: the placeholder of the kernel, or None where the kernel was kept.
        codes: the codes of the kernel `[*stacked, *out, *in]`.
        scale_inv: their scales.
        input_scale_inv: the fixed scale of the input; None for an input that is scaled
            when it arrives.
    """

    path: Path
    placeholder: Any
    codes: np.ndarray
    scale_inv: np.ndarray
    input_scale_inv: np.ndarray | None

    def matrices(self, layout: str, stacked: int, parts: int) -> Iterator[tuple]:
        """Yield `(index, part, codes [out, in], scales, input_scale_inv)` for each
        stacked kernel and part of its rows.

        Args:
            layout: the layout in `LAYOUTS` that the scales must have.
            stacked: how many leading dimensions count stacked kernels.
            parts: the number of equal parts into which the rows are divided.

        Raises:
            ValueError: see `to_safetensors`.
        """
        scale, input_scale = self.scale_inv, self.input_scale_inv
        n, k = self._matrix_shape(stacked)
        self._check_layout(stacked, n, k, layout)
        block = LAYOUTS[layout].block
        # otherwise one row of scales holds for all parts
        is_divided = block is not None and n > block[0]
        if n % parts or (is_divided and parts > 1 and (n // parts) % block[0]):
            raise self._error(
                f"rows that divide into {parts} parts, of whole blocks {block}",
                f"{n} rows",
                "write it under one name",
            )
        self._check_numbers()
        lead = scale.ndim - len(LAYOUTS[layout].scale_shape(n, k))
        for index in np.ndindex(self.codes.shape[:stacked]):
            matrices = np.split(self.codes[index].reshape(n, k), parts)
            inputs = None if input_scale is None else input_scale[index[:lead]]
            one = scale[index[:lead]]
            if one.itemsize == 1:  # E8M0 is stored as its codes
                one = one.view(np.uint8)
            scales = np.split(one, parts) if is_divided else [one] * parts
            for part, pair in enumerate(zip(matrices, scales, strict=True)):
                yield index, part, *pair, inputs

    def _matrix_shape(self, stacked) -> tuple[int, int]:
        """Return `(rows, columns)` of each kernel: the sizes of outputs and inputs."""
        shape = self.codes.shape
        codes = shape[stacked:]
        kernel = getattr(self.placeholder, "shape", None)
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
            raise self._error(
                "a matrix, or a kernel [*inputs, *outputs]",
                f"codes {shape} of a kernel "
                f"{'that was kept' if kernel is None else kernel}",
                "where kernels are stacked, stack along the first dimension and write "
                "{} in the name",
            )
        return math.prod(codes[: -counts[0]]), math.prod(codes[-counts[0] :])

    def _check_layout(self, stacked, n, k, layout) -> None:
        """Raise a ValueError unless scales, codes and k are as the layout needs
        them.
        """
        codes, scale = self.codes, self.scale_inv

        def fits(layout):
            shape = layout.scale_shape(n, k)
            leading = scale.ndim - len(shape)
            # a scale for a whole tensor may hold for several stacked kernels
            least = 0 if layout.block is None else stacked
            if scale.dtype != layout.dtype or not least <= leading <= stacked:
                return False
            return scale.shape == codes.shape[:leading] + shape

        fitting = [name for name in LAYOUTS if fits(LAYOUTS[name])]
        if layout not in fitting:
            advice = "no layout has such scales"
            if fitting:
                advice = f"write layout {' or '.join(map(repr, fitting))}"
            raise self._error(
                f"scales of layout {layout!r}, from {LAYOUTS[layout].recipes}",
                f"scales {scale.dtype}{list(scale.shape)} of codes {list(codes.shape)}",
                advice,
            )
        if codes.dtype != E4M3.dtype:
            raise self._error(
                "codes in float8_e4m3fn",
                f"{codes.dtype}",
                "loaders take no other; train with E4M3 or HYBRID",
            )
        if layout == "mxfp8" and k % 32:
            raise self._error(
                "inputs that are a multiple of 32",
                f"{k}",
                "loaders take no part of a block",
            )

    def _check_numbers(self) -> None:
        """Raise a ValueError for NaN codes, and for scales that are not positive and
        finite.
        """
        is_bad = np.any(self.codes.view(np.uint8) & 127 == 127)
        for scales in jax.tree.leaves((self.scale_inv, self.input_scale_inv)):
            scales = scales.astype(np.float32)
            is_bad |= not np.all(np.isfinite(scales) & (scales > 0))
        if is_bad:
            raise self._error(
                "finite codes and scales",
                "NaN",
                "repair the parameters, and freeze again",
            )

    def _error(self, needed: str, got: str, advice: str) -> ValueError:
        return ValueError(
            f"to_safetensors: {at(self.path)}: expected {needed}, got {got}; {advice}"
        )


def take_products(leaves: dict[Path, Any]) -> Iterator[tuple]:
    """Remove the frozen products from parameters by path, and yield `(product, kernel,
    placeholder, arrays by name)`: the paths of both, and None for what is not there.
    """
    for *product, last in list(leaves):
        if last == _frozen.KERNEL_SCALE_INV:
            arrays = {name: leaves.pop((*product, name), None) for name in _ARRAYS}
            kernel = (*product[:-1], _frozen.KERNEL)
            placeholder = leaves.get(kernel)
            if not isinstance(placeholder, _frozen.Placeholder):
                kernel, placeholder = (*product, _frozen.KERNEL), None
            yield product, kernel, placeholder, arrays


def take_fp8_kernels(leaves: dict[Path, Any]) -> list[FP8Kernel]:
    """Remove the frozen products and placeholders from parameters by path, and return
    the products.

    Raises:
        ValueError: the parameters hold no frozen product.
    """
    kernels = []
    for _, path, placeholder, arrays in take_products(leaves):
        codes, scale_inv, input_scale_inv, _ = jax.device_get(list(arrays.values()))
        kernels.append(FP8Kernel(path, placeholder, codes, scale_inv, input_scale_inv))
    for path, leaf in list(leaves.items()):
        if isinstance(leaf, _frozen.Placeholder):
            del leaves[path]
    if not kernels:
        raise ValueError(
            "to_safetensors: frozen: expected the variables, or the NNX model, that "
            "jaxfp8.freeze gave, found no frozen product in it"
        )
    return kernels
