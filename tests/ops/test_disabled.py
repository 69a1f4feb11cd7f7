"""JAXFP8_DISABLE: the ops that it names run the reference, on every platform, after one warning."""

import subprocess
import sys
import types
import warnings

import jax
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8 import inspect, ops
from jaxfp8._jax import _compat
from jaxfp8.inspect import _active
from jaxfp8.ops import _disabled, _ffi, _support

from .test_structure import cuda_text, custom_calls, dense_arguments, dense_step

OPS = {name: row for name, row in _active.OPS.items() if name != "quantize_blocks"}
BITWISE = ("amax", "delayed_scales", "push_amaxes", "quantize", "quantize_transpose", "dequantize")
NATIVE = pytest.mark.skipif(not _ffi.has_cpu_kernels, reason="no CPU library")


@pytest.fixture
def disable(monkeypatch, cuda_custom_calls):
    """Disables ops, as the variable does."""
    monkeypatch.setattr(_support, "_warned", set())
    monkeypatch.setattr(_compat, "gpus_of", lambda ctx: [])
    monkeypatch.setattr(_support, "local_gpus", list)

    def names(value):
        monkeypatch.setattr(_disabled, "_disabled", _disabled.parsed(value))
        jax.clear_caches()

    return names


def values(arguments):
    rng = np.random.default_rng(0)
    return [np.asarray(np.abs(rng.standard_normal(x.shape)) + 1, np.float32).astype(x.dtype) for x in arguments]


def test_every_custom_call_can_be_disabled():
    assert set(_ffi.OPS) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_runs_in_its_place(op, disable):
    """As if the reference were selected for this op alone, with one warning."""
    function, arguments = OPS[op]
    disable(op)
    with ops.implementation("reference"):
        reference = cuda_text(function, *arguments)
    jax.clear_caches()
    with pytest.warns(RuntimeWarning) as warned:
        assert cuda_text(function, *arguments) == reference
        jax.clear_caches()
        cuda_text(function, *arguments)
    assert [str(w.message) for w in warned] == [
        f"jaxfp8: JAXFP8_DISABLE names {op}; the jnp reference runs: same results within their bounds, slower"
    ]


@pytest.mark.parametrize("op", OPS)
def test_others_keep_their_custom_calls(op, disable):
    disable(",".join(set(OPS) - {op}))
    function, arguments = OPS[op]
    with warnings.catch_warnings(action="error"):
        assert custom_calls(cuda_text(function, *arguments)) == {op: 1}


@NATIVE
@pytest.mark.parametrize("op", BITWISE)
def test_same_bits_on_a_cpu(op, disable):
    function, arguments = OPS[op]
    arguments = values(arguments)
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    assert custom_calls(jax.jit(function).lower(*arguments).as_text()) == {op: 1}
    disable(op)
    with pytest.warns(RuntimeWarning, match=f"JAXFP8_DISABLE names {op}"):
        got = jax.jit(function)(*arguments)
    assert not custom_calls(jax.jit(function).lower(*arguments).as_text())
    for i, (x, y) in enumerate(zip(jax.tree.leaves(got), expected, strict=True)):
        oracle.assert_bitwise(x, np.asarray(y), f"{op}: result {i}")


@NATIVE
def test_ops_that_an_op_is_made_of(disable):
    """On a CPU quantize_norm is jnp and quantize_transpose: each can be disabled without the other."""
    for name, calls in (("quantize_norm", {}), ("quantize_transpose", {})):
        disable(name)
        with pytest.warns(RuntimeWarning, match=f"names {name};"):
            assert custom_calls(jax.jit(OPS["quantize_norm"][0]).lower(*OPS["quantize_norm"][1]).as_text()) == calls
    disable("quantize_norm")
    function, arguments = OPS["quantize_transpose"]
    assert custom_calls(jax.jit(function).lower(*arguments).as_text()) == {"quantize_transpose": 1}


def test_both_ops_of_a_custom_call(disable):
    disable("quantize_blocks_transpose")
    with pytest.warns(RuntimeWarning, match="names quantize_blocks_transpose;") as warned:
        for name in ("quantize_blocks", "quantize_blocks_transpose"):
            function, arguments = _active.OPS[name]
            assert not custom_calls(cuda_text(function, *arguments))
    assert len(warned) == 1


def test_a_layer_keeps_the_rest(disable):
    disable("quantize_transpose")
    with pytest.warns(RuntimeWarning):
        calls = custom_calls(cuda_text(dense_step, *dense_arguments()))
    assert "quantize_transpose" not in calls and calls["scaled_matmul"] == 3


@pytest.mark.parametrize("op", OPS)
def test_ffi_raises(op, disable):
    disable(op)
    with ops.implementation("ffi"), pytest.raises(RuntimeError, match=rf"ops\.{op}: .*JAXFP8_DISABLE names {op}$"):
        cuda_text(OPS[op][0], *OPS[op][1])


def test_other_implementations_do_not_ask(disable):
    disable(",".join(OPS))
    with warnings.catch_warnings(action="error"):
        for name in ("reference", "xla"):
            with ops.implementation(name):
                jax.clear_caches()
                assert not custom_calls(cuda_text(OPS["scaled_matmul"][0], *OPS["scaled_matmul"][1]))


def test_python_m_jaxfp8_says_so(disable):
    disable("quantize_norm,scaled_matmul")
    rows = {row["name"]: row for row in _active.active_ops("cuda")}
    assert {name: row["why"] for name, row in rows.items() if row["why"]} == {
        name: f"JAXFP8_DISABLE names {name}" for name in ("quantize_norm", "scaled_matmul")
    }
    recipe = _active.active_recipes("cuda")[0]
    assert (recipe["fp8_products"], recipe["why"]) == (0, "JAXFP8_DISABLE names scaled_matmul")


def test_assert_fp8_says_so(disable):
    def product(x, kernel):
        return jaxfp8.dot_general(x, kernel, (((1,), (0,)), ((), ())), recipe=jaxfp8.Float8CurrentScaling())

    operands = [np.ones((32, 32), oracle.BF16)] * 2
    inspect.assert_fp8(product, *operands, platform="cuda")
    disable("scaled_matmul")
    with pytest.raises(AssertionError, match="JAXFP8_DISABLE names scaled_matmul"):
        inspect.assert_fp8(product, *operands, platform="cuda")
    with ops.implementation("xla"):
        inspect.assert_fp8(product, *operands, platform="cuda")


def test_a_gpu_that_lacks_more(disable, monkeypatch):
    """Each reason is told once; none hides the other."""
    old = types.SimpleNamespace(platform="gpu", device_kind="A fake GPU", compute_capability="8.0")
    monkeypatch.setattr(_support, "local_gpus", lambda: [old])
    disable("amax")
    with pytest.warns(RuntimeWarning) as warned:
        for op in ("amax", "quantize"):
            assert not custom_calls(cuda_text(OPS[op][0], *OPS[op][1]))
    assert [str(w.message).split(";")[0] for w in warned] == [
        "jaxfp8: JAXFP8_DISABLE names amax",
        "jaxfp8: A fake GPU has compute capability 8.0, FP8 needs 8.9 or newer",
    ]


@pytest.mark.parametrize(
    "value, names",
    [("", set()), ("amax", {"amax"}), (" amax , quantize_norm,", {"amax", "quantize_norm"}), ("amax,amax", {"amax"})],
)
def test_what_the_variable_means(value, names):
    assert _disabled.parsed(value) == names


@pytest.mark.parametrize("value", ["quantise", "amax,Quantize", "jaxfp8_amax_v1", "quantize_counted", "amax quantize"])
def test_unknown_names(value):
    with pytest.raises(ValueError, match=r"^JAXFP8_DISABLE: expected names of ops, .*; the ops are amax, .*") as raised:
        _disabled.parsed(value)
    assert value.removeprefix("amax,") in str(raised.value)


@pytest.mark.parametrize("value, printed", [("amax", "names amax"), ("amaxes", "got amaxes; the ops are")])
def test_the_environment_is_read(value, printed):
    """By a process of its own, when it imports jaxfp8."""
    program = "from jaxfp8.ops import _disabled; print(_disabled.reason('amax'))"
    path = ":".join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"JAXFP8_DISABLE": value, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert printed in done.stdout + done.stderr
    assert done.returncode == (value != "amax")
