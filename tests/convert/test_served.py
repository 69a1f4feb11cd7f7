"""What was trained is what is served: a server in numpy, which knows the file alone,
gives the trainer's logits.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from equality import assert_same_bits
from promotion import as_users_have_jax

import jaxfp8
from convert import numpy_reader, numpy_server, served_model
from convert.numpy_server import Server
from convert.served_model import HEADS, LAYERS, RECIPES
from jaxfp8.convert import from_safetensors, to_safetensors

LAYOUTS = {
    "tensor, static": "tensor",
    "tensor, current": "tensor",
    "block128": "block128",
    "mxfp8": "mxfp8",
}
# Products in another order of f32 sums differ by about sqrt(K) * 2**-24 of their root
# mean square, 2**-20 for K = 320. So much noise in the server's own products shows what
# may differ: it turns the codes that lie near a tie, in bfloat16 the roundings too, and
# what follows from these. A trainer is nearer than that, or its numbers are others.
NOISE = 2.0**-20


def model_of(name, dtype):
    return served_model.Transformer(RECIPES[name], jnp.dtype(dtype))


@functools.cache
def frozen(name, dtype="float32", at="variables"):
    run = served_model.trained(name)
    with as_users_have_jax():
        return jaxfp8.freeze(model_of(name, dtype), getattr(run, at), run.tokens[0])


def channels(variables, path):
    """Write a frozen model of `Float8RowwiseScaling` as compressed-tensors has it: a
    scale for each channel of a weight, and one for each token, found when it comes.
    """
    tensors = {}
    leaves = jax.tree_util.tree_flatten_with_path(variables["params"])[0]
    for key, leaf in leaves:
        *module, name = (part.key for part in key)
        array = np.asarray(leaf)
        if module[-1] == "Fp8DotGeneral_0":
            module.pop()
            name = {"kernel": "weight", "kernel_scale_inv": "weight_scale"}[name]
        elif name != "bias":
            array = array.T if name == "kernel" else array
            name = "weight"
        tensors[".".join([*module, name])] = np.ascontiguousarray(array)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    scales = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "weights": scales | {"strategy": "channel", "dynamic": False},
                "input_activations": scales | {"strategy": "token", "dynamic": True},
            }
        },
    }


def write(name, path, *which):
    """Write the file of a trained model, and return its config."""
    if name == "rows":
        return channels(frozen(name, *which), path)
    return to_safetensors(frozen(name, *which), path, layout=LAYOUTS[name])


def served(server, tokens):
    return np.stack([server.logits(batch, LAYERS, HEADS) for batch in tokens])


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def divergence(expected, got):
    """KL of each position, in nat."""
    expected = log_softmax(expected)
    got = log_softmax(got)
    return np.sum(np.exp(expected) * (expected - got), axis=-1)


@functools.cache
def trainer_logits(name, dtype):
    """Those of the next training step; in bfloat16 of a forward pass, which rounds
    where the model says so.
    """
    run = served_model.trained(name)
    if dtype == "float32":
        return run.logits
    # by default XLA keeps some bfloat16 results in float32
    options = {"xla_allow_excess_precision": False}
    model = model_of(name, dtype)
    return served_model.forward(model, run.variables, run.tokens, **options)


def unchanged(server):
    pass


def compare(name, dtype, path, change=unchanged):
    """Assert that a server gives the trainer's logits. `change` makes it a wrong one,
    which one batch shows.

    Trainer and server each have an error of their own, which the noise stands for: KL
    is a square, so twice the difference is four times KL.
    """
    batches = None if change is unchanged else 1
    tokens = served_model.trained(name).tokens[:batches]
    expected = trainer_logits(name, dtype)[:batches]
    server = Server(path, write(name, path, dtype), dtype=jnp.dtype(dtype))
    # as jaxfp8 and some loaders do
    server.divides = False
    change(server)
    got = served(server, tokens)
    server.noise = NOISE
    noisy = served(server, tokens)
    kl = divergence(expected, got).mean()
    bound = 4 * divergence(got, noisy).mean()
    assert kl <= bound, f"KL {kl:.1e} is above {bound:.1e}"
    # the best token is the same, or it is near the second
    lead = np.diff(np.sort(expected, axis=-1)[..., -2:])[..., 0]
    differs = expected.argmax(axis=-1) != got.argmax(axis=-1)
    assert lead[differs].max(initial=0) <= 2 * np.abs(got - noisy).max()
    # Positions at which no code turned are most. There logits below 8 are off by nine
    # products, 2**-20 each.
    if dtype == "float32":
        off = np.abs(expected - got).max(axis=-1)
        assert np.median(off) <= 9 * 8 * NOISE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_logits_are_those_of_the_trainer(name, dtype, tmp_path):
    compare(name, dtype, tmp_path / "file")


def drop_a_scale(server):
    """One of them, of one weight: the last block, channel or tensor."""
    names = "block1.up.weight_scale", "block1.up.weight_scale_inv"
    name = next(name for name in names if name in server.tensors)
    scales = server.tensors[name].copy()
    scales.flat[-1] = 127 if scales.dtype == np.uint8 else 1
    server.tensors[name] = scales


def quantize_activations_in_e5m2(server):
    server.activation_dtype = ml_dtypes.float8_e5m2


@pytest.mark.parametrize("change", [drop_a_scale, quantize_activations_in_e5m2])
@pytest.mark.parametrize("name", RECIPES)
def test_a_server_that_is_wrong(name, change, tmp_path):
    with pytest.raises(AssertionError, match="^KL .* is above"):
        compare(name, "float32", tmp_path / "file", change)


def test_input_scales_that_are_stale(tmp_path):
    """New weights need their scales of inputs with them."""
    write("tensor, static", tmp_path / "old", "float32", "before")
    old = numpy_reader.read(tmp_path / "old")

    def change(server):
        names = [name for name in server.tensors if name.endswith("input_scale")]
        assert len(names) == 8
        server.tensors |= {name: old[name] for name in names}

    with pytest.raises(AssertionError, match="^KL .* is above"):
        compare("tensor, static", "float32", tmp_path / "file", change)


def test_a_scale_for_each_token_in_place_of_one(tmp_path):
    """A trainer with one current scale for x finds it in its whole batch."""

    def change(server):
        group = server.config["config_groups"]["group_0"]
        group["input_activations"] |= {"strategy": "token"}

    with pytest.raises(AssertionError, match="^KL .* is above"):
        compare("tensor, current", "float32", tmp_path / "file", change)


def test_activations_whose_scales_are_powers_of_two(tmp_path, monkeypatch):
    """The file does not say whether a recipe has `power_2_scale`."""

    def powers_of_two(largest):
        factors = 2.0 ** np.floor(np.log2(448 / largest))
        return factors.astype(np.float32), (1 / factors).astype(np.float32)

    def change(server):
        monkeypatch.setattr(numpy_server, "scales_of", powers_of_two)

    with pytest.raises(AssertionError, match="^KL .* is above"):
        compare("block128", "float32", tmp_path / "file", change)


def served_in_bfloat16(name, path, **options):
    tokens = served_model.trained(name).tokens
    config = write(name, path, "bfloat16")
    return served(Server(path, config, dtype=jnp.bfloat16, **options), tokens)


@pytest.mark.parametrize("name", ["rows", "block128"])
def test_division_turns_ties(name, tmp_path):
    """In bfloat16 activations lie at ties, where the last bit of a scale decides."""
    expected = trainer_logits(name, "bfloat16")
    divided, multiplied = (
        served_in_bfloat16(name, tmp_path / "file", divides=divides)
        for divides in (True, False)
    )
    divided, multiplied = (
        divergence(expected, got).mean() for got in (divided, multiplied)
    )
    assert divided > 5 * multiplied


def test_what_else_moves_logits(tmp_path):
    """FP8 weights that are served in bfloat16, and an XLA that does not round where the
    model says so, are farther from the trainer than the server.
    """
    name = "tensor, static"
    run = served_model.trained(name)
    expected = trainer_logits(name, "bfloat16")
    got = served_in_bfloat16(name, tmp_path / "file")
    plain = served_model.Transformer(None, jnp.bfloat16)
    params = {"params": run.variables["params"]}
    unquantized = served_model.forward(plain, params, run.tokens)
    excess = served_model.forward(model_of(name, "bfloat16"), run.variables, run.tokens)
    server, unquantized, excess = (
        divergence(logits, expected).mean() for logits in (got, unquantized, excess)
    )
    assert server < excess / 10 and excess < unquantized


def test_rows_are_refused_and_read(tmp_path):
    """`to_safetensors` has no layout of channels. The file of these tests is the one
    that `from_safetensors` reads, to the bit.
    """
    frozen_model = frozen("rows")
    for layout in sorted(set(LAYOUTS.values())):
        with pytest.raises(ValueError, match="no layout has such scales"):
            to_safetensors(frozen_model, tmp_path / "file", layout=layout)
    channels(frozen_model, tmp_path / "file")
    read = from_safetensors(frozen_model, tmp_path / "file")
    assert_same_bits(read, frozen_model, "frozen")
