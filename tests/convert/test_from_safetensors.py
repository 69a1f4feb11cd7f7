"""Models that train on from files of others: master copies, frozen codes, names; and
what a file lacks.
"""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import safetensors.numpy
from draws import KEY, normal
from equality import assert_same_bits
from flax import nnx
from parametrize import each_row

import jaxfp8
import jaxfp8.nnx
from jaxfp8.convert import _read_safetensors, from_safetensors, read_safetensors

from .cases import OWG

PUBLISHED = pathlib.Path(__file__).parent / "published"
# file of `published/README.md` -> (block, recipe whose kernels have such scales)
FILES = {
    "tensor": (None, jaxfp8.Float8CurrentScaling()),
    "channel": ((1, None), jaxfp8.Float8RowwiseScaling()),
    "block": ((128, 128), jaxfp8.Float8BlockScaling()),
    "deepseek": ((128, 128), jaxfp8.Float8BlockScaling()),
    "mxfp8": ((1, 32), jaxfp8.MXFP8BlockScaling()),
}
WEIGHT = {"kernel": "up.weight"}
NAMES = WEIGHT | {"bias": None}


def path_of(name):
    return PUBLISHED / f"{name}.safetensors"


def frozen_shapes(name, recipe):
    """A layer that fits the weight of a file, and the shapes of its variables once it
    is frozen.
    """
    n, k = read_safetensors(path_of(name))["up.weight"].data.shape
    layer = nn.Dense(
        n, dot_general_cls=jaxfp8.make_dot_general_cls(recipe), use_bias=False
    )
    x = jnp.ones((2, k))
    return layer, jax.eval_shape(lambda: jaxfp8.freeze(layer, layer.init(KEY, x), x))


@pytest.mark.parametrize("name", FILES)
def test_published_weights(name):
    """Every 17th row is to the bit what the library that wrote the file makes of it."""
    tensors = read_safetensors(path_of(name))
    assert set(tensors) == {"up.weight", "expected"}
    assert tensors["up.weight"].block == FILES[name][0]
    weight = tensors["up.weight"].decode()
    oracle.assert_bitwise(weight[::17], tensors["expected"].data, name)
    # The master copy, in the dtype of the model; other parameters stay.
    for dtype in (jnp.float32, jnp.bfloat16):
        leaves = {
            "kernel": jax.ShapeDtypeStruct(weight.T.shape, dtype),
            "bias": jnp.ones(3),
        }
        params = from_safetensors({"params": leaves}, path_of(name), NAMES)["params"]
        assert params["bias"] is leaves["bias"]
        oracle.assert_bitwise(params["kernel"], weight.T.astype(dtype), name)


@pytest.mark.parametrize("name", FILES)
def test_frozen_codes(name):
    """A frozen model takes the codes and scales of the file as they are; gradients go
    through them to what trains.
    """
    layer, shapes = frozen_shapes(name, FILES[name][1])
    frozen = from_safetensors(shapes, path_of(name), WEIGHT)
    stored = read_safetensors(path_of(name))["up.weight"]
    product = frozen["params"]["Fp8DotGeneral_0"]
    oracle.assert_bitwise(product["kernel"], stored.data, "codes")
    oracle.assert_bitwise(
        np.asarray(product["kernel_scale_inv"]).astype(np.float32),
        stored.scale_inv,
        "scales",
    )
    x = np.eye(2, stored.data.shape[1], dtype=np.float32)
    y, dx = jax.value_and_grad(
        lambda x: jnp.vdot(layer.apply(frozen, x), jnp.ones((2, stored.data.shape[0])))
    )(x)
    exact = stored.decode(np.float64)
    np.testing.assert_allclose(y, exact[:, :2].sum(), rtol=1e-5)
    np.testing.assert_allclose(
        dx[0], exact.sum(axis=0), rtol=0.1, atol=0.02 * np.abs(exact).sum(axis=0).max()
    )


def write(path, **tensors):
    safetensors.numpy.save_file(tensors, path)
    return path


def test_names_and_shapes(tmp_path):
    """Stacked layers, several weights in one kernel, dimensions that are merged,
    and several files.
    """
    weights = {
        f"l.{i}.{part}.weight": normal(3, 4, seed=10 * i + j)
        for i in range(2)
        for j, part in enumerate("gu")
    }
    one = np.ones(1, np.float32)
    bias = np.arange(6, dtype=np.float32)
    head = normal(4, 6, seed=99)
    files = [
        write(tmp_path / "a", **weights, norm=one),
        write(
            tmp_path / "b",
            **{"o.bias": bias, "o.weight": normal(6, 4, seed=7), "head.weight": head},
        ),
    ]
    shapes = {
        "params": {
            "layers": {"wi": {"kernel": jnp.zeros((2, 4, 2, 3))}},
            "o": {
                "kernel": jnp.zeros((2, 2, 2, 3), jnp.bfloat16),
                "bias": jnp.zeros((2, 3)),
            },
            "embed": {"embedding": jnp.zeros((4, 6))},
        }
    }
    names = {
        "layers/wi/kernel": ("l.{}.g.weight", "l.{}.u.weight"),
        r"o/kernel": "o.weight",
        "o/bias": "o.bias",
        ".*embedding": "head.weight",
    }
    find = _read_safetensors.Names("", {"k": ("{}.a.{}", "{}.b.{}")})
    places = list(find(("k",), (1, 2, 3)))
    assert places == [((0, i), [f"0.a.{i}", f"0.b.{i}"]) for i in range(2)]
    params = from_safetensors(shapes, files, names)["params"]
    for i, j in np.ndindex(2, 2):
        wanted = weights[f"l.{i}.{'gu'[j]}.weight"].T
        np.testing.assert_array_equal(params["layers"]["wi"]["kernel"][i, :, j], wanted)
    wanted = normal(6, 4, seed=7).T.reshape(2, 2, 2, 3).astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["o"]["kernel"], wanted)
    np.testing.assert_array_equal(params["o"]["bias"], bias.reshape(2, 3))
    np.testing.assert_array_equal(params["embed"]["embedding"], head)


def test_nnx():
    """In place, and abstract models become real ones."""
    layer = nnx.eval_shape(lambda: nnx.Linear(64, 6, use_bias=False, rngs=nnx.Rngs(0)))
    assert from_safetensors(layer, path_of("channel"), WEIGHT) is layer
    weight = read_safetensors(path_of("channel"))["up.weight"].decode()
    oracle.assert_bitwise(layer.kernel[...], np.ascontiguousarray(weight.T), "kernel")


def test_state_of_shapes():
    """The state of a model that `eval_shape` gave is that of `init`; state of arrays
    stays.
    """
    state = jaxfp8.init_state(jaxfp8.DelayedScaling())
    state = {"one": state, "stacked": jax.tree.map(lambda leaf: leaf[None], state)}
    variables = {"params": {"kernel": jnp.zeros((64, 6))}, OWG: state}
    shapes = jax.eval_shape(lambda: variables)
    got = from_safetensors(shapes, path_of("channel"), WEIGHT)
    assert_same_bits(got[OWG], state, "first state")
    trained = variables | {OWG: jax.tree.map(lambda leaf: leaf + 2, state)}
    got = from_safetensors(trained, path_of("channel"), WEIGHT)
    assert_same_bits(got[OWG], trained[OWG], "trained state")

    def make():
        product = jaxfp8.nnx.Fp8DotGeneral()
        return nnx.Linear(64, 6, use_bias=False, rngs=nnx.Rngs(0), dot_general=product)

    model = from_safetensors(nnx.eval_shape(make), path_of("channel"), WEIGHT)
    first = nnx.state(make().dot_general)
    assert_same_bits(nnx.state(model.dot_general), first, "NNX")


def test_shapes_without_values():
    """A shape that no tensor fills is an error, which names it, and changes nothing."""
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    kernel = jax.ShapeDtypeStruct((64, 6), jnp.float32)
    for variables, left in (
        ({"params": {"kernel": kernel, "bias": shape}}, "params/bias"),
        (
            {"params": {"kernel": kernel}, OWG: {"dot": {"input_state": shape}}},
            f"{OWG}/dot/input_state",
        ),
    ):
        with pytest.raises(
            ValueError,
            match=(
                f"^from_safetensors: variables: {left}: expected arrays where no tensor"
            ),
        ):
            from_safetensors(
                variables,
                path_of("channel"),
                NAMES if "params/bias" == left else WEIGHT,
            )
    model = nnx.eval_shape(lambda: nnx.Linear(64, 6, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match="^from_safetensors: variables: bias: expected arrays"
    ):
        from_safetensors(model, path_of("channel"), NAMES)
    assert isinstance(model.kernel.get_value(), jax.ShapeDtypeStruct)


CODES, SCALE = np.zeros((6, 4), oracle.E4M3), np.ones(1, np.float32)
LAYER = {"params": {"kernel": jnp.zeros((4, 6))}}
WITH_BIAS = {"params": LAYER["params"] | {"bias": jnp.zeros(6)}}
GOOD = {"up.weight": CODES, "up.weight_scale": SCALE}
FOR = "up.weight, for kernel: expected"
# name -> (variables, names, tensors of the file, message)
ERRORS = {
    "no tensor": (
        LAYER,
        WEIGHT,
        {"o.weight": CODES},
        f"{FOR} this tensor .*got none; the file has 'o.weight'",
    ),
    "no scales": (
        LAYER,
        WEIGHT,
        {"up.weight": CODES},
        f"{FOR} scales up.weight_scale or .*got none",
    ),
    "shape": (
        LAYER,
        WEIGHT,
        {"up.weight": normal(4, 6)},
        rf"{FOR} shape \[4, 6\], or .*got \[6, 4\]",
    ),
    "rank": (
        LAYER,
        WEIGHT,
        {"up.weight": normal(4, 6)[None]},
        rf"{FOR} shape \[4, 6\], or .*got \[6, 4, 1\]",
    ),
    "integers": (
        LAYER,
        WEIGHT,
        {"up.weight": np.zeros((6, 4), np.int32)},
        f"{FOR} floats, got I32",
    ),
    "scales": (
        LAYER,
        WEIGHT,
        GOOD | {"up.weight_scale": np.ones(3, np.float32)},
        r"up.weight: expected .*got \(3,\) of",
    ),
    "bias": (
        WITH_BIAS,
        WEIGHT | {"bias": "b"},
        GOOD | {"b": SCALE},
        r"b, for bias: expected shape \[6\], .*got \[1\]",
    ),
    "no name": (WITH_BIAS, WEIGHT, GOOD, "names: bias matches no expression"),
    "unused": (LAYER, WEIGHT | {"x": "y"}, GOOD, r"names: \['x'\] match no parameter"),
    "braces": (
        LAYER,
        {"kernel": "{}.{}.{}.weight"},
        GOOD,
        r"names: kernel: expected as many {} .* for each dimension of \[4, 6\]",
    ),
}


@each_row("variables, names, tensors, message", ERRORS)
def test_errors(variables, names, tensors, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        from_safetensors(variables, write(tmp_path / "file", **tensors), names)


def test_what_does_not_fit():
    """A tensor that two files have; a model that is none."""
    with pytest.raises(
        ValueError, match="expected one tensor of this name, got another in"
    ):
        from_safetensors(LAYER, [path_of("channel"), path_of("tensor")], WEIGHT)
    with pytest.raises(
        TypeError,
        match=(
            "from_safetensors: variables: expected variables, or an NNX model, got list"
        ),
    ):
        from_safetensors([], path_of("channel"), WEIGHT)


def test_frozen_models_of_other_recipes():
    """Codes are taken as they are, so their scales have to be those of the model's
    recipe.
    """
    current = jaxfp8.Float8CurrentScaling()
    mx = jaxfp8.MXFP8BlockScaling()
    e5m2 = jaxfp8.Float8CurrentScaling(jaxfp8.Format.E5M2)
    for name, recipe, message in (
        (
            "channel",
            current,
            r"scales float32\[1\], .*got scales of shapes \[\(6, 1\)\]",
        ),
        ("tensor", mx, r"scales float8_e8m0fnu\[6, 2\].*\[\(1,\)\]"),
        ("tensor", e5m2, "codes in float8_e5m2, got float8_e4m3fn"),
    ):
        _, shapes = frozen_shapes(name, recipe)
        with pytest.raises(ValueError, match=f"{FOR} {message}"):
            from_safetensors(shapes, path_of(name), WEIGHT)
