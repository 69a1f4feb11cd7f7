"""Exported weights: those of the next training step, to the bit, as another reader
finds them; and what is refused.
"""

import functools
import json
import resource

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import safetensors.numpy
from draws import KEY
from flax import nnx
from inference import models
from inference.models import OWG
from oracle import blocks as oracle_blocks
from parametrize import each_row
from promotion import as_users_have_jax

import jaxfp8
import jaxfp8.nnx
from convert import numpy_reader
from convert.exported import LAYOUTS, NAMES, K, X, calibrated
from jaxfp8.convert import read_safetensors, to_safetensors


def state_of(variables, layer, operand):
    state = variables[OWG][layer]["Fp8DotGeneral_0"]
    return oracle.State(
        np.asarray(state[f"{operand}_amax_history"]),
        np.asarray(state[f"{operand}_scale"])[0],
    )


def quantized(layout, kernel, state=None):
    """(codes `[out, in]`, scales) of the next training step, by the oracle."""
    if layout == "tensor":
        codes, _, after = oracle.step(kernel, state, oracle.E4M3)
        return codes.T, after.scale.reshape(1)
    options = {"scale": "e8m0"} if layout == "mxfp8" else {}
    return oracle_blocks.quantize(
        kernel.T, oracle.E4M3, (1, 32) if layout == "mxfp8" else (128, 128), **options
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_scales_are_those_of_training(layout, tmp_path):
    _, variables, frozen = calibrated(layout)
    config = to_safetensors(
        frozen, tmp_path / "model.safetensors", NAMES, layout=layout
    )
    tensors = numpy_reader.read(tmp_path / "model.safetensors")
    suffix = "weight_scale_inv" if layout == "block128" else "weight_scale"
    expected = {"norm.weight", "lm_head.weight", "model.down_proj.bias"}
    for layer in ("up", "down"):
        kernel = np.asarray(variables["params"][layer]["kernel"])
        state = state_of(variables, layer, "kernel") if layout == "tensor" else None
        codes, scales = quantized(layout, kernel, state)
        module = f"model.{layer}_proj"
        oracle.assert_bitwise(
            tensors[f"{module}.weight"],
            np.ascontiguousarray(codes).view(np.uint8),
            "codes",
        )
        scales = scales.view(np.uint8) if layout == "mxfp8" else scales
        oracle.assert_bitwise(tensors[f"{module}.{suffix}"], scales, "scales")
        expected |= {f"{module}.weight", f"{module}.{suffix}"}
        if layout == "tensor":
            scale_inv = oracle.step(
                X, state_of(variables, layer, "input"), oracle.E4M3
            )[2].scale
            oracle.assert_bitwise(
                tensors[f"{module}.input_scale"], scale_inv.reshape(1), "input_scale"
            )
            expected.add(f"{module}.input_scale")
    assert set(tensors) == expected and json.loads(json.dumps(config)) == config
    # In high precision: a norm as it is, a kernel transposed, each in its dtype.
    params = variables["params"]
    oracle.assert_bitwise(tensors["norm.weight"], params["norm"]["scale"], "norm")
    head = np.asarray(params["head"]["kernel"]).T
    oracle.assert_bitwise(
        tensors["lm_head.weight"], head.astype(np.float32), "bfloat16"
    )
    read = read_safetensors(tmp_path / "model.safetensors")
    assert read["lm_head.weight"].dtype == "BF16"


def test_configs(tmp_path):
    """As transformers, vLLM and compressed-tensors have them; kernels in high precision
    are not Linear of FP8.
    """
    config = {
        layout: to_safetensors(
            calibrated(layout)[2], tmp_path / "f", NAMES, layout=layout
        )
        for layout in LAYOUTS
    }
    assert config["block128"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
        "ignored_layers": ["lm_head"],
    }
    group = {
        name: config[name]["config_groups"]["group_0"] for name in ("tensor", "mxfp8")
    }
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    mx = {
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    assert group["tensor"] == {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": weights,
    }
    assert group["mxfp8"] == {
        "targets": ["Linear"],
        "weights": weights | mx,
        "input_activations": weights | mx | {"dynamic": True},
    }
    assert config["tensor"]["ignore"] == config["mxfp8"]["ignore"] == ["lm_head"]
    assert [config[name]["format"] for name in ("tensor", "mxfp8")] == [
        "float-quantized",
        "mxfp8-quantized",
    ]


def at(tree, path: str):
    return functools.reduce(
        lambda tree, key: tree[key], filter(None, path.split("/")), tree
    )


def kernel_matrix(kernel, inputs: int, stacked: int = 0):
    """A kernel of Flax, `[*stacked, *in, *out]`, as matrices `[*stacked, out, in]`."""
    shape = kernel.shape
    sizes = (
        np.prod(shape[stacked : stacked + inputs]),
        np.prod(shape[stacked + inputs :]),
    )
    return (
        np.asarray(kernel, np.float32)
        .reshape(*shape[:stacked], *sizes)
        .swapaxes(-1, -2)
    )


def assert_near(got, matrix):
    """e4m3 rounds by 2**-4 of a number, or by half of its smallest, 2**-10; bfloat16
    before it by 2**-8.
    """
    smallest = 2.0**-10 * got.scale_inv.max()
    assert got.data.shape == matrix.shape and np.abs(matrix).max() > 100 * smallest
    assert (
        np.abs(got.decode() - matrix) <= (2.0**-4 + 2.0**-8) * np.abs(matrix) + smallest
    ).all()


CASES = {
    # name of the model: (layout, names, {name in the file: (path of the kernel, inputs,
    # index of the stack, rows)})
    "GatedMLP": (
        "tensor",
        {"wi/kernel": ("gate.weight", "up.weight"), "wo/kernel": "down.weight"},
        {
            "gate": ("wi", 1, (), (0, 48)),
            "up": ("wi", 1, (), (48, 96)),
            "down": ("wo", 1, (), None),
        },
    ),
    "block, GatedMLP": (
        "block128",
        {"wi/kernel": ("gate.weight", "up.weight"), "wo/kernel": None},
        {"gate": ("wi", 1, (), (0, 48)), "up": ("wi", 1, (), (48, 96))},
    ),
    "attention": (
        "tensor",
        None,
        {"query": ("query", 1, (), None), "out": ("out", 2, (), None)},
    ),
    "MXFP8, DenseGeneral": (
        "mxfp8",
        {"kernel": "a.weight", "bias": "a.bias"},
        {"a": ("", 2, (), None)},
    ),
    "DenseGeneral, batch": (
        "tensor",
        {"kernel": "experts.{}.weight", "bias": "experts.{}.bias"},
        {"experts.0": ("", 1, (0,), None), "experts.1": ("", 1, (1,), None)},
    ),
    "scan": (
        "tensor",
        {
            r".*/Dense_(\d)/kernel": r"layers.{}.\1.weight",
            r".*/Dense_(\d)/bias": r"layers.{}.\1.bias",
        },
        {
            "layers.2.1": ("ScanBlock_0/Dense_1", 1, (2,), None),
            "layers.0.0": ("ScanBlock_0/Dense_0", 1, (0,), None),
        },
    ),
    "rules": ("tensor", None, {"": ("", 1, (), None)}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_become_matrices(name, tmp_path):
    """Weights are near the kernel they are of: rows are outputs, stacked kernels have
    an index, parts their rows.
    """
    layout, names, expected = CASES[name]
    _, variables, frozen = models.linen(name)
    to_safetensors(frozen, tmp_path / "file", names, layout=layout)
    read = read_safetensors(tmp_path / "file")
    for module, (path, inputs, index, rows) in expected.items():
        params, of_frozen = (at(tree["params"], path) for tree in (variables, frozen))
        matrix = kernel_matrix(params["kernel"], inputs, len(index))[index]
        matrix = matrix[slice(*rows)] if rows else matrix
        got = read[f"{module}.weight".removeprefix(".")]
        assert_near(got, matrix)
        if layout == "tensor":
            inverse = np.asarray(of_frozen["Fp8DotGeneral_0"]["input_scale_inv"])
            np.testing.assert_array_equal(
                got.input_scale_inv, inverse[index] if inverse.ndim > 1 else inverse
            )
        if "bias" in params and f"{module}.bias" in read:
            np.testing.assert_array_equal(
                read[f"{module}.bias"].data,
                np.asarray(params["bias"])[index].reshape(-1),
            )


class Others(nn.Module):
    """Boxed parameters, a scalar, statistics, and a product that `freeze` is not
    shown.
    """

    @nn.compact
    def __call__(self, x, with_second=True):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        dense = functools.partial(nn.Dense, dot_general_cls=jaxfp8.Fp8DotGeneral)
        x = dense(K, kernel_init=boxed, use_bias=False, name="first")(x)
        x = nn.BatchNorm(use_running_average=True, name="norm")(x)
        x *= self.param("temperature", nn.initializers.ones, ())
        return dense(8, use_bias=False, name="second")(x) if with_second else x


def test_what_is_no_frozen_kernel(tmp_path):
    """It is written as it is; state is not."""
    with as_users_have_jax():
        model = Others()
        variables = jaxfp8.calibrate(model, model.init(KEY, X), [X])
        options = {"with_second": False, "mutable": ["batch_stats"]}
        frozen = jaxfp8.freeze(model, variables, X, **options)
    assert set(frozen[OWG]) == {"second"}
    config = to_safetensors(frozen, tmp_path / "file", layout="tensor")
    tensors = numpy_reader.read(tmp_path / "file")
    assert set(tensors) == {
        *("first.weight", "first.weight_scale", "first.input_scale"),
        *("norm.weight", "norm.bias", "batch_stats.norm.mean", "batch_stats.norm.var"),
        *("temperature", "second.weight"),
    }
    assert tensors["temperature"].shape == () and config["ignore"] == ["second"]
    kernel = np.asarray(variables["params"]["second"]["kernel"])
    np.testing.assert_array_equal(tensors["second.weight"], kernel.T)


def test_nnx(tmp_path):
    with as_users_have_jax():
        model = models.NNX["scan"](nnx.Rngs(0))
        kernels = np.asarray(model.blocks.down.kernel[...])
        jaxfp8.freeze(jaxfp8.calibrate(model, [models.X]), models.X)
    names = {
        r"blocks/(\w+)/(kernel)": r"{}.\1.weight",
        r"blocks/(\w+)/(bias)": r"{}.\1.\2",
    }
    to_safetensors(model, tmp_path / "file", names, layout="tensor")
    assert_near(
        read_safetensors(tmp_path / "file")["1.down.weight"],
        kernel_matrix(kernels, 1, 1)[1],
    )


def test_the_reader_decodes_every_code(tmp_path):
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    halves = np.arange(0, 65536, 7, dtype=np.uint16).view(oracle.BF16)
    dtypes = {
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "F8_E8M0": jnp.float8_e8m0fnu,
    }
    tensors = {name: codes.view(dtype) for name, dtype in dtypes.items()}
    safetensors.numpy.save_file(
        tensors | {"one": codes[:1, :1], "b": halves}, tmp_path / "file"
    )
    read = read_safetensors(tmp_path / "file")
    assert {name: read[name].dtype for name in read} == {
        name: name for name in dtypes
    } | {"one": "U8", "b": "BF16"}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(
            read[name].decode(np.float64), tensor.astype(np.float64)
        )
    np.testing.assert_array_equal(read["b"].decode(), oracle.widen(halves))
    # Scales of other writers: E8M0 for 128 x 128, and one number without a dimension.
    weights = {f"{name}.weight": tensors["F8_E4M3"] for name in "xy"} | {
        "x.weight_scale_inv": np.full((1, 1), 130, np.uint8).view(oracle_blocks.E8M0),
        "y.weight_scale_inv": np.array(1 / 3, np.float32),
        "y.activation_scale": np.array(5, np.float32),
    }
    safetensors.numpy.save_file(weights, tmp_path / "file")
    read = read_safetensors(tmp_path / "file")
    assert set(read) == {"x.weight", "y.weight"}
    assert read["y.weight"].input_scale_inv == 5
    for name, scale in (("x", 8), ("y", weights["y.weight_scale_inv"])):
        np.testing.assert_array_equal(
            read[f"{name}.weight"].decode(np.float64), scale * numpy_reader.E4M3[codes]
        )


def test_a_file_is_replaced_as_a_whole(tmp_path):
    """Who has mapped the old file reads on in it; where the disk is full it stays.
    Links and permissions stay.
    """
    frozen = calibrated("tensor")[2]
    file = tmp_path / "file"
    link = tmp_path / "link"
    to_safetensors(frozen, file, NAMES, layout="tensor")
    file.chmod(0o640)
    link.symlink_to(file)
    raw = file.read_bytes()
    mapped = read_safetensors(file)["norm.weight"].data
    norm = mapped.copy()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            to_safetensors(frozen, file, NAMES, layout="tensor")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == raw and set(tmp_path.iterdir()) == {file, link}
    changed = frozen["params"] | {
        "norm": {"scale": frozen["params"]["norm"]["scale"] + 1}
    }
    to_safetensors(frozen | {"params": changed}, link, NAMES, layout="tensor")
    assert set(tmp_path.iterdir()) == {file, link}
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    np.testing.assert_array_equal(mapped, norm)
    np.testing.assert_array_equal(read_safetensors(file)["norm.weight"].data, norm + 1)


def test_braces_in_the_names_of_modules(tmp_path):
    """They are no places of an index, in no name and in no group."""
    frozen = calibrated("tensor")[2]
    renamed = {
        name: frozen["params"][name.strip("{}0")]
        for name in ("up{}", "down{0}", "{norm}", "{{head")
    }
    own = {
        "up{}.weight",
        "down{0}.weight",
        "down{0}.bias",
        "{norm}.weight",
        "{{head.weight",
    }
    by_name = {f"m.{name}" for name in own - {"down{0}.bias"}} | {"b.down{0}.bias"}
    names = {r"(.*)/(kernel|scale)": r"m.\1.weight", "(.*)/bias": r"b.\1.bias"}
    for given, expected in ((None, own), (names, by_name)):
        to_safetensors({"params": renamed}, tmp_path / "file", given, layout="tensor")
        assert set(read_safetensors(tmp_path / "file")) == expected


def file_with(*entries, data=b""):
    """The bytes of a file; an entry is `(name, dtype, shape, data_offsets)`."""
    text = [
        f'"{name}": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}'
        for name, dtype, shape, offsets in entries
    ]
    header = ("{" + ", ".join(text) + "}").encode()
    return len(header).to_bytes(8, "little") + header + data


A, B = ("a", "U8", [2], [0, 2]), ("b", "U8", [2], [2, 4])
WHOLE = file_with(A, B, data=b"1234")
# name -> (bytes of a file, message)
DAMAGED = {
    "empty": (b"", "whole; .*empty"),
    "header cut off": (WHOLE[:30], "whole; "),
    "gap": (
        file_with(A, ("b", "U8", [1], [3, 4]), data=b"1234"),
        r"b: expected its data at \[2, 3\], got \[3, 4\]",
    ),
    "overlap": (
        file_with(A, ("b", "U8", [2], [1, 3]), data=b"123"),
        r"b: expected its data at \[2, 4\], got \[1, 3\]",
    ),
    "data after the last": (WHOLE + b"5", "expected .* bytes, got"),
    "data cut off": (WHOLE[:-1], "whole; "),
    "packed dtype": (
        file_with(("a", "F4", [4], [0, 2]), data=b"12"),
        "a: expected a dtype of .*, got F4",
    ),
}


@each_row("raw, message", DAMAGED)
def test_damaged_files(raw, message, tmp_path):
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(
        ValueError, match=f"^read_safetensors: {tmp_path}/file: .*{message}"
    ):
        read_safetensors(tmp_path / "file")


CODES = np.zeros((200, 160), oracle.E4M3)
# name -> (tensors beside x.weight, message)
REFUSED = {
    "shape": (
        {"weight_scale_inv": np.ones((2, 1), np.float32)},
        r"scales .*\[\(2, 2\), .*\(1,\)\] for .*, got \(2, 1\)",
    ),
    "E8M0": (
        {"weight_scale": np.ones((2, 2), np.uint8)},
        r"scales .*\[\(200, 5\), \(1,\)\] for .*, got \(2, 2\)",
    ),
    "dtype": (
        {"weight_scale": np.ones(1)},
        "weight_scale: expected scales in .*, got F64",
    ),
    "two": (
        dict.fromkeys(("weight_scale", "weight_scale_inv"), np.ones(1, np.float32)),
        "expected .* or .*, got both",
    ),
    "inputs": (
        {"input_scale": np.ones(2, np.float32)},
        "expected one scale of the input, got .* of x.input_scale",
    ),
}


@each_row("tensors, message", REFUSED)
def test_scales_that_fit_no_layout(tensors, message, tmp_path):
    tensors = {f"x.{end}": array for end, array in tensors.items()} | {
        "x.weight": CODES
    }
    safetensors.numpy.save_file(tensors, tmp_path / "file")
    with pytest.raises(
        ValueError, match=f"^read_safetensors: {tmp_path}/file: x.weight: .*{message}"
    ):
        read_safetensors(tmp_path / "file")
