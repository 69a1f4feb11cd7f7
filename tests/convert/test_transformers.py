"""transformers and compressed-tensors load exported weights, where they are installed
(tried: 5.23.0 and 0.20.0).
"""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from promotion import as_users_have_jax

import jaxfp8
from convert.exported import LAYOUTS, RECIPES
from jaxfp8.convert import read_safetensors, to_safetensors

HIDDEN, HEADS, HEAD, FEATURES, VOCABULARY = 128, 2, 64, 384, 320
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEATURES,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "dtype": "float32",
}
NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
    r"(\d)/norm_attention/scale": r"model.layers.\1.input_layernorm.weight",
    r"(\d)/norm_mlp/scale": r"model.layers.\1.post_attention_layernorm.weight",
    r"(\d)/([qkvo])/kernel": r"model.layers.\1.self_attn.\2_proj.weight",
    r"(\d)/(\w+)/kernel": r"model.layers.\1.mlp.\2_proj.weight",
}


class Llama(nn.Module):
    """Layers with the parameters of Llama's; attention is left out."""

    recipe: object

    @nn.compact
    def __call__(self, tokens):
        fp8 = {
            "use_bias": False,
            "dot_general_cls": jaxfp8.make_dot_general_cls(self.recipe),
        }
        x = nn.Embed(VOCABULARY, HIDDEN, name="embed")(tokens)
        for i in range(2):
            h = nn.RMSNorm(name=f"{i}/norm_attention")(x)
            q, k, v = (
                nn.DenseGeneral((HEADS, HEAD), name=f"{i}/{name}", **fp8)(h)
                for name in "qkv"
            )
            x = x + nn.DenseGeneral(HIDDEN, axis=(-2, -1), name=f"{i}/o", **fp8)(
                q + k + v
            )
            h = nn.RMSNorm(name=f"{i}/norm_mlp")(x)
            gate, up = (
                nn.Dense(FEATURES, name=f"{i}/{name}", **fp8)(h)
                for name in ("gate", "up")
            )
            x = x + nn.Dense(HIDDEN, name=f"{i}/down", **fp8)(nn.silu(gate) * up)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(
            nn.RMSNorm(name="norm")(x)
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_llama(layout, tmp_path):
    """No tensor is missing, none is unknown; dequantized by transformers, weights have
    the bits of `decode`.
    """
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    tokens = jnp.arange(24).reshape(2, 12)
    with as_users_have_jax():
        model = Llama(RECIPES[layout])
        variables = model.init(jax.random.key(0), tokens)
        variables = (
            jaxfp8.calibrate(model, variables, [tokens])
            if layout == "tensor"
            else variables
        )
        frozen = jaxfp8.freeze(model, variables, tokens)
    config = to_safetensors(
        frozen, tmp_path / "model.safetensors", NAMES, layout=layout
    )
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": config})
    )
    loader = (
        transformers.FineGrainedFP8Config
        if layout == "block128"
        else transformers.CompressedTensorsConfig
    )
    options = loader(dequantize=True)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, quantization_config=options
    )
    unknown = {
        name for name in info["unexpected_keys"] if not name.endswith("input_scale")
    }
    assert not info["missing_keys"] and not unknown and not info["mismatched_keys"]
    state = theirs.state_dict()
    ours = read_safetensors(tmp_path / "model.safetensors")
    assert set(state) == set(ours)
    for name, tensor in ours.items():
        np.testing.assert_array_equal(state[name].numpy(), tensor.decode(), name)
    # and kept in FP8, by compressed-tensors, every byte is that of the file
    if layout != "block128":
        kept, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        import torch

        state = {
            name: value.contiguous().view(torch.uint8).numpy()
            for name, value in kept.state_dict().items()
        }
        for name, tensor in ours.items():
            assert state[name].tobytes() == tensor.data.tobytes(), name
            if tensor.input_scale_inv is not None:
                scale = state[f"{name.removesuffix('weight')}input_scale"]
                assert scale.tobytes() == tensor.input_scale_inv.tobytes()
