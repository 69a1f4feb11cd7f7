"""The names and shapes under which loaders of FP8 weights expect scales, and the configs that tell the loaders."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..ops import _blocks


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


def quantization_config(layout: str, ignored: list[str], is_static: bool) -> dict[str, Any]:
    """Return the `quantization_config` of a model's `config.json`.

    Args:
        layout: a name in `LAYOUTS`.
        ignored: the modules whose kernels are in high precision.
        is_static: whether inputs have fixed scales.

    References:
        DeepSeek-V3's `config.json`, which transformers' `FineGrainedFP8Config` and vLLM's `Fp8Config` read;
        `QuantizationConfig` and the presets FP8 and MXFP8 of compressed-tensors 0.20.
    """
    if layout == "block128":
        config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        # Transformers reads `modules_to_not_convert`, older versions of vLLM read `ignored_layers`.
        return config | {"modules_to_not_convert": ignored, "ignored_layers": ignored}
    scales = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    if layout == "mxfp8":
        scales |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    group = {"weights": scales | {"dynamic": False}, "input_activations": scales | {"dynamic": not is_static}}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if layout == "mxfp8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"]} | group},
        "ignore": ignored,
    }
