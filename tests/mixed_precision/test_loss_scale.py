"""DynamicLossScale against GradScaler in numpy, to the bit; the numbers people know it
by; its life as a pytree.
"""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from parametrize import each_row

from jaxfp8.mixed_precision import DynamicLossScale

from .grad_scaler import GradScaler

adjust = jax.jit(lambda loss_scale, finite: loss_scale.adjust(finite))


# ----------------------------------------------------------------------------- dynamics


def run(loss_scale, finite):
    """The loss scales after each of these steps, in one program: value f32[n],
    good_steps i32[n].
    """

    def body(loss_scale, ok):
        loss_scale = loss_scale.adjust(ok)
        return loss_scale, (loss_scale.value, loss_scale.good_steps)

    return jax.jit(lambda loss_scale, finite: lax.scan(body, loss_scale, finite))(
        loss_scale, finite
    )[1]


OPTIONS = {
    "defaults": {},
    "often": {"growth_interval": 3},
    "no powers of two": {
        "init_scale": 1000.0,
        "growth_factor": 1.7,
        "backoff_factor": 0.3,
        "growth_interval": 5,
    },
}


@each_row("options", OPTIONS)
@pytest.mark.parametrize("bad", [0.0, 0.0004, 0.5])
def test_thousands_of_random_steps(options, bad):
    """Bitwise; long enough to meet the bounds where overflows are as rare or as
    frequent as that.
    """
    finite = np.random.default_rng(len(str(options))).random(9000) >= bad
    values, good_steps = map(np.asarray, run(DynamicLossScale(**options), finite))
    others = dict(options)
    scaler = GradScaler(np.float32(others.pop("init_scale", 65536)), **others)
    expected = []
    for ok in finite:
        scaler.update(not ok)
        expected.append((scaler.scale, scaler.growth_tracker))
    oracle.assert_bitwise(values, np.float32([e[0] for e in expected]), "value")
    oracle.assert_bitwise(good_steps, np.int32([e[1] for e in expected]), "good steps")


def test_an_interval_that_was_passed_long_ago():
    """A run goes on with a shorter interval: it grows at the next good step, where `==`
    would never.
    """
    loss_scale = DynamicLossScale(growth_interval=10, good_steps=jnp.int32(50))
    assert adjust(loss_scale, True).value == 131072


# -------------------------------------------------------------------- scale and unscale


@pytest.mark.parametrize("init_scale", [65536.0, 1.0, 2.0**-20, 1000.0, 3.3e7])
@pytest.mark.parametrize("dtype", [np.float16, oracle.BF16, np.float32])
def test_unscale_in_f32(dtype, init_scale):
    """All bits of every float16 and bfloat16 gradient, and of many f32 ones, as numpy
    has them.
    """
    if dtype == np.float32:
        gradient = (
            np.random.default_rng(0).standard_normal(10000)
            * 2.0 ** np.arange(-40, 60).repeat(100)
        ).astype(dtype)
    else:
        gradient = np.arange(2**16).astype(np.uint16).view(dtype)
    got = np.asarray(jax.jit(DynamicLossScale(init_scale).unscale)(gradient))
    assert got.dtype == np.float32
    expected = GradScaler(np.float32(init_scale)).unscale(gradient)
    # XLA:CPU flushes what is subnormal
    tiny = np.finfo(np.float32).tiny
    flushed = np.minimum(np.abs(gradient.astype(np.float32)), np.abs(expected)) < tiny
    np.testing.assert_array_equal(got[~flushed], expected[~flushed])
    assert (np.abs(got[flushed]) < tiny).all()


def test_every_gradient_is_scaled():
    """The scale of a norm is a parameter. `test_policy.py` has what is none."""
    params = {
        "kernel": np.float16([2, 4]),
        "scale": np.float32([8]),
        "complex": np.complex64([1j]),
        "index": np.int32([3]),
    }
    loss_scale = DynamicLossScale()
    for change, factor in ((loss_scale.scale, 65536), (loss_scale.unscale, 1 / 65536)):
        got = {name: leaf.tolist() for name, leaf in change(params).items()}
        assert got == {
            "kernel": [2 * factor, 4 * factor],
            "scale": [8 * factor],
            "complex": [1j * factor],
            "index": [3],
        }


# -------------------------------------------------------------------------- as a pytree


def test_msgpack():
    used = adjust(adjust(DynamicLossScale(growth_interval=7), False), True)
    data = flax.serialization.to_bytes({"step": 3, "loss_scale": used})
    got = flax.serialization.from_bytes(
        {"step": 0, "loss_scale": DynamicLossScale(growth_interval=7)}, data
    )["loss_scale"]
    assert isinstance(got, DynamicLossScale)
    after = adjust(got, True)
    assert (after.value, after.good_steps) == (32768, 2)


# ------------------------------------------------------------------------------- errors

BAD = {
    "init_scale": [0, np.nan, 2.0**127, 10**400],
    "growth_factor": [1, np.nan, 1e300, 1 + 1e-12],
    "backoff_factor": [0, np.nan, 1 - 1e-12],
    "growth_interval": [0, 2.5, 2**40, np.inf],
}


@pytest.mark.parametrize(
    "name, got", [(name, got) for name, all_bad in BAD.items() for got in all_bad]
)
def test_bad_options_are_named(name, got):
    with pytest.raises(
        ValueError, match=f"DynamicLossScale: {name}: expected a .*got "
    ):
        DynamicLossScale(**{name: got})


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("got", ["a", None, 2j])
def test_options_that_are_no_numbers(name, got):
    with pytest.raises(
        TypeError, match=f"DynamicLossScale: {name}: expected a number, got "
    ):
        DynamicLossScale(**{name: got})


@pytest.mark.parametrize("finite", [1, 1.0, np.float32(1), np.ones(2)])
def test_finite_that_is_no_boolean(finite):
    with pytest.raises(
        TypeError, match="DynamicLossScale.adjust: finite: expected a boolean, got"
    ):
        DynamicLossScale().adjust(finite)
