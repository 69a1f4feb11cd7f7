"""What to_safetensors refuses: each error names the layer, what was needed and what to do, and no file is left."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference import models

import jaxfp8
from convert.exported import NAMES, RECIPES, K, N, X, trained
from jaxfp8.convert import to_safetensors


def with_kernel(layout, change):
    """Frozen variables of a model whose kernel `up` was changed."""
    model, variables, _ = trained(layout)
    up = {"kernel": change(variables["params"]["up"]["kernel"])}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jaxfp8.freeze(model, variables | {"params": variables["params"] | {"up": up}}, X)


def one_layer(recipe, k=K, n=N):
    layer = nn.Dense(n, dot_general_cls=jaxfp8.make_dot_general_cls(recipe))
    x = jnp.ones((2, k))
    return jaxfp8.freeze(layer, layer.init(jax.random.key(0), x), x)


def mixed():
    """One layer with a fixed scale of its input, and one without."""
    params = {name: models.linen(model)[2]["params"] for name, model in (("a", "rules"), ("b", "current"))}
    return {"params": params}


def convolution():
    conv = {"kernel": np.zeros((3, 3, 4, 8), np.float32)}
    return {"params": models.linen("rules")[2]["params"] | {"conv": conv}}


ONE = r"kernel: expected scales of layout '{}', from .*, got scales {}.*those of the recipe {}; {}"
ERRORS = {
    "tensor as blocks": (
        lambda: trained("tensor")[2],
        "block128",
        NAMES,
        ONE.format("block128", r"float32\[1\]", "DelayedScaling or Float8CurrentScaling", "write layout 'tensor'"),
    ),
    "tensor as mx": (
        lambda: trained("tensor")[2],
        "mxfp8",
        NAMES,
        ONE.format("mxfp8", "float32", "DelayedScaling.*", "write layout 'tensor'"),
    ),
    "blocks as tensor": (
        lambda: trained("block128")[2],
        "tensor",
        NAMES,
        ONE.format("tensor", r"float32\[2, 2\]", "Float8BlockScaling", "write layout 'block128'"),
    ),
    "mx as blocks": (
        lambda: trained("mxfp8")[2],
        "block128",
        NAMES,
        ONE.format("block128", "float8_e8m0fnu", "MXFP8BlockScaling", "write layout 'mxfp8'"),
    ),
    "rows": (
        lambda: models.linen("row-wise")[2],
        "tensor",
        None,
        ONE.format("tensor", r"float32\[48, 1\]", "Float8RowwiseScaling or a custom one", "no layout has such scales"),
    ),
    "layout": (
        lambda: trained("tensor")[2],
        "nvfp4",
        NAMES,
        r"layout: expected one of \['block128', 'mxfp8', 'tensor'\], got 'nvfp4'",
    ),
    "e5m2": (
        lambda: one_layer(jaxfp8.Float8BlockScaling(fp8_format=jaxfp8.E5M2)),
        "block128",
        None,
        "kernel: expected codes in float8_e4m3fn, got float8_e5m2",
    ),
    "a part of an MX block": (
        lambda: one_layer(RECIPES["mxfp8"], k=48),
        "mxfp8",
        None,
        "expected inputs that are a multiple of 32, got 48",
    ),
    "not frozen": (
        lambda: trained("tensor")[1],
        "tensor",
        NAMES,
        "frozen: expected the variables, .* found no frozen product",
    ),
    "params alone": (lambda: trained("tensor")[2]["params"], "tensor", NAMES, "got a dict without 'params': .*'down'"),
    "no variables": (lambda: np.zeros(3), "tensor", NAMES, "that jaxfp8.freeze gave, got ndarray"),
    "NaN, tensor": (
        lambda: with_kernel("tensor", lambda w: w.at[3, 4].set(jnp.nan)),
        "tensor",
        NAMES,
        "up/kernel: expected finite codes and scales, got NaN",
    ),
    "NaN, block": (
        lambda: with_kernel("block128", lambda w: w.at[3, 4].set(jnp.nan)),
        "block128",
        NAMES,
        "up/kernel: expected finite codes and scales, got NaN",
    ),
    "inf, mx": (
        lambda: with_kernel("mxfp8", lambda w: w.at[3, 4].set(jnp.inf)),
        "mxfp8",
        NAMES,
        "up/kernel: expected finite codes and scales, got NaN",
    ),
    "no name": (
        lambda: trained("tensor")[2],
        "tensor",
        dict(list(NAMES.items())[:2]),
        "names: head/kernel matches no expression",
    ),
    "unused name": (
        lambda: trained("tensor")[2],
        "tensor",
        NAMES | {"ups/kernel": "x"},
        r"names: \['ups/kernel'\] match no parameter",
    ),
    "one name for two": (
        lambda: trained("tensor")[2],
        "tensor",
        {"(up|down)/kernel": "a.weight", ".*": None},
        "two tensors would be 'a.weight'",
    ),
    "not a weight": (
        lambda: trained("tensor")[2],
        "tensor",
        {"(up|down)/kernel": r"\1", ".*": None},
        "down/kernel: expected a name <module>.weight, got 'down'",
    ),
    "braces in one part": (
        lambda: models.linen("GatedMLP")[2],
        "tensor",
        {"wi/kernel": ("a.weight", "b.{}.weight"), ".*": None},
        "wi/kernel: expected as many {} in each of",
    ),
    "parts of blocks": (
        lambda: trained("block128")[2],
        "block128",
        {"up/kernel": ("a.weight", "b.weight"), ".*": None},
        r"up/kernel: expected rows that divide into 2 parts, of whole blocks \(128, 128\), got 224 rows",
    ),
    "stacked, without braces": (
        lambda: models.linen("scan")[2],
        "tensor",
        None,
        r"Dense_0/kernel: expected a matrix.*write {} in the name",
    ),
    "stacked along 1": (
        lambda: models.linen("scan along 1")[2],
        "tensor",
        {r".*/(\w+)/kernel": r"{}.\1.weight", ".*": None},
        "expected a matrix.*stack along the first dimension",
    ),
    "braces, not stacked": (
        lambda: models.linen("GatedMLP")[2],
        "tensor",
        {"(w.)/kernel": r"{}.\1.weight"},
        "wi/kernel: expected a matrix",
    ),
    "fixed and not": (
        mixed,
        "tensor",
        None,
        "expected inputs with fixed scales in all layers or in none, got a/kernel with one and b/kernel without",
    ),
    "convolution": (
        convolution,
        "tensor",
        None,
        r"conv/kernel: expected 2 dimensions for 'conv.weight', got \[3, 3, 4, 8\]",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tmp_path):
    frozen, layout, names, message = ERRORS[name]
    frozen = frozen()
    with pytest.raises(TypeError if name == "no variables" else ValueError, match=f"^to_safetensors: .*{message}"):
        to_safetensors(frozen, tmp_path / "file", names, layout=layout)
    assert not (tmp_path / "file").exists()
