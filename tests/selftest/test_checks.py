"""The checks go red: one wrong bit of a custom call, a wrong scale in a product, a
comparison that accepts anything.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import compiler
from jax import lax

from jaxfp8.inspect import _op_calls
from jaxfp8.ops import _ffi
from jaxfp8.selftest import _cases, _checks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_traced")]

NATIVE = pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="no CPU library")
ON_CPU, ON_CUDA = (
    [op for op in _op_calls.OPS if op in _ffi._TARGETS[platform]]
    for platform in ("cpu", "CUDA")
)


@pytest.fixture
def few_cases(monkeypatch):
    """The odd shape and the groups."""
    monkeypatch.setattr(_cases, "_SHAPES", _cases._SHAPES[2:6:3])


@NATIVE
@pytest.mark.parametrize("result", ["first", "last"])
@pytest.mark.parametrize("op", ON_CPU)
def test_one_wrong_bit(op, result, few_cases, monkeypatch):
    real = _ffi.call

    def call(name, *arguments, **options):
        results = list(real(name, *arguments, **options))
        if name == op:
            place = 0 if result == "first" else -1
            wrong = results[place]
            word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[wrong.dtype.itemsize]
            bits = lax.bitcast_convert_type(wrong, word).reshape(-1)
            # The last bits of an update of Adam are free: GPUs divide by
            # multiplications in jnp. So are those of NaNs: wrong are the last code and
            # all wider numbers.
            flipped = jnp.asarray(
                2**8 if op == "adam_update" and place == 0 else 1, word
            )
            first = 0 if wrong.dtype.itemsize > 1 else bits.size - 1
            bits = jnp.where(jnp.arange(bits.size) >= first, bits ^ flipped, bits)
            bits = bits.reshape(wrong.shape)
            results[place] = lax.bitcast_convert_type(bits, wrong.dtype)
        return results

    assert _checks.values(op)["status"] == "passed"
    jax.clear_caches()
    monkeypatch.setattr(_ffi, "call", call)
    row = _checks.values(op)
    assert row["status"] == "failed" and "wrong, first at" in row["detail"]


@NATIVE
@pytest.mark.parametrize("op", _cases.COMPUTED)
def test_a_wrong_scale_of_codes_that_are_compared_one_by_one(
    op, few_cases, monkeypatch
):
    real = _ffi.call

    def call(name, results, x, scale, *others, **options):
        # about half a code
        return real(name, results, x, scale * 1.07, *others, **options)

    monkeypatch.setattr(_ffi, "call", call)
    row = _checks.values(op)
    assert row["status"] == "failed" and "differ by one" in row["detail"]


@pytest.mark.parametrize(
    "op", ["scaled_matmul", "block_scaled_matmul", "ragged_matmul"]
)
def test_a_product_without_its_last_term(op, monkeypatch):
    monkeypatch.setattr(_cases, "_SHAPES", _cases._SHAPES[1:6])
    for case in _cases.cases(op):
        function = jax.jit(case.function)
        a, *others = case.arguments
        without = a.copy()
        without[..., -1:] = 0
        got, wrong = (
            _checks._numpy(function(codes, *others)) for codes in (a, without)
        )
        expected = _checks._numpy(case.reference())
        assert case.problem(got, expected) is None, case.name
        is_refused = case.problem(wrong, expected) is not None
        assert is_refused == (0 not in a.shape), case.name


def test_training(monkeypatch):
    assert _checks.training() == {
        "status": "passed",
        "detail": "state equal to the bit",
    }
    if _ffi.is_loaded("cpu"):
        real = _ffi.call

        def call(name, *arguments, **options):
            results = real(name, *arguments, **options)
            return (
                [x * np.float32(1 + 2.0**-20) for x in results]
                if name == "write_histories"
                else results
            )

        monkeypatch.setattr(_ffi, "call", call)
        jax.clear_caches()
        row = _checks.training()
        assert row["status"] == "failed" and "wrong, first at" in row["detail"]


@pytest.mark.parametrize("op", ON_CUDA)
def test_cases_are_of_the_custom_call_on_gpus(op, cuda_custom_calls):
    """All but empty products, which need no kernel, and rows of state in groups."""
    for case in _cases.cases(op):
        lowered = (
            jax.jit(case.function)
            .trace(*case.arguments)
            .lower(lowering_platforms=("cuda",))
        )
        has_call = f"custom_call @jaxfp8_{op}_v" in lowered.as_text()
        shape = case.arguments[0].shape
        if op in ("scaled_matmul", "block_scaled_matmul"):
            assert has_call == (0 not in shape), case.name
        elif op in ("read_rows", "write_rows"):
            assert has_call == (len(shape) == 1), case.name
        else:
            assert has_call, case.name


def test_first_launches_are_recorded():
    """By XLA's compiler for H200s: its options are accepted, every custom call is in a
    graph; without them none is.
    """
    if reason := compiler.missing():
        pytest.skip(reason)
    printed = dict(
        line.split() for line in compiler.run("selftest_graphs").splitlines()
    )
    assert printed == {op: "True" for op in _op_calls.OPS} | {"without": "False"}


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_any_nan_is_a_right_number(dtype):
    """XLA's compilers for CPUs and GPUs make different NaNs of the same code. Of codes
    the bits have to be right.
    """
    right = np.asarray([1, np.nan], dtype)
    other_nan = -right * np.asarray([-1, 1], dtype)
    assert other_nan.tobytes() != right.tobytes()
    assert not _cases.bit_problem([other_nan], [right])
    assert _cases.bit_problem([right[::-1]], [right])
    assert _cases.bit_problem([right], [np.ones_like(right)])
    above = np.nextafter(right, right.dtype.type(2))
    assert _cases.bit_problem([above], [right])
    codes = np.asarray([1, np.nan], jnp.float8_e4m3fn)
    assert _cases.bit_problem([-codes], [codes])
    assert _cases.bit_problem([codes[1:]], [-codes[1:]])


def test_a_nan_is_no_neighbour_of_the_largest_code():
    amax = np.ones(1, np.float32)
    largest, nan = np.uint8([[0x7E], [0x7F]]).view(jnp.float8_e4m3fn)
    for got, right in ((largest, nan), (nan, largest)):
        assert _cases._code_problem([got, amax], [right, amax])
        assert not _cases._code_problem([got, amax], [got, amax])
