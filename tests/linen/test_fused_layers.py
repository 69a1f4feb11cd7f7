"""linen.GatedMLP, NormDense and Dense of several dimensions: parameters, dtypes, and the products they are made of."""

import dataclasses
import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from aot import count
from equality import assert_same_bits
from flax.training.train_state import TrainState

import jaxfp8
from jaxfp8.linen import Dense, GatedMLP, NormDense

from .probes import OWG, RECIPE

ROWS, WIDTH, HIDDEN = 5, 6, 8
F32, BF16, F16 = np.dtype(np.float32), oracle.BF16, oracle.F16
FEATURES = (3, 2, 4)
OPTIONS = {"recipe": RECIPE, "use_bias": True, "bias_init": nn.initializers.normal(0.5)}
NORM = {"scale_init": nn.initializers.normal(1.0), "norm_bias_init": nn.initializers.normal(0.5), "epsilon": 0.25}
LAYERS = {
    "dense": Dense(FEATURES, **OPTIONS),
    "silu mlp": GatedMLP(HIDDEN, **OPTIONS),
    "gelu mlp": GatedMLP(HIDDEN, features=7, activation="gelu", **OPTIONS),
    "rms dense": NormDense(FEATURES, kind="rms", **OPTIONS, **NORM),
    "layer dense": NormDense(7, kind="layer", **OPTIONS, **NORM),
}


def inputs(dtype=F32, rows=(ROWS,)):
    return np.random.default_rng(0).standard_normal((*rows, WIDTH)).astype(F32).astype(dtype)


def with_history(variables):
    """The state of a layer that has run, so that scales are no powers of two."""
    rng = np.random.default_rng(1)
    draw = lambda leaf: rng.uniform(1, 2, leaf.shape).astype(F32)  # noqa: E731
    return variables | {OWG: jax.tree.map(draw, variables[OWG])}


def init(layer, x, seed=0):
    return with_history(layer.init(jax.random.key(seed), x))


def state_of(variables, *path):
    """The DotGeneralState of a Dense."""
    found = variables[OWG]
    for name in path:
        found = found[name]
    found = found["Fp8DotGeneral_0"]
    quantizers = (
        jaxfp8.QuantizerState(amax_history=found[f"{name}_amax_history"], scale=found[f"{name}_scale"])
        for name in ("input", "kernel", "output_grad")
    )
    return jaxfp8.DotGeneralState(*quantizers)


def product(x, variables, path, dtype):
    """What a Dense is: one product, from its parameters and state."""
    params = variables["params"]
    for name in path:
        params = params[name]
    return jaxfp8.dot_general(
        x,
        params["kernel"],
        (((len(x.shape) - 1,), (0,)), ((), ())),
        recipe=RECIPE,
        state=state_of(variables, *path),
        bias=params["bias"],
        preferred_element_type=dtype,
    )


def written_out(layer, variables, x, dtype):
    """The layer by its definition."""
    if isinstance(layer, GatedMLP):
        h = product(x, variables, ("wi",), dtype)
        return product(jaxfp8.activated(h, f"{layer.activation}_gated"), variables, ("wo",), dtype)
    if isinstance(layer, NormDense):
        params = variables["params"]
        norm_bias = params["norm_bias"] if layer.kind == "layer" else None
        x = jaxfp8.normalized(x, params["scale"], norm_bias, kind=layer.kind, epsilon=layer.epsilon)
        return product(x, variables, ("dense",), dtype)
    return product(x, variables, (), dtype)


@pytest.mark.varied
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_values_and_gradients(layer, dtype):
    """Those of the functions, whose numbers fused/test_values.py compares with formulas."""
    layer, x = layer.clone(dtype=dtype), inputs(dtype)
    variables = init(layer, x)

    def loss(variables, x, apply):
        y = apply(variables, x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    def step(apply):
        return jax.jit(lambda *a: jax.grad(loss, argnums=(0, 1), has_aux=True)(*a, apply))(variables, x)

    got = step(layer.apply)
    assert_same_bits(got, step(lambda variables, x: written_out(layer, variables, x, dtype)), "layer")
    (of_variables, dx), y = got
    assert y.dtype == dx.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(of_variables)} == {F32}
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got)), "everything has a gradient"


def test_parameters():
    shapes = {
        name: jax.tree.map(jnp.shape, layer.init(jax.random.key(0), inputs())["params"])
        for name, layer in LAYERS.items()
    }
    assert shapes == {
        "dense": {"kernel": (WIDTH, *FEATURES), "bias": FEATURES},
        "silu mlp": {
            "wi": {"kernel": (WIDTH, 2, HIDDEN), "bias": (2, HIDDEN)},
            "wo": {"kernel": (HIDDEN, WIDTH), "bias": (WIDTH,)},
        },
        "gelu mlp": {
            "wi": {"kernel": (WIDTH, 2, HIDDEN), "bias": (2, HIDDEN)},
            "wo": {"kernel": (HIDDEN, 7), "bias": (7,)},
        },
        "rms dense": {"scale": (WIDTH,), "dense": {"kernel": (WIDTH, *FEATURES), "bias": FEATURES}},
        "layer dense": {
            "scale": (WIDTH,),
            "norm_bias": (WIDTH,),
            "dense": {"kernel": (WIDTH, 7), "bias": (7,)},
        },
    }


def test_defaults():
    """No bias but in Dense; a norm starts as one; history of the default recipe."""
    for layer in (GatedMLP(HIDDEN), NormDense(7, kind="layer")):
        variables = layer.init(jax.random.key(0), inputs())
        assert not [path for path, _ in jax.tree.leaves_with_path(variables["params"]) if path[-1].key == "bias"]
    np.testing.assert_array_equal(variables["params"]["scale"], np.ones(WIDTH))
    np.testing.assert_array_equal(variables["params"]["norm_bias"], np.zeros(WIDTH))
    history = variables[OWG]["dense"]["Fp8DotGeneral_0"]["input_amax_history"]
    assert history.shape == (jaxfp8.DelayedScaling().amax_history_len,)


def test_kernels_are_initialized_as_those_of_one_dimension():
    """As nn.Dense and nn.DenseGeneral do for the same key; so the variance is that of the fan-in."""
    x, key, size = inputs(), jax.random.key(3), int(np.prod(FEATURES))
    ours = Dense(FEATURES, recipe=RECIPE).init(key, x)["params"]["kernel"]
    oracle.assert_bitwise(ours.reshape(WIDTH, size), nn.Dense(size).init(key, x)["params"]["kernel"], "nn.Dense")
    general = nn.DenseGeneral(FEATURES).init(key, x)["params"]["kernel"]
    oracle.assert_bitwise(ours, general, "nn.DenseGeneral")


def test_parameter_dtype():
    layers = [layer.clone(param_dtype=BF16) for layer in LAYERS.values()]
    for layer in layers:
        assert {leaf.dtype for leaf in jax.tree.leaves(layer.init(jax.random.key(0), inputs())["params"])} == {BF16}


@pytest.mark.parametrize("x_dtype, dtype, y_dtype", [
    (F32, None, F32), (BF16, None, F32), (F32, BF16, BF16), (BF16, F32, F32), (np.dtype(np.int32), None, F32),
])  # fmt: skip
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_compute_dtype(layer, x_dtype, dtype, y_dtype):
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), x_dtype)
    y, _ = jax.eval_shape(layer.clone(dtype=dtype).init_with_output, jax.random.key(0), x)
    assert y.dtype == y_dtype


@pytest.mark.varied
@pytest.mark.parametrize("rows", [(), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_any_rank(layer, rows):
    x = inputs(rows=rows)
    variables = init(layer, x)
    y = layer.apply(variables, x)
    flat = layer.apply(variables, x.reshape(-1, WIDTH))
    # A vector is not fused: its value is rounded to f32 and no more, so the codes are the same.
    oracle.assert_bitwise(y, np.asarray(flat).reshape(*rows, *flat.shape[1:]), "y")


@pytest.mark.parametrize("name", ["silu mlp", "layer dense"])
def test_quantized_parameters(name):
    layer, x = LAYERS[name], inputs()
    variables = init(layer, x)

    def loss(variables, quantize):
        params = variables["params"]
        if quantize:
            params = jaxfp8.quantize_params(params, variables[OWG], RECIPE)
            kernels = [
                leaf
                for leaf in jax.tree.leaves(params, is_leaf=lambda v: isinstance(v, jaxfp8.QTensor))
                if isinstance(leaf, jaxfp8.QTensor)
            ]
            assert len(kernels) == (2 if name == "silu mlp" else 1)
        return jnp.sum(jnp.sin(layer.apply(variables | {"params": params}, x)))

    got, expected = (jax.jit(jax.grad(loss), static_argnums=1)(variables, quantize) for quantize in (True, False))
    assert_same_bits(got, expected, "gradients")


class Block(nn.Module):
    """A transformer's feed-forward block with its norm, in the form of a scan's body."""

    @nn.compact
    def __call__(self, x, _):
        h = NormDense(WIDTH, recipe=RECIPE, name="first", dtype=BF16)(x)
        return x + GatedMLP(HIDDEN, recipe=RECIPE, name="second", dtype=BF16)(h).astype(x.dtype), None


@pytest.mark.parametrize("remat", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_scan_over_layers(remat):
    """The bits of the layers one after the other: values, gradients and states."""
    block = nn.remat(Block, prevent_cse=False) if remat else Block
    axes = {"params": 0, OWG: 0}
    stack = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, in_axes=nn.broadcast, length=3)()
    x = inputs()
    variables = with_history(stack.init(jax.random.key(0), x, None))

    def one_by_one(variables, x):
        for i in range(3):
            x, _ = Block().apply(jax.tree.map(lambda leaf, i=i: leaf[i], variables), x, None)
        return x

    def gradients(apply):
        loss = lambda variables, x: jnp.sum(jnp.sin(apply(variables, x)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)

    got = gradients(lambda variables, x: stack.apply(variables, x, None)[0])
    expected = gradients(one_by_one)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(got[1]), jax.tree.leaves(expected[1]), strict=True):
        if OWG in str(path):
            oracle.assert_bitwise(leaf, np.asarray(other), jax.tree_util.keystr(path))
        # Only the order in which XLA sums a bf16 residual stream up may differ: f32 sums of WIDTH and HIDDEN terms.
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_residuals():
    """Codes of what the products read, and in bf16 what the activation reads."""
    rows, width, hidden = 1024, 256, 512
    layer = GatedMLP(hidden, recipe=RECIPE, dtype=BF16)
    x = jax.ShapeDtypeStruct((rows, width), BF16)
    kept = count.residual_bytes(layer.apply, jax.eval_shape(layer.init, jax.random.key(0), x), x)
    codes = rows * width + rows * hidden + width * 2 * hidden + hidden * width
    gate_and_up = 2 * (rows * 2 * hidden)
    assert 0 <= kept - codes - gate_and_up < 300  # states and scales


@pytest.mark.usefixtures("cuda_custom_calls")
def test_custom_calls_on_cuda():
    """h and the norm are quantized where they are computed; x, kernels and gradients as they are."""

    def calls(layer):
        variables = layer.init(jax.random.key(0), x)
        step = jax.value_and_grad(lambda v, x: jnp.sum(layer.apply(v, x).astype(F32)), argnums=(0, 1))
        text = jax.jit(step).trace(variables, x).lower(lowering_platforms=("cuda",)).as_text()
        return Counter(re.findall(r"custom_call @jaxfp8_(quantize\w*|scaled_matmul)_v", text))

    x = inputs(BF16)
    mlp, norm = (layer.clone(dtype=BF16) for layer in (LAYERS["silu mlp"], LAYERS["rms dense"]))
    assert calls(mlp) == {"quantize_activation": 1, "quantize_transpose": 5, "scaled_matmul": 6}
    assert calls(norm) == {"quantize_norm": 1, "quantize_transpose": 2, "scaled_matmul": 3}


def test_trains_in_flax_train_state():
    """SwiGLU learns a SwiGLU: what is left is FP8 rounding."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((64, 4)).astype(F32)
    layer = GatedMLP(16, features=3, recipe=RECIPE, dtype=BF16)
    teacher = GatedMLP(4, features=3, recipe=RECIPE)
    target = 4 * teacher.apply(teacher.init(jax.random.key(1), x), x)
    train = TrainState.create(apply_fn=layer.apply, params=layer.init(jax.random.key(0), x), tx=optax.adam(0.02))

    @jax.jit
    def step(train):
        loss = lambda variables: jnp.mean((train.apply_fn(variables, x).astype(F32) - target) ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(train.params)
        with jax.numpy_dtype_promotion("standard"):  # adam divides by powers of an int
            return train.apply_gradients(grads=gradients), value

    losses = []
    for _ in range(150):
        train, value = step(train)
        losses.append(float(value))
    # e4m3 rounds by at most 2**-4; a loss a hundredth of the first is far above that and far below not learning.
    assert losses[-1] < 0.02 * losses[0]
    assert train.params[OWG]["wo"]["Fp8DotGeneral_0"]["input_amax_history"][0] > 0


@pytest.mark.parametrize("layer, message", [
    (GatedMLP(HIDDEN, activation="relu"), 'GatedMLP: activation: expected "silu" or "gelu", got \'relu\''),
    (NormDense(7, kind="batch"), "NormDense: kind: expected \"rms\" or \"layer\", got 'batch'"),
])  # fmt: skip
def test_errors(layer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.init(jax.random.key(0), inputs())


def test_layers_share_their_options():
    """What a Dense takes, the others pass on."""
    of_dense = {field.name for field in dataclasses.fields(Dense)} - {"features"}
    for layer in (GatedMLP, NormDense):
        assert of_dense <= {field.name for field in dataclasses.fields(layer)}
    with pytest.raises(ValueError, match="precision"):
        GatedMLP(HIDDEN, precision="bfloat16").init(jax.random.key(0), inputs())
    with pytest.raises(ValueError, match="precision"):
        NormDense(7, precision="bfloat16").init(jax.random.key(0), inputs())
