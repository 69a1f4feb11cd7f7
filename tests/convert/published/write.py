"""Writes the files beside it with the libraries that others publish weights with; they
are committed, to be read.

    # in an environment with torch, compressed-tensors 0.20 and transformers 5.24
    python write.py

Each file has a layer "up" in the library's layout, and "expected": every 17th row of
what the same library makes of it. No module of the package is imported.
"""

import pathlib
import types

import torch
from compressed_tensors.compressors import compress_module, decompress_module
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

ROWS = 17
FOLDER = pathlib.Path(__file__).parent
# name -> (preset, rows, columns, the rows and columns that share a scale; 0 is all)
PRESETS = {
    "tensor": ("FP8", 6, 64, (0, 0)),
    "channel": ("FP8_DYNAMIC", 6, 64, (1, 0)),
    "block": ("FP8_BLOCK", 136, 160, (128, 128)),
    "mxfp8": ("MXFP8", 6, 64, (1, 32)),
}


def weight_of(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator) * torch.exp(
        torch.randn(rows, 1, generator=generator)
    )


def extremes(weight, block):
    """The smallest and the largest number of each block."""
    rows, columns = (
        step or size for step, size in zip(block, weight.shape, strict=True)
    )
    parts = [[part for part in band.split(columns, 1)] for band in weight.split(rows)]
    return (
        torch.stack([torch.stack([f(part) for part in band]) for band in parts])
        for f in (torch.min, torch.max)
    )


def compressed(preset, rows, columns, block):
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(columns, rows, bias=False)})
    up = model["up"]
    weight = weight_of(rows, columns)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme})
    )
    up.weight.data = weight
    scale, zero = calculate_qparams(*extremes(weight, block), scheme.weights)
    up.weight_scale.data = scale.reshape(up.weight_scale.shape).to(
        up.weight_scale.dtype
    )
    if hasattr(up, "input_scale"):
        up.input_scale.data.fill_(0.125)
    compress_module(up)
    tensors = {f"up.{name}": tensor.clone() for name, tensor in up.state_dict().items()}
    decompress_module(up)
    return tensors | {"expected": up.weight.data[::ROWS].float().contiguous()}


def deepseek(rows, columns):
    """Blocks of 128 as transformers writes them, after DeepSeek-V3."""
    config = types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = types.SimpleNamespace(quantization_config=config)
    tensors = Fp8Quantize(quantizer).convert({"up.weight": weight_of(rows, columns)})
    whole = Fp8Dequantize(quantizer)._dequantize_one(
        tensors["up.weight"], tensors["up.weight_scale_inv"], torch.float32
    )
    return tensors | {"expected": whole[::ROWS].contiguous()}


def main():
    for name, preset in PRESETS.items():
        save_file(compressed(*preset), FOLDER / f"{name}.safetensors")
    save_file(deepseek(128, 256), FOLDER / "deepseek.safetensors")


if __name__ == "__main__":
    main()
