"""What to_safetensors refuses: each error names the layer, what was needed and what to
do, and no file is left.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from draws import KEY
from inference import models
from parametrize import each_row
from promotion import as_users_have_jax

import jaxfp8
from convert.exported import NAMES, RECIPES, K, N, X, calibrated
from jaxfp8.convert import to_safetensors


def with_kernel(layout, change):
    """Frozen variables of a model whose kernel `up` was changed."""
    model, variables, _ = calibrated(layout)
    up = {"kernel": change(variables["params"]["up"]["kernel"])}
    with as_users_have_jax():
        return jaxfp8.freeze(
            model, variables | {"params": variables["params"] | {"up": up}}, X
        )


def one_layer(recipe, k=K, n=N):
    layer = nn.Dense(n, dot_general_cls=jaxfp8.make_dot_general_cls(recipe))
    x = jnp.ones((2, k))
    return jaxfp8.freeze(layer, layer.init(KEY, x), x)


def mixed():
    """One layer with a fixed scale of its input, and one without."""
    params = {
        name: models.linen(model)[2]["params"]
        for name, model in (("a", "rules"), ("b", "current"))
    }
    return {"params": params}


def convolution():
    conv = {"kernel": np.zeros((3, 3, 4, 8), np.float32)}
    return {"params": models.linen("rules")[2]["params"] | {"conv": conv}}


def frozen(name):
    """The frozen variables of a layout of `convert/exported.py`, or of a model of
    `inference/models.py`.
    """
    return calibrated(name)[2] if name in RECIPES else models.linen(name)[2]


def kernel_with(layout, value):
    return with_kernel(layout, lambda w: w.at[3, 4].set(value))


# name -> (variables, layout, scales found)
LAYOUTS = {
    "tensor as blocks": ("tensor", "block128", r"float32\[1\]"),
    "tensor as mx": ("tensor", "mxfp8", "float32"),
    "blocks as tensor": ("block128", "tensor", r"float32\[2, 2\]"),
    "mx as blocks": ("mxfp8", "block128", "float8_e8m0fnu"),
    "rows": ("row-wise", "tensor", r"float32\[48, 1\]"),
}


@each_row("variables, layout, scales", LAYOUTS)
def test_scales_of_another_layout(variables, layout, scales, tmp_path):
    names = NAMES if variables in RECIPES else None
    message = (
        f"kernel: expected .* scales of layout '{layout}', from .* with scales {scales}"
    )
    with pytest.raises(
        ValueError, match=f"^to_safetensors: .*{message}.*; write the layout"
    ):
        to_safetensors(frozen(variables), tmp_path / "file", names, layout=layout)
    assert not (tmp_path / "file").exists()


def of(name):
    return lambda: frozen(name)


UP_DOWN, OTHERS = "(up|down)/kernel", {".*": None}
PARTS = {"wi/kernel": ("a.weight", "b.{}.weight")} | OTHERS
BLOCKS = {"up/kernel": ("a.weight", "b.weight")} | OTHERS
STACKED = {r".*/(\w+)/kernel": r"{}.\1.weight"} | OTHERS
E5M2 = jaxfp8.Float8BlockScaling(fp8_format=jaxfp8.Format.E5M2)
NOT_FINITE = "up/kernel: expected finite codes and scales, got NaN"
# name -> (variables, layout, names, message)
ERRORS = {
    "layout": (
        of("tensor"),
        "nvfp4",
        NAMES,
        r"layout: expected one of \['block128', 'mxfp8', 'tensor'\], got 'nvfp4'",
    ),
    "e5m2": (
        lambda: one_layer(E5M2),
        "block128",
        None,
        "kernel: expected float8_e4m3fn codes .*, got float8_e5m2",
    ),
    "a part of an MX block": (
        lambda: one_layer(RECIPES["mxfp8"], k=48),
        "mxfp8",
        None,
        r"a multiple of 32, got float8_e4m3fn\[224, 48\]",
    ),
    "not frozen": (
        lambda: calibrated("tensor")[1],
        "tensor",
        NAMES,
        "frozen: expected .* found no frozen product",
    ),
    "params alone": (
        lambda: frozen("tensor")["params"],
        "tensor",
        NAMES,
        "got a dict without 'params': .*'down'",
    ),
    "no variables": (
        lambda: np.zeros(3),
        "tensor",
        NAMES,
        "frozen: expected variables, or an NNX model, got ndarray",
    ),
    "NaN, tensor": (
        lambda: kernel_with("tensor", jnp.nan),
        "tensor",
        NAMES,
        NOT_FINITE,
    ),
    "NaN, block": (
        lambda: kernel_with("block128", jnp.nan),
        "block128",
        NAMES,
        NOT_FINITE,
    ),
    "inf, mx": (lambda: kernel_with("mxfp8", jnp.inf), "mxfp8", NAMES, NOT_FINITE),
    "no name": (
        of("tensor"),
        "tensor",
        dict(list(NAMES.items())[:2]),
        "names: head/kernel matches no expression",
    ),
    "unused name": (
        of("tensor"),
        "tensor",
        NAMES | {"ups/kernel": "x"},
        r"names: \['ups/kernel'\] match no parameter",
    ),
    "one name for two": (
        of("tensor"),
        "tensor",
        {UP_DOWN: "a.weight"} | OTHERS,
        "two tensors would be 'a.weight'",
    ),
    "not a weight": (
        of("tensor"),
        "tensor",
        {UP_DOWN: r"\1"} | OTHERS,
        "down/kernel: expected a name <module>.weight",
    ),
    "braces in one part": (
        of("GatedMLP"),
        "tensor",
        PARTS,
        "wi/kernel: expected as many {} in each of",
    ),
    "parts of blocks": (
        of("block128"),
        "block128",
        BLOCKS,
        r"2 parts, of whole blocks \(128, 128\), got 224 rows",
    ),
    "stacked, without braces": (
        of("scan"),
        "tensor",
        None,
        r"Dense_0/kernel: expected a matrix.*write {} in the name",
    ),
    "stacked along 1": (
        of("scan along 1"),
        "tensor",
        STACKED,
        "a matrix.*stack along the first dimension",
    ),
    "braces, not stacked": (
        of("GatedMLP"),
        "tensor",
        {"(w.)/kernel": r"{}.\1.weight"},
        "wi/kernel: expected a matrix",
    ),
    "fixed and not": (
        mixed,
        "tensor",
        None,
        "fixed scales in all .* or in none, got a/kernel with one and b/kernel",
    ),
    "convolution": (
        convolution,
        "tensor",
        None,
        r"conv/kernel: expected 2 dimensions .*, got \[3, 3, 4, 8\]",
    ),
}


@each_row("variables, layout, names, message", ERRORS)
def test_errors(variables, layout, names, message, tmp_path):
    frozen = variables()
    error = ValueError if isinstance(frozen, dict) else TypeError
    with pytest.raises(error, match=f"^to_safetensors: .*{message}"):
        to_safetensors(frozen, tmp_path / "file", names, layout=layout)
    assert not (tmp_path / "file").exists()
