"""What is trained is what is served: numpy, which knows the file and its config alone,
gives the result of a training step.
"""

import flax.linen as nn
import jax
import numpy as np
import oracle
from draws import KEY
from inference.models import OWG
from oracle import E4M3, blocks as oracle_blocks
from parametrize import each_row

import jaxfp8
from convert import numpy_reader
from convert.exported import RECIPES, N, X
from jaxfp8.convert import to_safetensors

TRAINERS = {name: (recipe, name) for name, recipe in RECIPES.items()}
TRAINERS["tensor, current"] = jaxfp8.Float8CurrentScaling(), "tensor"
TRAINERS["tensor, constant"] = jaxfp8.StaticScaling(input=3.0, kernel=2.0), "tensor"


def served(tensors, config, x) -> oracle.Product:
    """The product of x and the weight of a file, whose scales the config describes."""
    weight = tensors["up.weight"].view(E4M3.dtype)
    if config["quant_method"] == "fp8":
        block = tuple(config["weight_block_size"])
        scales = tensors["up.weight_scale_inv"]
        codes, x_scales = oracle_blocks.quantize(x, E4M3, (1, block[1]))
        return oracle_blocks.matmul(
            codes, weight, x_scales, scales, a_block=(1, block[1]), b_block=block
        )
    group = config["config_groups"]["group_0"]
    scales = tensors["up.weight_scale"]
    if group["weights"]["strategy"] == "group":
        block = (1, group["weights"]["group_size"])
        scales = scales.view(oracle_blocks.E8M0)
        codes, x_scales = oracle_blocks.quantize(x, E4M3, block, scale="e8m0")
        return oracle_blocks.matmul(
            codes, weight, x_scales, scales, a_block=block, b_block=block
        )
    x_scale = oracle.amax(x) / np.float32(448)
    if not group["input_activations"]["dynamic"]:
        x_scale = tensors["up.input_scale"][0]
    codes, _ = oracle.quantize(x, 1 / x_scale, E4M3)
    return oracle.scaled_matmul(codes, weight, x_scale, scales[0])


@each_row("recipe, layout", TRAINERS)
def test_a_layer_as_served(recipe, layout, tmp_path):
    cls = jaxfp8.make_dot_general_cls(recipe)
    layer = nn.Dense(N, use_bias=False, dot_general_cls=cls)
    variables = layer.init(KEY, X)
    if OWG in variables:
        variables = jaxfp8.calibrate(layer, variables, [X])
    frozen = jaxfp8.freeze(layer, variables, X)
    names = {"kernel": "up.weight"}
    config = to_safetensors(frozen, tmp_path / "file", names, layout=layout)
    trained, _ = jax.vjp(lambda variables: layer.apply(variables, X), variables)
    served(numpy_reader.read(tmp_path / "file"), config, X).check(trained, layout)
